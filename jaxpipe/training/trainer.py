"""`fit` trains from Python, as `python -m jaxpipe.train` does: the command is a shell around it.

Goes in: a config and a folder; for a model of one's own also the model and its batches. Comes out: the state, the
parameters and the metrics. The same call in the same folder resumes a run that has ended early.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from jaxpipe.checkpoints import CHECKPOINTS, Checkpoints, Keep
from jaxpipe.config import check
from jaxpipe.config.base import RunConfig
from jaxpipe.config.costs import is_costs_file
from jaxpipe.config.pipeline import is_known
from jaxpipe.distributed.log import logging_to, say
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.drawing import svg
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.source_model import check_vocabulary, copied_path, copy_source_model
from jaxpipe.mesh.jax_defaults import default_rules
from jaxpipe.mesh.xla_flags import flags_of
from jaxpipe.models import TokenLoss
from jaxpipe.program import Pipeline
from jaxpipe.program.checks import check_jax
from jaxpipe.schedules import simulate
from jaxpipe.schedules.spec import forget_files
from jaxpipe.training import profiler, resume, run_folder
from jaxpipe.training.batches import put_batch
from jaxpipe.training.given import (
    Given,
    Model,
    check_no_loss,
    check_no_model,
    check_optimizer_fields,
    given_task,
)
from jaxpipe.training.given_batches import BatchSource
from jaxpipe.training.loop import Loop, OnStep
from jaxpipe.training.metrics import keep_rows
from jaxpipe.training.report import check_memory, report, write_timeline
from jaxpipe.training.same_data import check_same_as_first, check_same_data, write_fingerprint
from jaxpipe.training.setup import Setup, devices_of, first_state, optimizer_and_step, set_up
from jaxpipe.training.step import TrainState, make_eval_step, state_like


@dataclass(frozen=True)
class Run:
    """A run as `fit` leaves it.

    Attributes:
        path: folder of the run.
        num_done: number of steps done.
        is_stopped: whether a signal or `on_step` stopped the run before its last step.
        state: train state after these steps, staged and sharded; None after a dry run.
        pipeline: pipeline of the run.
    """

    path: Path
    num_done: int
    is_stopped: bool
    state: TrainState | None
    pipeline: Pipeline

    @cached_property
    def params(self) -> Any:
        """The canonical parameters, {"shared": ..., "layers": ...}, layers with a leading dim of their number.

        Raises:
            ConfigError: a dry run has none.
        """
        if self.state is None:
            raise ConfigError(
                "a dry run has no parameters",
                rule="dry-run: it compiles a step, and trains and restores nothing",
                repair="call fit without dry_run=True",
            )
        return jax.jit(self.pipeline.from_stages)(self.state.params)

    @cached_property
    def average(self) -> Any:
        """The average of the weights, like `params`; None if `optimizer.average_decay` is 0, and after a dry run."""
        average = self.state and self.state.average
        return average and jax.jit(self.pipeline.from_stages)(average)

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of all steps of the run, those of earlier calls included: {"step": 1, "loss": ...}, ..."""
        rows = self.path / run_folder.METRICS
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []


