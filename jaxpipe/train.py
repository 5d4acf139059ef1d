"""Trains a language model on text through one compiled pipeline.

    python -m jaxpipe.train --config=configs/quickstart.py --workdir=DIR [--config.FIELD=VALUE ...]
        [--method=my_method.py]

The same command resumes a run that has ended early, from its newest checkpoint. On several machines every process runs
it: see `jaxpipe.launch` and configs/launch/. Writes to DIR: config.json, schedule.json, schedule.svg, timeline.json,
metrics.jsonl (one object for each step), tensorboard/, checkpoints/, logs/ (one file for each process), profile/.

Exit status: 0 done; 2 an error, with its message; 75 stopped by SIGTERM or SIGINT with a checkpoint, to be started
again; 76 another process is lost or stuck.
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
from jaxpipe.config import check
from jaxpipe.config.command_line import config_of, define_config_file, define_method, define_process_flags, run
from jaxpipe.config.pipeline import is_known
from jaxpipe.distributed.log import log_to, say
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.drawing import svg
from jaxpipe.huggingface import copied_path, copy_source_model
from jaxpipe.schedules import simulate
from jaxpipe.training import resume, run_folder
from jaxpipe.training.batches import put_batch
from jaxpipe.training.loop import Loop
from jaxpipe.training.profiler import Profiler, ProfileSteps, format_done, profile_steps
from jaxpipe.training.report import check_memory, report, write_timeline
from jaxpipe.training.setup import Setup, first_state, optimizer_and_step, set_up
from jaxpipe.training.step import make_eval_step, state_like

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
    """Defines --config, --workdir and the flags of a run."""
    define_config_file(values, arguments)
    define_method(values)
    flags.DEFINE_string("workdir", None, "Folder for the files of this run.", values)
    flags.DEFINE_bool("dry_run", False, "Check and compile everything, train and write nothing.", values)
    flags.DEFINE_string("profile_steps", "", "FIRST:LAST, both included: a profiler trace of these steps.", values)
    define_process_flags(values)


def execute(values: FlagValues) -> None:
    """Runs one training, from top to bottom."""
    # ---- Config: all errors are found before anything is compiled
    config = config_of(values)
    if not is_known(config.pipeline.schedule):
        resume.keep_schedule(run_folder.path_of(values.workdir), config)
    check(config, name=config_flags.get_config_filename(values["config"]))
    traced_steps = profile_steps(values.profile_steps, num_steps=config.train.steps)
    with ProcessGroup(
        values.coordinator_address, values.num_processes, values.process_id, lost_after_s=config.train.lost_after_s
    ) as processes:
        train(values, processes, traced_steps)


def train(values: FlagValues, processes: ProcessGroup, traced_steps: ProfileSteps | None) -> None:
    """Trains in one of the processes of a run whose config is checked."""
    config: ConfigDict = values.config
    with ExitStack() as stack:
        # ---- The folder of the run: a new one, or one to resume
        path = run_folder.check(values.workdir)
        is_resumed = processes.agree("is_resumed", str(run_folder.holds_run(path))) == str(True)
        lock = run_folder.run_lock(values.workdir, is_first=processes.is_first, broadcast=processes.agree)
        if is_resumed:
            if not values.dry_run:
                stack.enter_context(lock)
            _check_resumable(path, config)

        # ---- Text, devices, model, pipeline
        setup = set_up(config, num_processes=processes.count)
        resume.check_same_schedule(processes, setup.pipeline.schedule, config.pipeline.costs)
        config.mesh.platform = setup.devices.platform
        _check_data(path, setup, processes, is_resumed=is_resumed)
        optimizer, train_step = optimizer_and_step(config, setup.model, setup.pipeline)
        like = state_like(setup.model, setup.pipeline, optimizer)
        batch = setup.train_batches.at(0)
        check_memory(setup.pipeline, like, batch)

        # ---- State: the initial one, or that of the newest checkpoint
        checkpoints = stack.enter_context(_checkpoints(path, config, setup, read_only=values.dry_run))
        if is_resumed and processes.agree("has_checkpoint", str(bool(checkpoints.steps()))) == str(True):
            num_done, state = checkpoints.restore(like)
            say(f"resumes    from the checkpoint of step {num_done}")
        else:
            num_done, state = 0, first_state(config, setup, optimizer)
            if is_resumed:
                resume.check_no_checkpoint_lost(path)
                say("resumes    from step 0: the run has written no checkpoint yet")
        batch = put_batch(setup.pipeline, batch)
        say(report(setup, state, batch))
        if done := format_done(traced_steps, num_done):
            say(f"profile    {done}")
        if num_done >= config.train.steps:
            say(f"done       all {config.train.steps} steps were done before")
            return

        # ---- Files of the run, written once all checks have passed
        start = time.perf_counter()
        train_step = train_step.lower(state, batch)
        eval_step = make_eval_step(setup.pipeline).lower(state.params, batch)
        if not values.dry_run:
            if not is_resumed:
                stack.enter_context(lock)
            with run_folder.writing(values.workdir):
                log_to(path, process=processes.index)
                if processes.is_first:
                    _write_files(path, config, setup, is_resumed=is_resumed)

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
            say(f"stopped    because {processes.stop.reason}; the same command resumes from the newest checkpoint")
            sys.exit(EXIT_STOPPED)


def _checkpoints(path: Path, config: ConfigDict, setup: Setup, *, read_only: bool) -> Checkpoints:
    keep = Keep(config.checkpoint.keep_last, config.checkpoint.keep_every, config.checkpoint.keep_best)
    return Checkpoints(path / CHECKPOINTS, pipeline=setup.pipeline, keep=keep, read_only=read_only, say=say)


def _check_resumable(path: Path, config: ConfigDict) -> None:
    """Checks that the run in `path` can be resumed with `config`, and reports what changes."""
    if config.checkpoint.init_from:
        source = run_folder.path_of(config.checkpoint.init_from)
        config.data.tokenizer = copied_path(config.data.tokenizer, source, path)
    resume.keep_costs(path, config)
    for change in resume.config_changes(path, config):
        say(f"changed    {change}")


def _check_data(path: Path, setup: Setup, processes: ProcessGroup, *, is_resumed: bool) -> None:
    """Checks that all processes read the same tokens, and the same ones as a resumed run before."""
    fingerprint = setup.corpus.fingerprint
    resume.check_same_as_first(processes.agree("data", fingerprint.to_json()), fingerprint, process=processes.index)
    if is_resumed:
        resume.check_same_data(path, fingerprint)


def _write_files(path: Path, config: ConfigDict, setup: Setup, *, is_resumed: bool) -> None:
    """Writes the files of a run other than its metrics; the config last, which marks that the run has begun."""
    if config.checkpoint.init_from and not is_resumed:
        source = run_folder.path_of(config.checkpoint.init_from)
        copy_source_model(source, path)
        config.data.tokenizer = copied_path(config.data.tokenizer, source, path)
    resume.write_run_schedule(path, setup.pipeline.schedule)
    (path / run_folder.SCHEDULE_PICTURE).write_text(svg(simulate(setup.pipeline.schedule)))
    write_timeline(path, setup)
    resume.write_fingerprint(path, setup.corpus.fingerprint)
    run_folder.write_config(path, resume.named_as_before(path, config))


if __name__ == "__main__":
    sys.exit(main())
