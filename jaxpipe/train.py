"""Trains a language model on text through one compiled pipeline.

    python -m jaxpipe.train --config=configs/quickstart.py --workdir=DIR [--config.FIELD=VALUE ...]
        [--method=my_method.py]

The same command resumes a run that has ended early, from its newest checkpoint. On several machines every process runs
it: see `jaxpipe.launch` and configs/launch/. Writes to DIR: config.json, schedule.json, schedule.svg, timeline.json,
metrics.jsonl (one object for each step), tensorboard/, checkpoints/, logs/ (one file for each process), profile/.

Exit status: 0 done; 2 an error, with its message; 75 stopped by SIGTERM, SIGUSR1 or SIGINT with a checkpoint, to be
started again; 76 another process is lost or stuck.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags
from absl.flags import FlagValues
from ml_collections import config_flags

from jaxpipe.command_line import main_of
from jaxpipe.config.command_line import config_of, define_config_file, define_method, define_process_flags
from jaxpipe.config.command_line import run as run_command
from jaxpipe.distributed.supervisor import STOPPED
from jaxpipe.training import fit


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --config, --workdir and the flags of a run."""
    define_config_file(values, arguments)
    define_method(values)
    flags.DEFINE_string("workdir", None, "Folder for the files of this run.", values)
    flags.DEFINE_bool("dry_run", False, "Check and compile everything, train and write nothing.", values)
    flags.DEFINE_string("profile_steps", "", "FIRST:LAST, both included: a profiler trace of these steps.", values)
    define_process_flags(values)


def execute(values: FlagValues) -> int:
    """Runs one training; returns the exit status."""
    run = fit(
        config_of(values),
        values.workdir,
        profile_steps=values.profile_steps,
        dry_run=values.dry_run,
        coordinator_address=values.coordinator_address,
        num_processes=values.num_processes,
        process_id=values.process_id,
        name=config_flags.get_config_filename(values["config"]),
    )
    return STOPPED if run.is_stopped else 0


main = main_of(
    run_command,
    execute,
    define_flags=define_flags,
    usage=__doc__,
    required={"config": "configs/quickstart.py", "workdir": "runs/first"},
)

if __name__ == "__main__":
    sys.exit(main())
