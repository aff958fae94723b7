"""The names of the types that a model runs in: arguments of commands are checked before torch is imported."""

DTYPE_NAMES = ("float32", "bfloat16", "float16")
