"""Starts several local processes of one program and ends them together.

    python -m jaxpipe.launch --num_processes=P [--processes_per_device=1] [--module=jaxpipe.train] -- ARGUMENTS

Each process is `python -m MODULE ARGUMENTS --coordinator_address=localhost:PORT --num_processes=P --process_id=i`, and
takes the i-th GPU where there are GPUs. With --processes_per_device=N it takes GPU i // N and a part of its memory, to
try several processes on one GPU. The launcher then sets what NCCL and JAX need for that, and prints it; an environment
variable that is set already stays as it is.

The launcher prints their output with the number of the process before every line: `[2] ...`, and hands SIGTERM, SIGINT
and SIGHUP (a terminal that closes; as SIGTERM) on to all processes, once; a SIGINT after that kills them. When one
process fails, the others get SIGTERM and, --grace_s later, SIGKILL. The exit code is that of the first process that
failed (128 + n where signal n ended it), 75 where all have stopped on request, else 0. No process outlives the
launcher.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from absl import flags
from absl.flags import FlagValues

from jaxpipe.command_line import define_number, exit_status, parse
from jaxpipe.distributed import shared_device
from jaxpipe.distributed.supervisor import JOIN_FLAGS, Group, commands_of
from jaxpipe.errors import ConfigError

_MOST_PROCESSES = 1024  # each is a Python with JAX
EXAMPLE = "python -m jaxpipe.launch --num_processes=4 -- --config=configs/quickstart.py --workdir=runs/quickstart"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # The first --: what the processes get may have one of its own.
    split = arguments.index("--") if "--" in arguments else len(arguments)
    own = arguments[:split]
    for_processes = arguments[split + 1 :]

    def command() -> int:
        values = FlagValues()
        define_flags(values)
        _parse(values, own)
        check(values, for_processes)
        return launch(values, for_processes)

    return exit_status(command)


def define_flags(values: FlagValues) -> None:
    """Defines the launcher's own flags."""
    help_text = "Processes to start on this machine; with GPUs as many as there are GPUs, times --processes_per_device."
    flags.DEFINE_integer(
        "num_processes", None, help_text, lower_bound=1, upper_bound=_MOST_PROCESSES, flag_values=values
    )
    help_text = "Processes that share a GPU and its memory, to see that they work together; it says nothing of speed."
    most = shared_device.MOST_PROCESSES_PER_DEVICE
    flags.DEFINE_integer("processes_per_device", 1, help_text, lower_bound=1, upper_bound=most, flag_values=values)
    flags.DEFINE_string("module", "jaxpipe.train", "What `python -m` runs in each.", values)
    help_text = "Seconds from SIGTERM to SIGKILL, once a process has failed."
    define_number(values, "grace_s", 10.0, help_text, what="time", is_positive=False)


def launch(values: FlagValues, arguments: Sequence[str]) -> int:
    """Starts the processes with `arguments` and waits for them; returns the exit code."""
    count = values.num_processes
    commands = commands_of(("-m", values.module), arguments, count)
    per_device = values.processes_per_device
    # With address, count, number and devices all given, jax looks for no cluster, not even in a SLURM job.
    alone = [{"JAX_LOCAL_DEVICE_IDS": str(process)} for process in range(count)]
    devices = _shared_devices(count, per_device) if per_device > 1 else alone
    # Unbuffered, so that lines of several processes come in the order of time.
    environments = [os.environ | {"PYTHONUNBUFFERED": "1"} | variables for variables in devices]
    with Group(commands, environments, grace_s=values.grace_s) as group:
        return group.wait()


def _shared_devices(count: int, per_device: int) -> list[dict[str, str]]:
    """For each process the variables that let it share its device, without those that are set; prints all."""
    nccl = shared_device.installed_nccl()
    wanted = [shared_device.variables(process, processes_per_device=per_device, nccl=nccl) for process in range(count)]
    given = shared_device.given(os.environ)
    transport = f"NCCL {shared_device.in_words(nccl)}" if nccl else "no NCCL found: sockets, which every version takes"
    lines = [f"{per_device} processes on each device; {transport}"]
    for name in wanted[0]:
        values = [variables[name] for variables in wanted]
        # A variable that is equal for all is shown once.
        new = f"{name}={' '.join(values if len(set(values)) > 1 else values[:1])}"
        lines.append(f"{name} stays {given[name]}" if name in given else new)
    print("\n".join(f"jaxpipe.launch: {line}" for line in lines), file=sys.stderr, flush=True)
    return [{name: value for name, value in variables.items() if name not in given} for variables in wanted]


def check(values: FlagValues, arguments: Sequence[str]) -> None:
    """Raises ConfigError for flags that name no program, or `arguments` of its processes that the launcher sets."""
    if not _exists(values.module):
        raise ConfigError(
            f"no module {values.module!r}",
            rule="launch-module: --module is what `python -m` runs, as jaxpipe.train",
            picture=f"looked from {os.getcwd()}",
            repair="give the module's name with dots, without .py",
        )
    count = values.num_processes
    per_device = values.processes_per_device
    if count % per_device:
        raise ConfigError(
            f"--num_processes={count} with --processes_per_device={per_device}",
            rule="launch-devices: every device has equally many processes",
            picture=f"{count} = {count // per_device} x {per_device} + {count % per_device}",
            repair=f"set --num_processes={-(-count // per_device) * per_device}",
        )
    for argument in arguments:
        # Both --flag=VALUE and -flag; a value without dashes may look like a name.
        if argument.lstrip("-").partition("=")[0] in JOIN_FLAGS and argument.startswith("-"):
            raise ConfigError(
                f"the argument {argument!r} comes after --",
                rule=f"launch-arguments: the launcher itself sets {', '.join(f'--{name}' for name in JOIN_FLAGS)}",
                picture=EXAMPLE,
                repair="leave it out; --num_processes stands before --",
            )


def _exists(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
        # `python -m` runs a package's __main__.
        is_package = spec is not None and spec.submodule_search_locations is not None
        return (importlib.util.find_spec(f"{module}.__main__") if is_package else spec) is not None
    except (ImportError, ValueError):  # an error of the package that contains it
        return False


def _parse(values: FlagValues, arguments: Sequence[str]) -> None:
    try:
        parse(values, arguments, usage=__doc__, required={"num_processes": "4"})
    except ConfigError as error:
        raise ConfigError(
            str(error).splitlines()[0],
            rule="launch-flags: the launcher's flags stand before --, those of the processes after it",
            picture=EXAMPLE,
            repair="add or correct it, or put -- before it; --help lists the flags",
        ) from None


if __name__ == "__main__":
    sys.exit(main())
