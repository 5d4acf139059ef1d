"""Several processes of one core and one thread each, which measure together; messages go through gloo on this machine.

The one that is called starts the others: the same command, with flags that say which each of them is. Process p runs on
core p; the first prints what was found, which the one that started them reads.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags
from absl.flags import FlagValues

from jaxpipe.errors import ConfigError

_MARK = "jaxpipe.bench.pinned: "
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def define_flags(values: FlagValues) -> None:
    """Defines --num_processes, and the flags that `launch` sets."""
    flags.DEFINE_integer(
        "num_processes", 1, "Processes of one core and one thread each.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("process", None, "Which of the processes this is; set by the first.", flag_values=values)
    flags.DEFINE_string("coordinator", None, "Where the processes meet; set by the first.", values)


def check_process(process: int | None, coordinator: str | None, *, num_processes: int) -> None:
    """Raises ConfigError for flags of which one is missing, or a number outside."""
    if process is None and coordinator is None:
        return
    if process is None or coordinator is None or not 0 <= process < num_processes:
        raise ConfigError(
            f"--process={process} and --coordinator={coordinator} with --num_processes={num_processes}\n"
            "  rule bench-process: one of several processes has both, and its number is 0 .. num_processes-1\n"
            "  repair: leave both out; --num_processes alone starts the processes, which set them"
        )


def launch(program: Sequence[str], arguments: Sequence[str], *, num_processes: int) -> Any:
    """Starts the Python `program` with `arguments` in each process; what the first of them has told.

    Args:
        program: as ("-m", "jaxpipe.bench"); it understands the flags above.
        arguments: of the program.
        num_processes: 2 or more.

    Raises:
        ConfigError: more processes than cores, or a process failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if not 2 <= num_processes <= len(cores):
        raise ConfigError(
            f"--num_processes={num_processes} on {len(cores)} cores\n"
            "  rule core-per-process: 2 or more processes, each with a core of its own\n"
            f"  repair: set --num_processes={max(2, len(cores))}, or leave it out for virtual devices in one process"
        )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": _ONE_THREAD, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, *program, *arguments, f"--process={p}", f"--coordinator={coordinator}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for p in range(num_processes)
    ]
    outputs = [process.communicate() for process in processes]
    for p, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode:
            raise ConfigError(f"process {p} of {num_processes} ended with code {process.returncode}:\n{errors[-4000:]}")
    line = next(line for line in outputs[0][0].splitlines() if line.startswith(_MARK))
    return json.loads(line.removeprefix(_MARK))


def join(process: int, *, num_processes: int, coordinator: str) -> None:
    """Makes this one of the processes: on its core, with one device, and together with the others."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[process]})
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, num_processes, process)


def tell(found: Any) -> None:
    """Tells `found`, as JSON has it, to the one that started the processes; said by the first of them alone."""
    if jax.process_index() == 0:
        print(_MARK + json.dumps(found), flush=True)
