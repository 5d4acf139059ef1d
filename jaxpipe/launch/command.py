"""The command line of the launcher: its own flags, and behind `--` what belongs to the processes."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence

from absl import app, flags

from jaxpipe.distributed.supervisor import Group
from jaxpipe.errors import ConfigError, JaxpipeError

FLAGS = flags.FLAGS
OWN = ("coordinator_address", "num_processes", "process_id")
EXAMPLE = "python -m jaxpipe.launch --num_processes=4 -- --config=configs/quickstart.py --workdir=runs/quickstart"


def run() -> None:
    """Runs the command and exits; what the user can mend is printed without traceback, with exit status 2."""
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, for_processes = sys.argv[:split], sys.argv[split + 1 :]

    def main(_: Sequence[str]) -> int:
        check(for_processes)
        return launch(for_processes)

    try:
        app.run(main, argv=own, flags_parser=_parse)
    except JaxpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def launch(arguments: Sequence[str]) -> int:
    """Starts the processes with `arguments` and waits for them; returns the exit code."""
    count = FLAGS.num_processes
    address = f"localhost:{free_port()}"
    commands = [
        [
            *(sys.executable, "-m", FLAGS.module, *arguments),
            f"--coordinator_address={address}",
            f"--num_processes={count}",
            f"--process_id={process}",
        ]
        for process in range(count)
    ]
    # With address, count, number and devices all given, jax looks for no cluster, in a job of SLURM neither.
    own = [{"PYTHONUNBUFFERED": "1", "JAX_LOCAL_DEVICE_IDS": str(process)} for process in range(count)]
    environments = [os.environ | _screen() | each for each in own]
    with Group(commands, environments, grace_s=FLAGS.grace_s) as group:
        return group.wait()


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def check(arguments: Sequence[str]) -> None:
    """Raises ConfigError for flags that name no program, or `arguments` of its processes that the launcher sets."""
    if FLAGS.num_processes is None:
        raise ConfigError(
            "--num_processes is missing\n"
            "  rule launch-processes: --num_processes=P says how many processes to start on this machine\n"
            f"      {EXAMPLE}\n"
            "  repair: add it; with GPUs as many as there are GPUs"
        )
    if not _exists(FLAGS.module):
        raise ConfigError(
            f"no module {FLAGS.module!r}\n"
            "  rule launch-module: --module is what `python -m` runs, as jaxpipe.train\n"
            f"      looked from {os.getcwd()}\n"
            "  repair: give the module's name with dots, without .py"
        )
    for argument in arguments:
        if argument.lstrip("-").partition("=")[0] in OWN and argument.startswith("-"):
            raise ConfigError(
                f"the argument {argument!r} stands after --\n"
                f"  rule launch-arguments: the launcher itself sets {', '.join(f'--{name}' for name in OWN)}\n"
                f"      {EXAMPLE}\n"
                "  repair: leave it out; --num_processes stands before --"
            )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of the package that it stands in
        return False


def _parse(arguments: list[str]) -> list[str]:
    flags.DEFINE_integer("num_processes", None, "Processes to start on this machine.", lower_bound=1)
    flags.DEFINE_string("module", "jaxpipe.train", "What `python -m` runs in each.")
    flags.DEFINE_float("grace_s", 10.0, "From SIGTERM to SIGKILL, once a process has failed.", lower_bound=0.0)
    for name in ("num_processes", "module", "grace_s"):
        FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])  # so that --help lists it
    try:
        left = FLAGS(arguments)
        wrong = f"the argument {left[1]!r} belongs to no flag" if len(left) > 1 else ""
    except flags.Error as error:
        left, wrong = arguments, f"the command line cannot be read: {error}"
    if wrong:
        raise ConfigError(
            f"{wrong}\n"
            "  rule launch-flags: the launcher's flags stand before --, those of the processes after it\n"
            f"      {EXAMPLE}\n"
            "  repair: mend this argument, or put -- before it; --help lists the flags"
        )
    return left


def _screen() -> dict[str, str]:
    """The size of our terminal, which a progress bar cannot ask of a pipe; nothing where there is none."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return {}
    return {"COLUMNS": str(size.columns - len("[00] ")), "LINES": str(size.lines)}
