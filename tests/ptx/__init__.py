"""A PTX interpreter as a test bench: runs what the compiler emitted over NumPy memory, and looks for trouble.

`parser` reads the text, `decode` turns each instruction into a closure, `machine` runs CTAs of warps over `memory`.
The instructions live in one file a family, which registers them with `decode.instruction`. What no family models is an
error that names its line. "PTX ISA" in these files is NVIDIA's Parallel Thread Execution ISA, by section title.
"""