def fit(
    config: ConfigDict | RunConfig,
    workdir: str | Path,
    *,
    model: Model | None = None,
    params: Any = None,
    train_batches: BatchSource | None = None,
    heldout_batches: BatchSource = (),
    loss: TokenLoss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    on_start: Callable[[Pipeline], object] | None = None,
    on_step: OnStep | None = None,
    profile_steps: str = "",
    dry_run: bool = False,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    name: str = "the config",
) -> Run:
    """Trains what `config` describes, or a model given here, and returns the run; resumes a run that `workdir` holds.

    On CPUs call it, or `jaxpipe.mesh.choose_devices`, before any other use of JAX: the process then has devices enough.

    Args:
        config: a config of `base_config`; of `base_config("given")` with `model`.
        workdir: folder for the files of the run, as of the command.
        model: a model of one's own. Batches come with it and, in itself or as `params`, initial parameters.
        params: canonical parameters to start from; None: initial ones, or those of `checkpoint.init_from`.
        train_batches: a function of the step, 0 or more, or an iterable that begins anew each time. A batch is a dict
            of arrays [batch size, ...], of the same shapes each time; every process and every call must give the same
            ones. A batch is asked for when its step begins, the first one before that, too. With a config of a family
            they take the place of its data, and have "tokens" and "targets": see `jaxpipe.training.token_batch`.
        heldout_batches: with `train_batches`: held-out batches, likewise; without any, nothing is evaluated.
        loss: with a config of a family, a loss of one's own over each target's log-probability and entropy, in place of
            the mean cross entropy; held-out losses are of it, too. Checkpoints do not keep it: a run that goes on gets
            it again, and `jaxpipe.eval` knows the cross entropy alone.
        optimizer: an optax optimizer in place of AdamW by `config.optimizer`, of which `max_grad_norm` and
            `average_decay` stay in force, as does `model.bias_rate`. An optimizer that makes something else of stacked
            layers than of one after the other is refused; see `jaxpipe.training.by_layer`. Its labels and masks see
            {"shared": ..., "layers": ...}, the latter of one layer. If it sums over parameters, as by clipping, they
            see the dims [device, chunk, layer] in front, too, and must decide by name.
        on_start: (pipeline), called once before the first step in every process; what `jaxpipe.huggingface.stream` and
            others need of the run in `on_step`.
        on_step: (step, metrics, state), called after each step in every process; a true result, equal in all
            processes, stops the run, as a signal does. Arrays of `state` that it keeps stay as they are: the run then
            goes on with copies. `Run.pipeline.from_stages` brings kept parameters into the model's order.
        profile_steps: "FIRST:LAST", both included: a profiler trace of these steps.
        dry_run: whether to check and compile everything, and to train and write nothing.
        coordinator_address, num_processes, process_id: of several processes, as the flags of the command.
        name: source of the config, for errors.

    Raises:
        JaxpipeError: config, schedule, data, checkpoints or other processes; what the command prints.
    """
    check_jax()
    forget_files()
    told = RunConfig.of(config)
    path = run_folder.path_of(str(workdir))
    if not is_known(told.pipeline.schedule):
        told = resume.with_kept_schedule(path, told)
    if is_costs_file(told.pipeline.costs) and run_folder.holds_run(path):
        told = resume.with_kept_costs(path, told)  # the file may be gone
    if model is None:
        check_no_model(params=params, heldout_batches=heldout_batches if train_batches is None else ())
        check(told, name=name)
    else:
        check_no_loss(loss)
    if optimizer is not None:
        check_optimizer_fields(told)
    traced_steps = profiler.profile_steps(profile_steps, num_steps=told.train.steps)
    with (
        # Settings of the user for JAX stay in force for functions of a model of one's own.
        default_rules() if model is None else jax.transfer_guard("allow"),
        ExitStack() as log_file,  # still open when the processes say why they end
        ProcessGroup(coordinator_address, num_processes, process_id, lost_after_s=told.train.lost_after_s) as processes,
        ExitStack() as stack,
    ):
        path = run_folder.check(str(workdir))
        task = None
        if model is not None:
            if min(told.mesh.axes.values()) > 0:
                devices_of(told, num_processes=processes.count)  # before the batches use JAX
            told, task = given_task(
                told, model=model, params=params, train_batches=train_batches, heldout_batches=heldout_batches
            )

        # ---- The folder of the run: a new one, or one to resume
        resume.check_same_config(processes, told)
        is_resumed = processes.agree("is_resumed", str(run_folder.holds_run(path))) == str(True)
        lock = run_folder.run_lock(str(path), is_first=processes.is_first, broadcast=processes.agree)
        if is_resumed and not dry_run:
            stack.enter_context(lock)

        # ---- Model, data, devices, pipeline
        if is_resumed:
            told = _resumed(path, told)
        elif task is None:
            check_vocabulary(told)
        given = Given(loss, train_batches, heldout_batches)
        setup = set_up(told, task, given=given, num_processes=processes.count)
        spec = setup.spec
        if not is_resumed:
            spec = replace(spec, config=_with_source_tokenizer(path, spec.config))
            setup = replace(setup, spec=spec)
        task = setup.task
        pipeline = setup.pipeline
        flags = flags_of(spec.config.mesh.platform)  # after `set_up`, which adds some
        for change in resume.flags_change(path, flags) if is_resumed else ():
            say(f"changed    {change}")
        resume.check_same_schedule(processes, spec.schedule, spec.config.pipeline.costs)
        first = processes.agree("data", task.fingerprint.to_json())
        check_same_as_first(first, task.fingerprint, process=processes.index)
        if is_resumed:
            check_same_data(path, task.fingerprint)
        optimizer_is_given = optimizer is not None
        optimizer, train_step = optimizer_and_step(spec, task.model, pipeline, optimizer)
        like = state_like(task.model, pipeline, optimizer, train_step.init)
        batch = task.train_batches.at(0)
        check_memory(train_step, like, batch)

        # ---- State: the initial one, or that of the newest checkpoint
        fields = spec.config.checkpoint
        keep = Keep(fields.keep_last, fields.keep_every, fields.keep_best)
        checkpoints = stack.enter_context(
            Checkpoints(path / CHECKPOINTS, pipeline=pipeline, keep=keep, read_only=dry_run, say=say)
        )
        if is_resumed and processes.agree("has_checkpoint", str(bool(checkpoints.steps()))) == str(True):
            num_done, state = checkpoints.restore(like)
            say(f"resumes    from the checkpoint of step {num_done}")
        else:
            num_done = 0
            state = first_state(setup, optimizer)
            if is_resumed:
                resume.check_no_checkpoint_lost(path)
                say("resumes    from step 0: the run has written no checkpoint yet")
        state = train_step.init(state)
        batch = put_batch(pipeline, batch)
        say(report(setup, train_step, state, batch, optimizer_is_given=optimizer_is_given))
        if done := profiler.format_done(traced_steps, num_done):
            say(f"profile    {done}")
        if num_done >= spec.config.train.steps:
            say(f"done       all {spec.config.train.steps} steps were done before")
            return Run(path, num_done, is_stopped=False, state=state, pipeline=pipeline)

        # ---- Files of the run, written once all checks have passed
        start = time.perf_counter()
        train_step = train_step.lower(state, batch)
        eval_step = make_eval_step(pipeline).lower(state.params, batch)
        if not dry_run:
            if not is_resumed:
                stack.enter_context(lock)
                _check_still_new(path, processes)
            with run_folder.writing(str(path)):
                log_file.enter_context(logging_to(path, process=processes.index))
                if processes.is_first:
                    _write_files(path, setup, flags, is_resumed=is_resumed, num_done=num_done)

        # ---- Compiled steps
        train_step = train_step.compile()
        eval_step = eval_step.compile()
        del batch
        say(f"compiled   in {time.perf_counter() - start:.1f} s")
        if dry_run:
            say("dry run    ends here: nothing is trained or written")
            return Run(path, num_done, is_stopped=False, state=None, pipeline=pipeline)

        # ---- Training
        processes.meet("compiled")
        if on_start is not None:
            on_start(pipeline)
        traces = stack.enter_context(profiler.Profiler(path, traced_steps))
        loop = Loop(path, processes, setup, checkpoints, traces, train_step, eval_step, on_step)
        state, num_done = loop.run(state, num_done=num_done)

        # ---- The end: the last checkpoint is complete before the run says so
        processes.begin("the last checkpoint", waits_for_files=True)
        checkpoints.wait()
        if checkpoints.steps():
            say(f"checkpoint {path / CHECKPOINTS / str(checkpoints.steps()[-1])}")
        is_stopped = num_done < spec.config.train.steps
        if is_stopped:
            reason = processes.stop.reason or "on_step asked for it"
            say(f"stopped    because {reason}; the same command resumes from the newest checkpoint")
        return Run(path, num_done, is_stopped=is_stopped, state=state, pipeline=pipeline)


