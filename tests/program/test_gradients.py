"""The pipelined step has the loss and every gradient of plain `jax.grad`; the bound, `tiny_gpt` explains."""

from itertools import product

import jax
import pytest
import tiny_gpt
from tiers import tiers
from tiny_gpt import LARGEST_ERROR, expected_loss_and_grads, make_batch, make_params, make_pipeline, num_valid
from tiny_models import relative_errors

from jaxpipe.schedules import build

# D, N, layers per stage, tied, data axis: each value of the full grid, with both schedules.
FEW = tiers(
    [],
    ci=[
        ("1f1b", 1, 3, (8,), True, 1),
        ("gpipe", 2, 17, (7, 1), True, 1),
        ("1f1b", 4, 3, (2, 2, 3, 1), True, 2),
    ],
    slow=[
        ("gpipe", 1, 8, (8,), False, 2),
        ("1f1b", 2, 8, (4, 4), False, 2),
        ("1f1b", 3, 1, (3, 3, 2), False, 1),
        ("gpipe", 4, 1, (2, 2, 2, 2), False, 1),
        ("1f1b", 8, 17, (1, 1, 1, 1, 1, 1, 1, 1), True, 1),
    ],
)


def splits(num_devices: int) -> list[tuple[int, ...]]:
    """Even, one layer more than stages, one layer fewer than two a stage; all in at most 15 layers."""
    even = (2,) * num_devices if num_devices < 8 else (1,) * 8
    uneven = ((1,) * (num_devices - 1) + (2,), (1,) + (2,) * (num_devices - 1))
    return list(dict.fromkeys([even, *uneven])) if num_devices > 1 else [even]


ALL = [
    (name, num_devices, num_microbatches, layers_per_stage, tied, data)
    for name, num_devices, num_microbatches, (tied, data) in product(
        ("1f1b", "gpipe"), (1, 2, 3, 4, 8), (1, 3, 8, 17), ((True, 1), (False, 1), (False, 2))
    )
    for layers_per_stage in (splits(num_devices) if data == 1 else splits(num_devices)[-1:])
    if num_devices * data <= 8
]


def assert_equivalent(name, num_devices, num_microbatches, layers_per_stage, tied, data):
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    num_layers = sum(layers_per_stage)
    pipeline = make_pipeline(
        schedule, num_layers=num_layers, layers_per_stage=layers_per_stage, tie_embeddings=tied, data=data
    )
    tiny_gpt.assert_equivalent(pipeline, tie_embeddings=tied)


@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)))
def test_loss_and_every_gradient_are_those_of_plain_grad(case):
    assert_equivalent(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=lambda case: "-".join(map(str, case)))
def test_loss_and_every_gradient_are_those_of_plain_grad_everywhere(case):
    assert_equivalent(*case)


@pytest.mark.ci
def test_the_bound_would_show_a_lost_microbatch():
    few, many = (expected_loss_and_grads(8, num_microbatches)[1] for num_microbatches in (16, 17))
    few = jax.tree.map(lambda leaf: leaf.astype("float32"), few)
    assert min(relative_errors(few, many).values()) > 100 * LARGEST_ERROR


@pytest.mark.parametrize(
    "case",
    tiers([], ci=[("1f1b", 4, 8, 8, True, 2)], slow=[("gpipe", 2, 3, 8, False, 1), ("1f1b", 1, 3, 8, True, 1)]),
    ids=str,
)
def test_the_loss_alone_is_the_same(case):
    name, num_devices, num_microbatches, num_layers, tied, data = case
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    pipeline = make_pipeline(schedule, num_layers=num_layers, tie_embeddings=tied, data=data)
    batch = make_batch(num_microbatches)
    params = pipeline.to_stages(make_params(num_layers, tie_embeddings=tied))
    expected, _ = expected_loss_and_grads(num_layers, num_microbatches, tie_embeddings=tied)
    assert float(pipeline.loss(params, batch, 1 / num_valid(batch))) == pytest.approx(float(expected), rel=1e-5)
    assert float(pipeline.loss(params, batch)) == pytest.approx(float(expected) * num_valid(batch), rel=1e-5)
