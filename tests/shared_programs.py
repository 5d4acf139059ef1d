"""Equal programs are compiled once in a process, whichever tests run them: one executable, as of one jitted function.

A compilation cache would load a copy from its folder, see `conftest`. Equal are the whole text with its names, the
compiler's options and the devices. What calls Python is compiled each time.
"""

from collections import OrderedDict
from typing import Any

MOST = 64  # programs that are kept, those used last


def share_programs() -> None:
    """From now on, in this process."""
    from jax._src import compiler
    from jax._src.interpreters import mlir

    compile_anew = compiler.backend_compile_and_load
    programs: OrderedDict[Any, Any] = OrderedDict()

    def shared(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        if host_callbacks:
            return compile_anew(backend, module, devices, options, host_callbacks)
        text = mlir.module_to_bytecode(module)
        key = backend, text, options.SerializeAsString(), tuple(device.id for device in devices)
        if key not in programs:
            programs[key] = compile_anew(backend, module, devices, options, host_callbacks)
        programs.move_to_end(key)
        while len(programs) > MOST:
            programs.popitem(last=False)
        return programs[key]

    compiler.backend_compile_and_load = shared
