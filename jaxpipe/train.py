"""Trains a language model on text through one compiled pipeline.

    python -m jaxpipe.train --config=configs/quickstart.py --workdir=DIR [--config.FIELD=VALUE ...]

The same command goes on with a run that has ended early, from its newest checkpoint. On several machines every
process runs it: see `jaxpipe.launch` and configs/launch/. Writes to DIR: config.json, schedule.json, schedule.svg,
timeline.json, metrics.jsonl (one object a step), tensorboard/, checkpoints/, logs/ (a file of each process), profile/.

Exit status: 0 done; 2 an error that is said; 75 stopped by SIGTERM or SIGINT, with a checkpoint, to be started again;
76 another process is lost or stuck.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from absl import flags
from absl.flags import FlagValues
from ml_collections import ConfigDict, config_flags

from jaxpipe.checkpoints import CHECKPOINTS, Checkpoints, Keep
from jaxpipe.config import build_schedule, check
from jaxpipe.config.command_line import define_config_file, define_process_flags, run
from jaxpipe.distributed.log import log_to, say
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.drawing import svg
from jaxpipe.huggingface import copied_path, copy_source_model
from jaxpipe.schedules import simulate
from jaxpipe.training import workdir
from jaxpipe.training.claim import claimed
from jaxpipe.training.loop import Loop
from jaxpipe.training.memory import check_memory
from jaxpipe.training.profiler import Profiler, ProfileSteps, done_in_words, profile_steps
from jaxpipe.training.report import report
from jaxpipe.training.resume import changes, check_first_step
from jaxpipe.training.same_data import check_same_as_first, check_same_data, write_fingerprint
from jaxpipe.training.same_schedule import check_same_schedule, keep_schedule
from jaxpipe.training.setup import Setup, optimizer_and_step, put_batch, set_up
from jaxpipe.training.start import first_state
from jaxpipe.training.step import make_eval_step, state_like
from jaxpipe.training.timeline import write_timeline

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may start the same command again


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run(
        execute,
        define_flags=define_flags,
        usage=__doc__,
        arguments=arguments,
        required={"config": "configs/quickstart.py", "workdir": "runs/first"},
    )


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --config, --workdir and what goes with them."""
    define_config_file(values, arguments)
    flags.DEFINE_string("workdir", None, "Folder for the files of this run.", values)
    flags.DEFINE_bool("dry_run", False, "Check and compile everything, train and write nothing.", values)
    flags.DEFINE_string("profile_steps", "", "FIRST:LAST, both included: a profiler trace of these steps.", values)
    define_process_flags(values)


def execute(values: FlagValues) -> None:
    """One training run, top to bottom."""
    # ---- Config: everything that can be wrong is found before anything is compiled
    config = values.config
    check(config, name=config_flags.get_config_filename(values["config"]))
    traced_steps = profile_steps(values.profile_steps, num_steps=config.train.steps)
    with ProcessGroup(
        values.coordinator_address, values.num_processes, values.process_id, lost_after_s=config.train.lost_after_s
    ) as processes:
        train(values, processes, traced_steps)


