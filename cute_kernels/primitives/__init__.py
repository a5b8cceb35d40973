"""One instruction or idiom a function, on plain DSL values; called while a kernel is traced."""
