"""Trains a language model on text through one compiled pipeline.

    python -m jaxpipe.train --config=configs/quickstart.py --workdir=DIR [--config.FIELD=VALUE ...]

Writes to DIR: config.json, schedule.svg, metrics.jsonl (one object a step), tensorboard/, checkpoints/.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
from absl import flags
from ml_collections import config_flags

from jaxpipe.config import check
from jaxpipe.config.command_line import require, run
from jaxpipe.huggingface import copied_name, copy_origin
from jaxpipe.schedules import simulate
from jaxpipe.schedules.render import svg
from jaxpipe.training import workdir
from jaxpipe.training.checkpoint import save_params
from jaxpipe.training.evaluate import heldout_losses
from jaxpipe.training.losses import in_words
from jaxpipe.training.metrics import MetricsWriter, check_finite
from jaxpipe.training.report import report
from jaxpipe.training.setup import optimizer_and_step, put_batch, set_up
from jaxpipe.training.start import first_state
from jaxpipe.training.step import make_eval_step

FLAGS = flags.FLAGS


def define_flags(arguments: list[str]) -> None:
    """Defines --config and --workdir."""
    require("config", arguments, example="configs/quickstart.py")
    require("workdir", arguments, example="runs/first")
    config_flags.DEFINE_config_file("config", help_string="Python file with get_config(); see jaxpipe.config.base.")
    flags.DEFINE_string("workdir", None, "Folder for the files of this run.")


def main(_: Sequence[str]) -> None:
    """One training run, top to bottom."""
    # ---- Config: everything that can be wrong is found here, before anything is compiled
    config = FLAGS.config
    check(config, name=config_flags.get_config_filename(FLAGS["config"]))
    workdir.check_new(FLAGS.workdir)

    # ---- Text, devices, model, pipeline
    setup = set_up(config)
    pipeline = setup.pipeline
    config.mesh.platform = setup.devices.platform

    # ---- State and traced step
    optimizer, train_step = optimizer_and_step(config, setup.model, pipeline)
    state = first_state(config, setup, optimizer)
    first_batch = put_batch(pipeline, setup.train_batches.at(0))
    print(report(setup, state, first_batch), flush=True)
    start = time.perf_counter()
    train_step = train_step.lower(state, first_batch)

    # ---- Files of the run: not before all that can be wrong has been found
    path = workdir.create(FLAGS.workdir)
    if config.checkpoint.init_from:
        source = workdir.path_of(config.checkpoint.init_from)
        copy_origin(source, path)
        config.data.tokenizer = copied_name(config.data.tokenizer, source, path)
    workdir.write_config(path, config)
    (path / workdir.SCHEDULE).write_text(svg(pipeline.schedule, simulate(pipeline.schedule)))

    # ---- Compiled steps
    train_step = train_step.compile()
    print(f"compiled   in {time.perf_counter() - start:.1f} s", flush=True)
    eval_step = make_eval_step(pipeline)

    # ---- Training
    num_tokens = config.data.batch_size * config.data.seq_len
    with MetricsWriter(path, num_steps=config.train.steps) as metrics:
        for step in range(1, config.train.steps + 1):
            start = time.perf_counter()
            state, numbers = train_step(state, put_batch(pipeline, setup.train_batches.at(step - 1)))
            numbers = jax.tree.map(float, numbers)
            step_time_s = time.perf_counter() - start
            numbers = {"loss": numbers.pop("loss"), **numbers}
            check_finite(step, numbers)
            numbers |= {"tokens_per_s": num_tokens / step_time_s, "step_time_s": step_time_s}

            # ---- Held-out loss, now and then and at the end
            if step % config.train.eval_every == 0 or step == config.train.steps:
                heldout = heldout_losses(eval_step, setup, state.params, num_batches=config.train.eval_batches)
                check_finite(step, heldout)
                metrics.say(f"step {step}: held-out {in_words(heldout)}")
                numbers |= heldout
            metrics.write(step, numbers)

    # ---- Checkpoint
    if config.checkpoint.save_at_end:
        saved = save_params(path, step=config.train.steps, params=state.params, pipeline=pipeline)
        print(f"checkpoint {saved}")


if __name__ == "__main__":
    run(main, define_flags=define_flags)
