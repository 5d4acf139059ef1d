"""Three training steps on a data x pipe x tensor mesh are those of one device in plain jax.

Compared are the loss and the global norm of every step, the clipped gradients of the first, and what three
AdamW steps changed. All is float32, so both sides round, eps = 6e-8, and sum in another order.

Gradients: as in `test_gradients`, 1e-5 of each parameter's norm in each layer; the norms and losses too.

AdamW divides by the root of the second moment. Where a gradient is zero in truth it would blow the rounding
noise up to a whole learning rate: adding a vector to all keys changes no probability, so the biases of
GPT's keys are such. Its epsilon is therefore 1e-3, about the median size of a gradient's elements: those
above still are normalized, and noise of 1e-8 changes a parameter by 1e-5 learning rates. Later steps take
their gradients where earlier ones have led, so all errors add up: 1e-4 of each parameter's change, and of
each moment. The companions show that a lost microbatch or an unsummed gradient is 100 times that.
"""

from functools import cache
from itertools import product
from typing import NamedTuple

import jax
import numpy as np
import pytest
from sixteen_devices import run_on_sixteen_devices
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors
from tiny_training import Training, batches, family_of, mean_loss_and_grads, train_on_one_device, train_pipelined

from jaxpipe.schedules import build
from jaxpipe.sharding import KeptChunks

LARGEST_ERROR, LARGEST_ERROR_LATER = 1e-5, 1e-4
NUM_LAYERS, NUM_MICROBATCHES = 6, 5
EVEN = None
SHARDS = ("none", "optimizer", "gradients", "weights")
WHOLE_BIASES = ("['output']['bias']", "['down']['bias']")  # added after the sum over `tensor`


class Case(NamedTuple):
    family: str
    schedule: str
    data: int
    pipe: int
    tensor: int
    recompute: str
    attention: str = "xla"
    dropout: float = 0.0
    tied: bool = False
    layers_per_stage: tuple[int, ...] | None = EVEN
    shard: str = "optimizer"
    num_kept: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "-".join(map(str, self if self.num_kept else self[:-1]))

    def kept(self, *num_kept: int) -> "Case":
        """With shared weights, of which devices keep so many chunks, and sums of so many."""
        return self._replace(shard="weights", num_kept=num_kept)


GPT = Case("gpt", "1f1b", 2, 2, 2, "none", dropout=0.3, tied=True)
LLAMA = Case("llama", "interleaved_1f1b", 2, 2, 2, "none", attention="chunked")
THREE_STEPS = tiers(
    [],
    ci=[
        Case("llama", "zb_h1", 2, 2, 2, "attention", shard="weights"),
    ],
    slow=[
        Case("gpt", "1f1b", 2, 2, 2, "full:3,1", dropout=0.3, tied=True, shard="gradients", layers_per_stage=(3, 3)),
        GPT,
        LLAMA,
        Case("llama", "v_min", 1, 2, 2, "full", layers_per_stage=(1, 2, 1, 2)),
        Case("bert", "bpipe", 2, 4, 1, "full:1,1,0,0", dropout=0.3, layers_per_stage=(2, 2, 1, 1), shard="weights"),
        Case("llama", "v_half", 2, 2, 2, "attention:1,1,0,1", layers_per_stage=(1, 2, 1, 2)),
        Case("gpt", "dualpipe", 2, 4, 1, "full:2,1,0,1", dropout=0.3, layers_per_stage=(2, 2, 1, 1)),
        # Its last loop of rounds changes no shared gradient: without an order, their sum over devices ran beside it.
        Case("gpt", "dualpipe", 2, 4, 1, "none", dropout=0.3, tied=True),
        Case("bert", "bitpipe", 2, 2, 2, "attention", layers_per_stage=(1, 2, 1, 2)),
        Case("llama", "gpipe", 2, 2, 2, "attention", tied=True, shard="none"),
        Case("llama", "1f1b", 2, 4, 1, "none", attention="chunked", layers_per_stage=(1, 2, 1, 2)),
        Case("gpt", "1f1b", 1, 1, 2, "none", attention="chunked", dropout=0.3),
        Case("gpt", "1f1b", 2, 1, 2, "full", tied=True, shard="none"),
        Case("bert", "1f1b", 2, 2, 2, "none", dropout=0.3, tied=True),
        Case("gpt", "zb_h1", 2, 2, 2, "none", dropout=0.3, tied=True),
        Case("gpt", "1f1b", 2, 1, 2, "full", dropout=0.3, tied=True, shard="weights"),
        Case("bert", "chimera", 2, 4, 1, "none", tied=True, shard="weights"),
        Case("gpt", "bpipe", 2, 4, 1, "none", layers_per_stage=(1, 2, 1, 2), shard="gradients"),
        Case("gpt", "1f1b", 2, 2, 2, "full:3,1", dropout=0.3, tied=True, layers_per_stage=(3, 3)).kept(1, 1),
        Case("llama", "breadth_first", 2, 2, 2, "attention:1,1,0,1", layers_per_stage=(1, 2, 1, 2)).kept(1),
        Case("llama", "zb_v", 2, 2, 2, "none").kept(1, 1),
        Case("gpt", "interleaved_1f1b", 2, 2, 2, "full", dropout=0.3).kept(2, 1),
        Case("bert", "chimera", 2, 4, 1, "none", layers_per_stage=(1, 2, 1, 2)).kept(1),
    ],
)
SIXTEEN = Case("gpt", "1f1b", 2, 4, 2, "none", dropout=0.3, tied=True)

