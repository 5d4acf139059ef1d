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
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors, summed
from tiny_training import train_pipelined

from jaxpipe.errors import CompileError, ConfigError
from jaxpipe.mesh import ContextAxis, TensorAxis
from jaxpipe.models import GPTConfig, LanguageModel, attention_tiles
from jaxpipe.models.bert import BertHead
from jaxpipe.models.embedding_and_head import Head
from jaxpipe.schedules import REGISTRY, build, split_backward
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
    Split("bert", "zb_h1", tensor=2, dropout=0.3, shard="weights"),
    Split("bert", "interleaved_1f1b", context=4, recompute="full", dropout=0.3),
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


class Covered(NamedTuple):
    """A schedule of eight layers and four microbatches on a mesh with `context`."""

    schedule: str
    family: str
    context: int
    pipe: int = 2
    tensor: int = 1
    expert: int = 1
    packed: bool = False
    recompute: str = "none"
    split: bool = False
    num_layers: int = 8
    num_microbatches: int = 4

    def __str__(self) -> str:
        return "-".join(map(str, self))


FAMILIES = ("llama", "mixtral", "gpt_oss", "qwen3", "bert", "gpt", "qwen3_moe")  # windows: llama, gpt_oss
OF_EXPERTS = ("mixtral", "gpt_oss", "qwen3_moe")


