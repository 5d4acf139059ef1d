"""`deterministic=True` gives the same digits however devices and processes are wired, by gathering what it sums.

Where only two terms are summed the order means nothing: here the loss and the gradients of shared parameters
have four, along `data` and `pipe`.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import training_digests
from tiny_models import config_of, pipeline_of, relative_errors
from tiny_training import batches_on_mesh, start_training

from jaxpipe.compile.hlo import computations
from jaxpipe.distributed.ports import free_port
from jaxpipe.schedules import build

NUM_STEPS = 2
ORDERS = {"in order": (0, 1, 2, 3, 4, 5, 6, 7), "permuted": (5, 2, 7, 0, 3, 6, 1, 4)}


@cache
def train(order: str, *, deterministic: bool = True):
    """Metrics of each step, canonical parameters and first moments (of the gradients) after two, and the HLO."""
    config = config_of("gpt", num_layers=4, dropout=0.3)
    pipeline = pipeline_of(
        build("bitpipe", num_devices=2, num_microbatches=3),
        config,
        data=2,
        tensor=2,
        deterministic=deterministic,
        devices=[jax.devices()[i] for i in ORDERS[order]],
    )
    state, train_step = start_training(pipeline, config)
    metrics = []
    for batch in batches_on_mesh(pipeline)[:NUM_STEPS]:
        state, of_step = train_step(state, batch)
        metrics.append(jax.tree.map(float, of_step))
    trees = jax.jit(pipeline.from_stages)(state.params), jax.jit(pipeline.from_stages)(state.optimizer[0].mu)
    return metrics, jax.tree.map(np.asarray, trees), train_step.as_text()


@pytest.mark.slow
def test_permuted_devices_give_the_same_digits():
    metrics, trees, _ = train("in order")
    other_metrics, other_trees, _ = train("permuted")
    assert other_metrics == metrics
    jax.tree.map(np.testing.assert_array_equal, other_trees, trees)


@pytest.mark.slow
def test_the_order_of_adding_changes_only_the_last_digits():
    """Bounds: an order of adding a few terms changes a sum by some eps = 6e-8 of its terms."""
    metrics, (params, moments), _ = train("in order")
    other_metrics, (other_params, other_moments), _ = train("in order", deterministic=False)
    for found, wanted in zip(other_metrics, metrics, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
    assert max(relative_errors(other_params, params).values()) <= 1e-6
    assert max(relative_errors(other_moments, moments).values()) <= 1e-6


def float_sums(text: str) -> list[str]:
    """Names of the instructions that sum floats over devices in an order of XLA's choice."""
    found, _ = computations(text)
    names = []
    for computation in found.values():
        for instruction in computation.instructions:
            if re.match("(all-reduce|reduce-scatter)(-start)?$", instruction.opcode) and "f32[" in instruction.shape:
                combine = [found[name].root for name in instruction.called]
                # The largest of some numbers is the same in any order.
                names += [instruction.name] if any(root and root.opcode != "maximum" for root in combine) else []
    return names


@pytest.mark.slow
def test_deterministic_programs_leave_no_sum_over_devices_to_xla():
    assert float_sums(train("in order")[2]) == []


@pytest.mark.slow
def test_other_programs_do():
    assert len(float_sums(train("in order", deterministic=False)[2])) > 10


def digests_of_processes(num_processes: int, folder: Path) -> dict[str, str]:
    """By shard; where processes hold the same one, it is the same."""
    coordinator = f"localhost:{free_port()}"
    outputs = [folder / f"{process} of {num_processes}.json" for process in range(num_processes)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    program = Path(__file__).parent / "training_digests.py"
    processes = [
        subprocess.Popen(
            [sys.executable, program, output, str(num_processes), str(process), coordinator],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process, output in enumerate(outputs)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, said[-4000:]
    finally:
        for process in processes:
            process.kill()
    found: dict[str, str] = {}
    for output in outputs:
        held = json.loads(output.read_text())
        assert all(found.get(shard, digest) == digest for shard, digest in held.items())
        found |= held
    return found


@pytest.mark.slow
def test_two_processes_give_the_same_digits_as_one(tmp_path):
    one = training_digests.train(jax.devices()[:4])
    assert len(set(one.values())) > 20
    assert digests_of_processes(2, tmp_path) == one
