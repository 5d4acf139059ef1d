"""Sequences split over `context`: the steps of one device, packed documents too, and mistakes that the bounds show.

The reference is plain jax on one device with `xla` attention, which knows neither chunks nor tiles. Bounds are those of
`test_equality`.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_equality import LARGEST_ERROR, NUM_LAYERS, Case, all_relative_errors, expected
from test_packed_documents import NUM_LAYERS as NUM_PACKED_LAYERS
from test_packed_documents import NUM_MICROBATCHES as NUM_PACKED
from test_packed_documents import expected as expected_of_documents
from test_packed_documents import packed
from tiers import tiers
from tiny_models import SEQ_LEN, config_of, pipeline_of, random_batch, random_params, relative_errors
from tiny_training import mean_loss_and_grads, train_pipelined

from jaxpipe.errors import CompileError, ConfigError
from jaxpipe.mesh import ContextAxis, TensorAxis
from jaxpipe.models import LanguageModel, TokenLoss, attention_tiles
from jaxpipe.schedules import build
from jaxpipe.schedules.methods.registry import method_names

NUM_MICROBATCHES = 5


class Split(NamedTuple):
    """A family and schedule on a mesh with `context`."""

    family: str
    schedule: str
    context: int = 2
    pipe: int = 2
    tensor: int = 1
    data: int = 1
    recompute: str = "none"
    dropout: float = 0.0
    shard: str = "optimizer"

    def __str__(self) -> str:
        return "-".join(map(str, self))


THREE_STEPS = [
    Split("llama", "zb_v", context=4, recompute="full"),
    Split("gpt", "interleaved_1f1b", tensor=2, dropout=0.3, shard="gradients"),
    Split("llama", "1f1b", data=2, shard="weights"),
    Split("llama", "bpipe", pipe=4, recompute="full:1,1,0,0"),
    Split("gpt", "bitpipe", data=2, recompute="full", dropout=0.3),
    Split("gpt", "1f1b", context=4, pipe=1, tensor=2, dropout=0.3, shard="none"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", THREE_STEPS, ids=str)
def test_three_steps_are_those_of_one_device(case):
    choices = {"recompute": "none" if ":" in case.recompute else case.recompute, "attention": "chunked"}
    choices["tie_embeddings"] = False
    config = config_of(case.family, num_layers=NUM_LAYERS, dropout=case.dropout, **choices)
    schedule = build(case.schedule, num_devices=case.pipe, num_microbatches=NUM_MICROBATCHES)
    sizes = {"context": case.context, "tensor": case.tensor, "data": case.data}
    found = train_pipelined(pipeline_of(schedule, config, **sizes, shard=case.shard, again=case.recompute), config)
    wanted = expected(case.family, case.dropout, False)
    assert found.losses == pytest.approx(wanted.losses, rel=LARGEST_ERROR)
    like = Case(case.family, case.schedule, case.data, case.pipe, case.tensor, "none", dropout=case.dropout)
    for largest, errors in all_relative_errors(like, found, wanted):
        assert max(errors.values()) <= largest, errors


@cache
def reference(family: str, **choices):
    config = config_of(family, num_layers=2, **choices)
    return mean_loss_and_grads(config, random_params(config), random_batch(2, seed=0))


def errors_of(family: str, schedule: str = "1f1b", *, pipe: int = 1, **sizes: int):
    """Relative errors of the gradients of two layers, with nothing dropped."""
    config = config_of(family, num_layers=2, attention="chunked")
    pipeline = pipeline_of(build(schedule, num_devices=pipe, num_microbatches=2), config, **{"context": 2, **sizes})
    params = jax.jit(pipeline.to_stages)(random_params(config))
    batch = random_batch(2, seed=0)
    loss, grads = pipeline.loss_and_grads(params, batch, 1 / (batch["targets"] >= 0).sum())
    wanted_loss, wanted = reference(family)
    found = jax.jit(pipeline.from_stages)(grads)
    return abs(float(loss) / float(wanted_loss) - 1), relative_errors(found, wanted)


# Those for fewer devices than `pipe`, and without a flush, have their own tests of what they need.
@pytest.mark.parametrize(
    "schedule",
    tiers([], slow=sorted({*method_names()} - {"pipedream_2bw", "wpipe", "bpipe"})),
)
def test_every_schedule_has_the_gradients_of_one_device(schedule):
    config = config_of("llama", num_layers=8, attention="chunked")
    made = build(schedule, num_devices=2, num_microbatches=4)
    pipeline = pipeline_of(made, config, context=2)
    batch, params = random_batch(4, seed=0), random_params(config)
    loss, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch, 1.0)
    plain = config_of("llama", num_layers=8)
    model = LanguageModel(plain)
    flat = {name: leaf.reshape(-1, SEQ_LEN) for name, leaf in batch.items()}
    wanted_loss, wanted = jax.jit(jax.value_and_grad(lambda params: model.loss_sum(params, flat)))(params)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=LARGEST_ERROR)
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted)
    assert max(errors.values()) <= LARGEST_ERROR, errors


@pytest.mark.parametrize("case", tiers([], ci=[("gpt", 2)], slow=[("llama", 4)]), ids=str)
def test_loss_and_gradients_are_those_of_one_device(case):
    family, context = case
    loss_error, errors = errors_of(family, context=context)
    assert loss_error <= LARGEST_ERROR
    assert max(errors.values()) <= LARGEST_ERROR, errors


@pytest.mark.parametrize("case", tiers([], ci=[("gpt", 2, 1)], slow=[("llama", 4, 1), ("gpt", 2, 2)]), ids=str)
def test_documents_back_to_back_are_those_one_by_one(case):
    family, context, tensor = case
    config = config_of(family, num_layers=NUM_PACKED_LAYERS, attention="chunked")
    schedule = build("zb_h1", num_devices=2, num_microbatches=NUM_PACKED)
    pipeline = pipeline_of(schedule, config, context=context, tensor=tensor)
    batch = packed()
    params = jax.jit(pipeline.to_stages)(random_params(config))
    loss, grads = pipeline.loss_and_grads(params, batch, 1 / (batch["targets"] >= 0).sum())
    wanted, wanted_grads = expected_of_documents(family)
    assert float(loss) == pytest.approx(float(wanted), rel=LARGEST_ERROR)
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted_grads)
    assert max(errors.values()) <= LARGEST_ERROR, errors


def a_key_too_many(monkeypatch):
    right = attention_tiles._Tiles._is_seen
    monkeypatch.setattr(
        attention_tiles._Tiles,
        "_is_seen",
        lambda tiles, pair, num_rows: right(tiles, pair._replace(query=pair.query + 1), num_rows),
    )


def a_position_off_by_a_chunk(monkeypatch):
    right = ContextAxis.positions
    monkeypatch.setattr(ContextAxis, "positions", lambda axis, seq: (right(axis, seq) + seq // 4) % seq)


def labels_of_the_neighbour_chunk(monkeypatch):
    right = LanguageModel.own

    def wrong(model, microbatch):
        own = right(model, microbatch)
        return {**own, "targets": jnp.roll(microbatch["targets"], 2, axis=1)[:, : own["targets"].shape[1]]}

    monkeypatch.setattr(LanguageModel, "own", wrong)


def a_sum_that_is_not_over_context(monkeypatch):
    monkeypatch.setattr("jaxpipe.program.partition.scatter_sum_over", lambda x, axes, dim, **_: _own_part(x, axes, dim))


def _own_part(x, axes, dim):
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


@pytest.mark.parametrize(
    "mistake",
    tiers(
        [],
        ci=[a_sum_that_is_not_over_context],
        slow=[a_key_too_many, a_position_off_by_a_chunk, labels_of_the_neighbour_chunk],
    ),
)
def test_the_bound_would_show(mistake, monkeypatch):
    mistake(monkeypatch)
    _, errors = errors_of("gpt")
    assert max(errors.values()) > 100 * LARGEST_ERROR, errors


def test_what_does_not_split_sequences_is_refused():
    axis = TensorAxis.of(context=2)
    with pytest.raises(ConfigError, match=r"mesh.context=2 with model.attention='xla'"):
        LanguageModel(config_of("gpt", num_layers=2), axis)
    with pytest.raises(ConfigError, match=r"mesh.context=2 with model of BertConfig"):
        LanguageModel(config_of("bert", num_layers=2, attention="chunked"), axis)
    config = config_of("gpt", num_layers=2, attention="chunked")
    with pytest.raises(ConfigError, match=r"mesh.context=2 with loss= of one's own"):
        LanguageModel(config, axis, TokenLoss(lambda values, microbatch: 0.0, lambda batch: 1))
    with pytest.raises(ConfigError, match=r"values of each token"):
        LanguageModel(config, axis).head_values({}, np.zeros(0), {})


def test_functions_that_know_no_context_are_refused(monkeypatch):
    monkeypatch.setattr(LanguageModel, "num_sequence_parts", 1)
    config = config_of("gpt", num_layers=2, attention="chunked")
    with pytest.raises(CompileError, match=r"context=2, and the functions split a sequence over 1 devices"):
        pipeline_of(build("1f1b", num_devices=1, num_microbatches=2), config, context=2)