def _check_still_new(path: Path, processes: ProcessGroup) -> None:
    """Raises ConfigError if another command has begun a run in the folder since this one looked."""
    if processes.agree("is_still_new", str(not run_folder.holds_run(path))) != str(True):
        raise ConfigError(
            f"--workdir={path} was empty when this run was set up, and now holds another run",
            rule="workdir-run: a new run never overwrites one that is there",
            repair="run the same command again to resume that run, or name another folder",
        )


def _resumed(path: Path, config: RunConfig) -> RunConfig:
    """`config` with what the run in `path` keeps, if that can be resumed with it; reports what changes."""
    config = resume.with_kept_costs(path, _with_source_tokenizer(path, config))
    for change in resume.config_changes(path, config):
        say(f"changed    {change}")
    return config


def _write_files(path: Path, setup: Setup, flags: list[str], *, is_resumed: bool, num_done: int) -> None:
    """Writes the files of a run other than its metrics; the config last, which marks that the run has begun.

    If all steps run again, their rows go before that: with the new `checkpoint.save_every` they may be more than a run
    without checkpoints can have. Else the metrics drop those that do.
    """
    config = setup.spec.config
    if config.checkpoint.init_from and not is_resumed:
        copy_source_model(run_folder.path_of(config.checkpoint.init_from), path)
    resume.write_run_schedule(path, setup.spec.schedule)
    (path / run_folder.SCHEDULE_PICTURE).write_text(svg(simulate(setup.spec.schedule)))
    resume.write_flags(path, flags)
    write_timeline(path, setup)
    write_fingerprint(path, setup.task.fingerprint)
    if not num_done:
        keep_rows(path / run_folder.METRICS, last_step=0)
    run_folder.write_config(path, resume.named_as_before(path, config))


def _with_source_tokenizer(path: Path, config: RunConfig) -> RunConfig:
    """`config` with the run's own copy of the tokenizer of the model that it started from, if it has one."""
    if not config.checkpoint.init_from:
        return config
    source = run_folder.path_of(config.checkpoint.init_from)
    return config.replaced({"data.tokenizer": copied_path(config.data.tokenizer, source, path)})
