"""The axis of docs/add_an_axis.md, in a copy of the package: one row, and everything that reads rows has it."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from patched_package import num_changed, patched_package

from jaxpipe.checkpoints import Checkpoints, Keep
from jaxpipe.config import check
from jaxpipe.config.base import base_config
from jaxpipe.training.batches import put_batch
from jaxpipe.training.setup import optimizer_and_step, set_up
from jaxpipe.training.step import init_state

ROOT = Path(__file__).parents[1]
PAGE = "docs/add_an_axis.md"
MOST_EDITS = 6
FIELDS = {
    "mesh": {"platform": "cpu", "pipe": 2, "data": 1},
    "model": {"num_layers": 2, "hidden": 8, "num_heads": 1},
    "data": {"files": f"{ROOT}/jaxpipe/units.py", "batch_size": 8, "seq_len": 8},
    "pipeline": {"num_microbatches": 2},
    # Adam divides by the root of the second moment: a larger epsilon does not blow rounding up, see test_equality.
    "optimizer": {"epsilon": 1e-3},
    "train": {"steps": 3, "eval_every": 3, "eval_batches": 1},
}
ESTIMATES = """
import sys
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config.base import base_config
from jaxpipe.estimate import Roofline, estimate, memory, setting_of
from jaxpipe.train import main
def setting(**sizes):
    config = base_config()
    config.pipeline.num_microbatches, config.mesh.pipe = 4, 1
    config.mesh.update(sizes)
    return setting_of(config, parse_topology("a100-80g:1x4"))
alone, repeated = setting(), setting(repeat=2)
assert repeated.num_gpus == 2 * alone.num_gpus
assert repeated.microbatch_size == alone.microbatch_size
assert memory(repeated) == memory(alone)
steps = [estimate(each, Roofline.of(each.topology.hardware)).step_s for each in (alone, repeated)]
assert steps[0] == steps[1]
sys.exit(main(sys.argv[1:]))
"""


def trained_without_the_axis():
    """The state and the metrics of every step of one copy, and its pipeline."""
    config = base_config()
    for section, fields in FIELDS.items():
        config[section].update(fields)
    check(config)
    setup = set_up(config)
    model, pipeline = setup.task.model, setup.pipeline
    optimizer, step = optimizer_and_step(setup.spec, model, pipeline)
    state, metrics = init_state(model, pipeline, optimizer, seed=config.train.seed), []
    for number in range(config.train.steps):
        batch = put_batch(pipeline, setup.task.train_batches.at(number))
        state, of_step = step(state, lambda batch=batch: batch)
        metrics.append(of_step)
    return state, metrics, pipeline


def test_the_page_is_one_row_and_fits_the_package(tmp_path):
    assert list(num_changed(PAGE)) == ["jaxpipe/cluster/axes.py"]
    assert sum(num_changed(PAGE).values()) <= MOST_EDITS
    ours, theirs = ((root / "jaxpipe/cluster/axes.py").read_text() for root in (ROOT, patched_package(PAGE, tmp_path)))
    assert theirs.count("\n") == ours.count("\n") + 1


@pytest.mark.ci
def test_an_axis_that_repeats_trains_as_without_it_and_its_checkpoint_is_read_without_the_axis(tmp_path):
    """On repeat 2 x data 2 x pipe 2; to rounding the steps are those of one device, and so is the state after them."""
    arguments = [f"--config={ROOT}/tests/train/base.py", f"--workdir={tmp_path / 'run'}"]
    arguments += [
        f"--config.{part}.{name}={value}" for part, fields in FIELDS.items() for name, value in fields.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", ESTIMATES, *arguments, "--config.mesh.repeat=2", "--config.mesh.data=2"],
        cwd=patched_package(PAGE, tmp_path),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    state, metrics, pipeline = trained_without_the_axis()
    theirs = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm"):
        expected = [float(of_step[name]) for of_step in metrics]
        np.testing.assert_allclose([row[name] for row in theirs], expected, rtol=1e-5)

    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    with Checkpoints(tmp_path / "run/checkpoints", pipeline=pipeline, keep=Keep(), read_only=True) as saved:
        step, restored = saved.restore(like)
    assert step == len(metrics)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), restored, state)