def train(values: FlagValues, processes: ProcessGroup, traced_steps: ProfileSteps | None) -> None:
    """The run of a checked config, in one of its processes."""
    config: ConfigDict = values.config
    with ExitStack() as stack:
        # ---- The folder of the run: a new one, or one to go on with
        path = workdir.check(values.workdir)
        goes_on = processes.agree("goes_on", str(workdir.holds_run(path))) == str(True)
        claim = claimed(values.workdir, is_first=processes.is_first, agree=processes.agree)
        if goes_on:
            if not values.dry_run:
                stack.enter_context(claim)
            _take_up(path, config)

        # ---- Text, devices, model, pipeline
        check_same_schedule(processes, build_schedule(config))
        setup = set_up(config, num_processes=processes.count)
        config.mesh.platform = setup.devices.platform
        _check_data(path, setup, processes, goes_on=goes_on)
        optimizer, train_step = optimizer_and_step(config, setup.model, setup.pipeline)
        like = state_like(setup.model, setup.pipeline, optimizer)
        batch = setup.train_batches.at(0)
        check_memory(setup.pipeline, like, batch)

        # ---- State: the first one, or that of the newest checkpoint
        checkpoints = stack.enter_context(_checkpoints(path, config, setup, read_only=values.dry_run))
        if goes_on and processes.agree("has_checkpoint", str(bool(checkpoints.steps()))) == str(True):
            num_done, state = checkpoints.restore(like)
            say(f"goes on    from the checkpoint of step {num_done}")
        else:
            num_done, state = 0, first_state(config, setup, optimizer)
            if goes_on:
                check_first_step(path)
                say("goes on    from step 0: it has written no checkpoint yet")
        batch = put_batch(setup.pipeline, batch)
        say(report(setup, state, batch))
        if done := done_in_words(traced_steps, num_done):
            say(f"profile    {done}")
        if num_done >= config.train.steps:
            say(f"done       all {config.train.steps} steps, before")
            return

        # ---- Files of the run: not before all that can be wrong has been found
        start = time.perf_counter()
        train_step = train_step.lower(state, batch)
        eval_step = make_eval_step(setup.pipeline).lower(state.params, batch)
        if not values.dry_run:
            if not goes_on:
                stack.enter_context(claim)
            with workdir.writing(values.workdir):
                log_to(path, process=processes.index)
                if processes.is_first:
                    _write_files(path, config, setup, goes_on=goes_on)

        # ---- Compiled steps
        train_step, eval_step = train_step.compile(), eval_step.compile()
        del batch
        say(f"compiled   in {time.perf_counter() - start:.1f} s")
        if values.dry_run:
            say("dry run    ends here: nothing is trained or written")
            return

        # ---- Training
        profiler = stack.enter_context(Profiler(path, traced_steps))
        loop = Loop(config, path, processes, setup, checkpoints, profiler, train_step, eval_step)
        num_done = loop.run(state, num_done=num_done)

        # ---- The end: the last checkpoint is complete before the run says so
        processes.begin("the last checkpoint")
        checkpoints.wait()
        if checkpoints.steps():
            say(f"checkpoint {path / CHECKPOINTS / str(checkpoints.steps()[-1])}")
        if num_done < config.train.steps:
            say(f"stopped    because {processes.stop.reason}; the same command goes on from the newest checkpoint")
            sys.exit(EXIT_STOPPED)


def _checkpoints(path: Path, config: ConfigDict, setup: Setup, *, read_only: bool) -> Checkpoints:
    keep = Keep(config.checkpoint.keep_last, config.checkpoint.keep_every, config.checkpoint.keep_best)
    return Checkpoints(path / CHECKPOINTS, pipeline=setup.pipeline, keep=keep, read_only=read_only, say=say)


def _take_up(path: Path, config: ConfigDict) -> None:
    """Checks that the run in `path` can go on as `config` says, and says what changes."""
    if config.checkpoint.init_from:
        source = workdir.path_of(config.checkpoint.init_from)
        config.data.tokenizer = copied_path(config.data.tokenizer, source, path)
    for change in changes(path, config):
        say(f"changed    {change}")


def _check_data(path: Path, setup: Setup, processes: ProcessGroup, *, goes_on: bool) -> None:
    """Checks that all processes read the same text, and the same as the run that goes on."""
    fingerprint = setup.corpus.fingerprint
    check_same_as_first(processes.agree("data", fingerprint.to_json()), fingerprint, process=processes.index)
    if goes_on:
        check_same_data(path, fingerprint)


def _write_files(path: Path, config: ConfigDict, setup: Setup, *, goes_on: bool) -> None:
    """Writes what a run leaves besides its numbers; the config last, since with it a run has begun."""
    if config.checkpoint.init_from and not goes_on:
        source = workdir.path_of(config.checkpoint.init_from)
        copy_source_model(source, path)
        config.data.tokenizer = copied_path(config.data.tokenizer, source, path)
    keep_schedule(path, setup.pipeline.schedule)
    (path / workdir.SCHEDULE).write_text(svg(simulate(setup.pipeline.schedule)))
    write_timeline(path, setup)
    write_fingerprint(path, setup.corpus.fingerprint)
    workdir.write_config(path, config)


if __name__ == "__main__":
    sys.exit(main())