# Dropout in half of GPT's and BERT's, chunked attention where nothing else is left out, tied embeddings over one or
# four stages.
ALL = [
    Case(
        family,
        schedule,
        data,
        pipe,
        tensor,
        recompute,
        attention="chunked" if recompute == "none" and data == tensor else "xla",
        dropout=0.3 if family != "llama" and (schedule == "1f1b") == (recompute != "full") else 0.0,
        tied=pipe != 2,
        # Of two devices along `data` in turn, so that each value meets each of the other fields.
        shard=SHARDS[(pipe + tensor + len(recompute) + (family == "llama") + (schedule == "gpipe")) % len(SHARDS)],
    )
    for family, schedule, data, pipe, tensor, recompute in product(
        ("gpt", "llama", "bert"), ("1f1b", "gpipe"), (1, 2), (1, 2, 4), (1, 2), ("none", "attention", "full")
    )
]
ALL += [
    case._replace(schedule=several)
    for case in ALL
    for schedule, pipe, several in (
        ("1f1b", 2, "bitpipe"),
        ("gpipe", 2, "interleaved_1f1b"),
        ("1f1b", 4, "chimera"),
        ("gpipe", 4, "mixpipe"),
        ("1f1b", 2, "v_min"),
        ("gpipe", 2, "zb_h1"),
        ("1f1b", 4, "dualpipe"),
        ("gpipe", 4, "zb_h2"),
    )
    if (case.schedule, case.pipe) == (schedule, pipe)
]
ALL += [
    Case("gpt", "bitpipe", 2, 2, 2, "full", dropout=0.3, tied=True, layers_per_stage=(1, 2, 1, 2)),
    Case("gpt", "1f1b", 1, 4, 2, "attention", dropout=0.3, layers_per_stage=(1, 3, 1, 1)),
    Case("bert", "interleaved_1f1b", 1, 2, 2, "full", dropout=0.3),
]


def config_of_case(case: Case):
    # Of a list the layers that it does not count compute nothing again.
    recompute = "none" if ":" in case.recompute else case.recompute
    choices = {"recompute": recompute, "attention": case.attention, "tie_embeddings": case.tied}
    return config_of(case.family, num_layers=NUM_LAYERS, dropout=case.dropout, **choices)


def pipelined(case: Case) -> Training:
    schedule = build(case.schedule, num_devices=case.pipe, num_microbatches=NUM_MICROBATCHES)
    config = config_of_case(case)
    pipeline = pipeline_of(
        schedule,
        config,
        data=case.data,
        tensor=case.tensor,
        layers_per_stage=case.layers_per_stage,
        shard=case.shard,
        kept=KeptChunks(*case.num_kept),
        again=case.recompute,
    )
    return train_pipelined(pipeline, config)


@cache
def expected(family: str, dropout: float, tied: bool) -> Training:
    """The reference keeps all that backward needs, and knows no chunks."""
    config = config_of(family, num_layers=NUM_LAYERS, dropout=dropout, tie_embeddings=tied)
    return train_on_one_device(config, batches(NUM_MICROBATCHES, family_of(config)))


def changes(case: Case, training: Training):
    return jax.tree.map(lambda after, before: after - before, training.params, random_params(config_of_case(case)))


