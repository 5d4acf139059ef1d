"""Pipeline-parallel training of large language models: schedules as data, one compiled SPMD program.

`jaxpipe.schedules` and `jaxpipe.lowering` need no JAX; names that do are imported when first used.
"""

__version__ = "0.2.0.dev0"  # pyproject.toml takes it from here
