"""BPipe's loss and gradients are those of 1F1B, bit for bit: pages travel, and nothing is computed otherwise.

Which the 1F1B program has, other tests compare with plain `jax.grad`. The two programs are not the same: 1F1B has four
rounds in its body, BPipe six, and each device takes the same actions in the same order. So equality to the bit also
says that XLA fuses each action alike in both.
"""

import functools
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import tiny_mlp
from sixteen_devices import run_on_sixteen_devices
from tiny_models import config_of, pipeline_of, random_batch, random_params

from jaxpipe.program import Pipeline
from jaxpipe.schedules import Schedule, build

DROPOUT = 0.3
KEY_SEED = 3


class Case(NamedTuple):
    model: str
    num_devices: int
    num_microbatches: int
    layers_per_stage: tuple[int, ...]
    unit: str = "page"
    rolled: bool = True
    data: int = 1
    tensor: int = 1
    recompute: str = "none"
    dropout: float = 0.0
    tied: bool = False

    def __str__(self) -> str:
        return "-".join(map(str, self))


def uneven(num_devices: int) -> tuple[int, ...]:
    return tuple(1 + (2 * stage + 1) % 3 for stage in range(num_devices))


def bound(num_devices: int) -> int:
    """Obscura (USENIX ATC 2025), section 9.3, of BPipe: slots of any device."""
    return ceil((num_devices + 2) / 2)


MORE = [
    Case("mlp", 5, 11, uneven(5)),
]
SIXTEEN = [
    Case("mlp", 16, 33, uneven(16)),
    Case("mlp", 16, 15, (1,) * 16, unit="microbatch"),
]

ALL = [
    Case("mlp", 4, 16, uneven(4), unit="microbatch", data=2),
    Case("llama", 4, 9, (2,) * 4, data=2, recompute="full", tied=True),
    Case("mlp", 8, 32, (4,) * 8),
    Case("gpt", 4, 9, uneven(4), unit="microbatch", tensor=2, recompute="attention", dropout=DROPOUT),
]
ALL += [
    Case("mlp", num_devices, num_microbatches, layers_per_stage, unit=unit)
    for num_devices in (4, 5, 8, 16)
    for num_microbatches in (1, num_devices - 1, num_devices, 2 * num_devices + 1, 4 * num_devices)
    for layers_per_stage, unit in product(
        ((1,) * num_devices, (3,) * num_devices, uneven(num_devices)), ("page", "microbatch")
    )
]
ALL += [case._replace(rolled=False) for case in ALL if case.num_devices <= 5 and case.num_microbatches < 12]
# Dropout in half of GPT's, tied embeddings and uneven stages in half of all.
ALL += [
    Case(
        model,
        num_devices,
        (2 if tensor == 1 else 4) * num_devices + (data - 1),
        (2,) * num_devices if tensor == data else uneven(num_devices),
        unit="microbatch" if tensor > data else "page",
        data=data,
        tensor=tensor,
        recompute=recompute,
        dropout=DROPOUT if model == "gpt" and (num_devices == 5) == (recompute != "full") else 0.0,
        tied=num_devices != 5,
    )
    for model, num_devices, data, tensor, recompute in product(
        ("gpt", "llama"), (4, 5, 8), (1, 2), (1, 2), ("none", "attention", "full")
    )
    if num_devices * data * tensor <= 16
]


def run(case: Case, schedule: Schedule) -> tuple[Pipeline, Any]:
    """The pipeline, and (loss, gradients) in canonical layer order."""
    options: dict[str, Any] = {"layers_per_stage": case.layers_per_stage, "data": case.data, "rolled": case.rolled}
    num_layers = sum(case.layers_per_stage)
    if case.model == "mlp":
        pipeline = tiny_mlp.make_pipeline(schedule, num_layers=num_layers, **options)
        return pipeline, tiny_mlp.loss_and_grads(pipeline)
    config = config_of(
        case.model, num_layers=num_layers, dropout=case.dropout, recompute=case.recompute, tie_embeddings=case.tied
    )
    pipeline = pipeline_of(schedule, config, tensor=case.tensor, **options)
    params = jax.jit(pipeline.to_stages)(random_params(config))
    batch = random_batch(case.num_microbatches, seed=0)
    key = jax.random.key(KEY_SEED) if case.dropout else None
    loss, grads = pipeline.loss_and_grads(params, batch, 1.0, key)
    return pipeline, (loss, jax.jit(pipeline.from_stages)(grads))


@functools.cache
def loss_and_grads_of_1f1b(case: Case) -> Any:
    schedule = build("1f1b", num_devices=case.num_devices, num_microbatches=case.num_microbatches)
    return run(case, schedule)[1]


def assert_bit_equal(case: Case) -> None:
    schedule = build("bpipe", num_devices=case.num_devices, num_microbatches=case.num_microbatches, unit=case.unit)
    pipeline, found = run(case, schedule)
    wanted = loss_and_grads_of_1f1b(case._replace(unit="", rolled=True))
    assert (pipeline.table.num_lanes("parked_pages") > 0) == (case.num_microbatches > bound(case.num_devices))
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(found))
    # All sums are in one order. Where loops over layers have no known length, XLA may round their last bit otherwise.
    error = 2e-6 if len(set(case.layers_per_stage)) > 1 else 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=error, atol=error), found, wanted)


@pytest.mark.ci
@pytest.mark.parametrize("case", MORE, ids=str)
def test_loss_and_every_gradient_are_those_of_1f1b_to_the_bit(case):
    assert_bit_equal(case)


def assert_bit_equal_on_sixteen_devices(*cases: Case) -> None:
    run_on_sixteen_devices(
        f"from test_bpipe import Case, assert_bit_equal\nfor case in {cases!r}:\n    assert_bit_equal(case)"
    )


@pytest.mark.slow
def test_on_sixteen_devices_they_are_those_of_1f1b_to_the_bit():
    assert_bit_equal_on_sixteen_devices(*SIXTEEN)


@pytest.mark.ci
def test_the_loss_alone_is_that_of_1f1b_and_moves_nothing():
    losses = {}
    for name in ("1f1b", "bpipe"):
        pipeline = tiny_mlp.make_pipeline(build(name, num_devices=4, num_microbatches=9), num_layers=8)
        assert not pipeline.forward_table.num_lanes("parked_pages")
        params = jax.jit(pipeline.to_stages)(tiny_mlp.make_params(8))
        losses[name] = float(pipeline.loss(params, tiny_mlp.make_batch(9)))
    assert losses["bpipe"] == losses["1f1b"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_loss_and_every_gradient_are_those_of_1f1b_to_the_bit_everywhere(case):
    if case.num_devices * case.data * case.tensor <= 8:
        assert_bit_equal(case)
    else:
        assert_bit_equal_on_sixteen_devices(case)
