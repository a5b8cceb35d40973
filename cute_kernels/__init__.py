"""Device code of ReplaySSM in CuTe DSL, and the boundary that compiles and launches it.

Layers, each knowing only those before it: `primitives` (one instruction or idiom a function), `replay` (the algebra of
checkpoint and records), `recurrences` (what a layer adds), `step` and `commit` (kernels). Nothing here knows torch
modules, pools or files, but for the cache of compiled kernels in `compile`.
"""
