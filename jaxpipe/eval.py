"""Prints the held-out loss of a run's newest checkpoint.

    python -m jaxpipe.eval --workdir=DIR [--average] [--config.FIELD=VALUE ...]

A checkpoint is independent of the mesh: `--config.mesh.pipe=2`, another schedule or other processes evaluate the same
parameters. Without such changes it takes the run's own schedule.json, whose file or method may be gone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags
from absl.flags import FlagValues
from ml_collections import config_flags

from jaxpipe.checkpoints import restore_params
from jaxpipe.command_line import main_of
from jaxpipe.config import base_config, check
from jaxpipe.config.command_line import (
    config_of,
    define_allow_code,
    define_average,
    define_method,
    define_process_flags,
    early_values,
    run,
)
from jaxpipe.distributed.log import say
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.python_file import is_python_file
from jaxpipe.training import run_folder
from jaxpipe.training.loop import heldout_losses
from jaxpipe.training.resume import check_same_schedule, with_kept_schedule
from jaxpipe.training.setup import set_up
from jaxpipe.training.step import format_losses, make_eval_step


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --workdir, and --config with the fields of that run's config.json."""
    # The flags of --config are the fields of this run's config, so --workdir is read before the flags are defined.
    given = early_values(define_run, arguments)
    define_run(values)
    config = run_folder.read_written(given.workdir, allow_code=given.allow_code) if given.workdir else base_config()
    config_flags.DEFINE_config_dict("config", config, "The run's config.", values, sys_argv=["command", *arguments])
    define_average(values)
    define_method(values)
    define_process_flags(values)


def define_run(values: FlagValues) -> None:
    """Defines --workdir and --allow_code."""
    flags.DEFINE_string("workdir", None, "Folder of a run.", values)
    define_allow_code(values)


def execute(values: FlagValues) -> None:
    """Runs one evaluation."""
    config = with_kept_schedule(run_folder.path_of(values.workdir), config_of(values))
    # A Python file that the user names now is the user's own; one that the run names is code that came with it.
    is_told = values.method or "config.pipeline.schedule" in values
    if is_python_file(config.pipeline.schedule) and not is_told and not values.allow_code:
        raise run_folder.refused_code(values.workdir, f"pipeline.schedule={config.pipeline.schedule!r}")
    check(config, name=f"{values.workdir}/{run_folder.CONFIG}")
    with ProcessGroup(
        values.coordinator_address, values.num_processes, values.process_id, lost_after_s=config.train.lost_after_s
    ) as processes:
        setup = set_up(config, num_processes=processes.count)
        # All processes must evaluate by one schedule, or they would wait for each other.
        check_same_schedule(processes, setup.spec.schedule, setup.spec.config.pipeline.costs)
        step, params = restore_params(
            run_folder.path_of(values.workdir),
            model=setup.task.model,
            pipeline=setup.pipeline,
            average=values.average,
            say=say,
        )
        eval_step = make_eval_step(setup.pipeline)
        # Always the same batches, so that losses of several checkpoints compare.
        heldout = heldout_losses(eval_step, setup, params, num_batches=config.train.eval_batches)
        say(f"devices    {setup.devices.reason}")
        of_average = ", average of the weights" if values.average else ""
        say(f"step {step}{of_average}: held-out {format_losses(heldout, unit=setup.task.loss_unit)}")


main = main_of(run, execute, define_flags=define_flags, usage=__doc__, required={"workdir": "runs/first"})

if __name__ == "__main__":
    sys.exit(main())