def all_relative_errors(case: Case, found: Training, wanted: Training) -> list[tuple[float, dict[str, float]]]:
    """What is compared, each with the largest error that it may have."""
    return [
        (LARGEST_ERROR, relative_errors(found.grads, wanted.grads)),
        (LARGEST_ERROR_LATER, relative_errors(changes(case, found), changes(case, wanted))),
        (LARGEST_ERROR_LATER, relative_errors(found.first_moment, wanted.first_moment)),
        (LARGEST_ERROR_LATER, relative_errors(found.second_moment, wanted.second_moment)),
    ]


def assert_equal(case: Case) -> None:
    found, wanted = pipelined(case), expected(case.family, case.dropout, case.tied)
    assert found.losses == pytest.approx(wanted.losses, rel=LARGEST_ERROR)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=LARGEST_ERROR)
    for largest, errors in all_relative_errors(case, found, wanted):
        assert max(errors.values()) <= largest, errors


@pytest.mark.parametrize("case", THREE_STEPS, ids=str)
def test_three_steps_are_those_of_one_device(case):
    assert_equal(case)


def assert_equal_on_sixteen_devices(case: Case) -> None:
    run_on_sixteen_devices(f"from test_equality import Case, assert_equal\nassert_equal({case!r})")


@pytest.mark.slow
def test_three_steps_on_sixteen_devices_are_those_of_one():
    assert_equal_on_sixteen_devices(SIXTEEN)


@pytest.mark.parametrize("family", tiers([], slow=["gpt", "llama"]))
def test_the_loss_alone_is_that_of_one_device_and_drops_nothing(family):
    config = config_of(family, num_layers=NUM_LAYERS, dropout=0.3 if family == "gpt" else 0.0)
    batch, params = random_batch(3, seed=0), random_params(config)
    pipeline = pipeline_of(build("1f1b", num_devices=2, num_microbatches=3), config, data=2, tensor=2)
    wanted, _ = mean_loss_and_grads(config, params, batch)
    staged = jax.jit(pipeline.to_stages)(params)
    found = pipeline.loss(staged, batch, 1 / (batch["targets"] >= 0).sum())
    assert float(found) == pytest.approx(wanted, rel=LARGEST_ERROR)


def without_the_last_microbatch(batch):
    return jax.tree.map(lambda leaf: leaf[:-1], batch)


def without_the_second_sequences(batch):
    """As if the gradients of the second `data` device were not summed."""
    return {**batch, "targets": np.where(np.arange(2)[:, None] == 1, -1, batch["targets"])}


@pytest.mark.parametrize("lose", [without_the_last_microbatch, without_the_second_sequences])
@pytest.mark.parametrize("case", tiers([], ci=[GPT], slow=[LLAMA]), ids=["gpt", "llama"])
def test_the_bounds_would_show_what_is_lost(case, lose):
    config = config_of(case.family, num_layers=NUM_LAYERS, dropout=case.dropout, tie_embeddings=case.tied)
    less = train_on_one_device(config, list(map(lose, batches(NUM_MICROBATCHES))))
    for largest, errors in all_relative_errors(case, less, expected(case.family, case.dropout, case.tied)):
        assert min(errors.values()) > 100 * largest, errors


@pytest.mark.ci
def test_the_bounds_would_show_a_gradient_that_is_not_summed_over_tensor(monkeypatch):
    monkeypatch.setattr("jaxpipe.program.partition.sum_over", lambda x, axes, *, deterministic: x)
    config, batch = config_of("gpt", num_layers=2), random_batch(1, seed=0)
    pipeline = pipeline_of(build("1f1b", num_devices=1, num_microbatches=1), config, tensor=2)
    params = jax.jit(pipeline.to_stages)(random_params(config))
    _, grads = pipeline.loss_and_grads(params, batch, 1 / (batch["targets"] >= 0).sum())
    _, wanted = mean_loss_and_grads(config, random_params(config), batch)
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted)
    # A device has all of the gradient of what is split over tensor, and half the sequence's of what is not.
    summed = {path for path in errors if "norm" in path or "position" in path or path.endswith(WHOLE_BIASES)}
    assert all((error > 100 * LARGEST_ERROR) == (path in summed) for path, error in errors.items()), errors


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_three_steps_are_those_of_one_device_everywhere(case):
    (assert_equal if case.data * case.pipe * case.tensor <= 8 else assert_equal_on_sixteen_devices)(case)
