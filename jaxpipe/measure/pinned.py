"""Measurements by several processes of one core and one thread each, with messages through gloo on this machine.

The command starts itself once more for each process, with flags that number them. Process p is pinned to core p.
Process 0 prints the result as one marked line of JSON, which the command reads.
"""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags
from absl.flags import FlagValues

from jaxpipe.distributed.join import check_flags
from jaxpipe.distributed.supervisor import Group, commands_of
from jaxpipe.errors import ConfigError

_MARK = "jaxpipe.measure.pinned: "
# XLA takes temporaries from the system in every step, which clears them page by page: of 2 MiB a thirtieth as many.
# glibc reads it when a process starts, if it is 2.35 or newer.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# One thread a process: Eigen's pool would spread over the cores of the other processes.
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def define_flags(values: FlagValues) -> None:
    """Defines --num_processes, and the flags that `launch` sets."""
    help_text = "Processes of one core and one thread each."
    flags.DEFINE_integer("num_processes", 1, help_text, lower_bound=1, flag_values=values)
    flags.DEFINE_integer("process_id", None, "Number of this process; set by the launcher.", flag_values=values)
    flags.DEFINE_string("coordinator_address", None, "Where the processes meet; set by the launcher.", values)


def is_launched(values: FlagValues) -> bool:
    """Whether `launch` has started this process; raises ConfigError if only some of its flags are set."""
    if values.process_id is None and values.coordinator_address is None:
        return False
    check_flags(values.coordinator_address, values.num_processes, values.process_id)
    return True


def launch(program: Sequence[str], arguments: Sequence[str], *, num_processes: int) -> Any:
    """Starts the Python `program` with `arguments` in each process; returns the result that process 0 told.

    Raises:
        ConfigError: more processes than cores, or a process failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if not 2 <= num_processes <= len(cores):
        raise ConfigError(
            f"--num_processes={num_processes} on {len(cores)} cores",
            rule="core-per-process: 2 or more processes, each with a core of its own",
            repair=f"set --num_processes={max(2, len(cores))}, or leave it out for virtual devices in one process",
        )
    environment = _HUGE_PAGES | os.environ | {"XLA_FLAGS": _ONE_THREAD, "JAX_PLATFORMS": "cpu"}
    # The last --num_processes on a command line wins, and it is the same number.
    commands = commands_of(program, arguments, num_processes)
    # Kept, not shown: the launcher prints one table in place of one from each process.
    outputs = io.BytesIO(), io.BytesIO()
    with Group(commands, [environment] * num_processes, grace_s=1.0, outputs=outputs) as group:
        code = group.wait()
    printed, errors = (output.getvalue().decode() for output in outputs)
    if code:
        raise ConfigError(
            f"one of {num_processes} processes ended with code {code}",
            rule="measuring-processes: all processes of a measurement come to its end",
            picture=errors[-4000:],
            repair="see what it printed last",
        )
    # The group prefixes lines with the number of their process.
    (line,) = (line for line in printed.splitlines() if line.startswith(f"[0] {_MARK}"))
    return json.loads(line.removeprefix(f"[0] {_MARK}"))


def join(values: Any) -> None:
    """Joins the other processes, pinned to one core and with one device; `values` has the flags of `define_flags`."""
    # Before JAX starts threads, which inherit it.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[values.process_id]})
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(values.coordinator_address, values.num_processes, values.process_id)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX waits for a request to save before the process ends


def tell(value: Any) -> None:
    """Prints `found` as JSON for the command that launched the processes; only process 0 does."""
    if jax.process_index() == 0:
        print(_MARK + json.dumps(value), flush=True)