def covering() -> list[Covered]:
    """Each method with a flush on two meshes, of up to eight devices; families and the other fields take turns."""
    cases = []
    for each, name in enumerate(sorted({*method_names()} - {"pipedream_2bw", "wpipe"})):
        for turn in range(2):
            number = 2 * each + turn
            family = FAMILIES[number % len(FAMILIES)]
            pipe = 4 if name == "bpipe" else 2
            context = 8 // pipe if (each + turn) % 2 else 2
            rest = 8 // (pipe * context)
            expert = rest if family in OF_EXPERTS and number % 3 else 1
            cases.append(
                Covered(
                    name,
                    family,
                    context,
                    pipe=pipe,
                    tensor=rest // expert,
                    expert=expert,
                    packed=family != "bert" and (each // 2 + turn) % 2 == 0,
                    recompute=("none", "full")[(each // 3 + turn) % 2],
                    split=number % 4 == 0 and not REGISTRY[name].has_split_backward,
                )
            )
    return cases


def config_of_covered(case: Covered, **choices):
    choices |= {"sliding_window": 3} if case.family == "llama" else {}
    choices |= {"num_experts": 4} if case.expert > 1 else {}
    return config_of(case.family, num_layers=case.num_layers, **choices)


def batch_of_covered(case: Covered):
    batch = random_batch(case.num_microbatches, seed=0, family=case.family)
    if case.packed:
        batch["positions"] = np.broadcast_to(np.array([0, 1, 2, 0, 1, 0, 1, 2], np.int32), batch["tokens"].shape)
    return batch


@cache
def expected_of_covered(case: Covered):
    """Half of all losses, and the gradients of their sum, by plain jax."""
    # Of gpt-oss only `chunked` has sinks; a row of eight tokens is a block there.
    plain = {} if case.family == "gpt_oss" else {"attention": "xla"}
    config, batch = config_of_covered(case, **plain), batch_of_covered(case)

    def halves(params, microbatch):
        losses = jax.tree.map(lambda loss: 0.5 * loss, LanguageModel(config).loss_sum(params, microbatch))
        return sum(jnp.sum(loss) for loss in jax.tree.leaves(losses)), losses

    of_microbatch = jax.jit(jax.grad(halves, has_aux=True))
    params, each = random_params(config), range(case.num_microbatches)
    grads, losses = summed([of_microbatch(params, jax.tree.map(lambda x, m=m: x[m], batch)) for m in each])
    return losses, grads


def errors_of_covered(case: Covered) -> dict[str, float]:
    config = config_of_covered(case, attention="chunked", recompute=case.recompute)
    schedule = build(case.schedule, num_devices=case.pipe, num_microbatches=case.num_microbatches)
    schedule = split_backward(schedule) if case.split else schedule
    pipeline = pipeline_of(schedule, config, context=case.context, tensor=case.tensor, expert=case.expert)
    params = jax.jit(pipeline.to_stages)(random_params(config))
    losses, grads = pipeline.loss_and_grads(params, batch_of_covered(case), 0.5)
    # By what alone the reference depends on.
    like = Covered("", case.family, 1, expert=case.expert, packed=case.packed)
    like = like._replace(num_layers=case.num_layers, num_microbatches=case.num_microbatches)
    wanted, wanted_grads = expected_of_covered(like)
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted_grads)
    pairs = zip(jax.tree.leaves(losses), jax.tree.leaves(wanted), strict=True)
    of_losses = [float(np.abs(one - other).max() / (1 + np.abs(other).max())) for one, other in pairs]
    return errors | {"losses": max(of_losses)}


SMALL = {"pipe": 1, "num_layers": 2, "num_microbatches": 2}
COVERED = tiers(
    [],
    ci=[Covered("1f1b", "bert", 2, **SMALL)],
    slow=[
        Covered("1f1b", "gpt_oss", 2, packed=True, **SMALL),
        *covering(),
        Covered("1f1b", "qwen3", 1),
        Covered("1f1b", "mixtral", 1, tensor=2, expert=2, packed=True),
        Covered("zb_v", "bert", 1, tensor=2),
        Covered("1f1b", "mixtral", 2, pipe=1, tensor=2, expert=2, packed=True, recompute="full"),
    ],
)


@pytest.mark.parametrize("case", COVERED, ids=str)
def test_losses_and_gradients_are_those_of_one_device(case):
    errors = errors_of_covered(case)
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
    right = Head.own_targets
    monkeypatch.setattr(Head, "own_targets", lambda head, targets: right(head, jnp.roll(targets, 2, axis=1)))


def keys_off_by_one(monkeypatch):
    right = ContextAxis.gather
    monkeypatch.setattr(ContextAxis, "gather", lambda axis, x, dim: jnp.roll(right(axis, x, dim), 1, dim))


def a_word_predicted_by_the_neighbour(monkeypatch):
    right = BertHead.own_targets
    monkeypatch.setattr(BertHead, "own_targets", lambda head, targets: right(head, jnp.roll(targets, 1, axis=1)))


def an_order_by_the_first_token_of_each_chunk(monkeypatch):
    monkeypatch.setattr("jaxpipe.models.bert.only_on_the_first", lambda x, axis: x)


def a_sum_that_is_not_over_context(monkeypatch):
    monkeypatch.setattr("jaxpipe.program.partition.scatter_sum_over", lambda x, axes, dim, **_: _own_part(x, axes, dim))


def _own_part(x, axes, dim):
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


@pytest.mark.parametrize(
    "wrong",
    tiers(
        [],
        ci=[(a_sum_that_is_not_over_context, "gpt")],
        slow=[
            (a_key_too_many, "gpt"),
            (a_position_off_by_a_chunk, "gpt"),
            (a_position_off_by_a_chunk, "llama"),
            (labels_of_the_neighbour_chunk, "gpt"),
            (a_position_off_by_a_chunk, "deepseek_v2"),
            (keys_off_by_one, "deepseek_v2"),
            (a_word_predicted_by_the_neighbour, "bert"),
            (an_order_by_the_first_token_of_each_chunk, "bert"),
        ],
    ),
)
def test_the_bound_would_show(wrong, monkeypatch):
    mistake, family = wrong
    mistake(monkeypatch)
    errors = errors_of_covered(Covered("1f1b", family, 2, **SMALL))
    assert max(errors.values()) > 100 * LARGEST_ERROR, errors


def test_what_does_not_split_sequences_is_refused():
    axis = TensorAxis.of(context=2)
    with pytest.raises(ConfigError, match=r"mesh.context=2 with model.attention='xla'"):
        LanguageModel(config_of("gpt", num_layers=2), axis)

    class OwnConfig(GPTConfig):
        splits_sequences = False

    config = OwnConfig(num_layers=2, hidden=8, num_heads=2, vocab_size=32, num_positions=8, attention="chunked")
    with pytest.raises(ConfigError, match=r"mesh.context=2 with model of OwnConfig"):
        LanguageModel(config, axis)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"rows of 10 tokens over context=2(.|\n)*pad rows to 12 tokens"):
        ContextAxis(2).own(jnp.zeros((1, 10)), 1)
    assert ContextAxis(2, causal=False).num_chunks == 2


def test_functions_that_know_no_context_are_refused(monkeypatch):
    monkeypatch.setattr(LanguageModel, "num_sequence_parts", 1)
    config = config_of("gpt", num_layers=2, attention="chunked")
    with pytest.raises(CompileError, match=r"context=2, and the functions split a sequence over 1 devices"):
        pipeline_of(build("1f1b", num_devices=1, num_microbatches=2), config, context=2)
