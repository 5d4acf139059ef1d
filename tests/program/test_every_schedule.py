"""Every registered schedule, with its options, has the loss and the gradients of plain `jax.grad`.

The bounds are those of `tiny_gpt`, `tiny_bert` and `tiny_mlp`. With as many microbatches as the schedule builds
at once, some more (whole units, and some of a unit left out), and one, which of two replicas leaves one without a
gradient.
"""

import dataclasses
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_bert
import tiny_gpt
import tiny_mlp
from legal_devices import OPTIONS, TWO_REPLICAS, takes
from tiers import tiers

from jaxpipe.program import Pipeline
from jaxpipe.program.channels import gradient_shards, weight_gathers
from jaxpipe.schedules import REGISTRY, Kind, Schedule, balance, build, split_backward
from jaxpipe.sharding import NOTHING_KEPT, KeptChunks


class Case(NamedTuple):
    model: str
    name: str
    options: Mapping[str, Any]
    num_devices: int
    num_microbatches: int
    data: int = 1
    tied: bool = True
    split: bool = False  # every B into I and W
    balanced: bool = False
    one_layer: bool = False  # a stage has one; else some have two
    shard: str = "optimizer"  # what devices along `data` share
    kept: KeptChunks = NOTHING_KEPT  # of what they share

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        chosen = [name for name in ("split", "balanced", "one_layer") if getattr(self, name)]
        chosen += [self.shard] if self.shard != "optimizer" else []
        chosen += [f"kept={self.kept.weights},{self.kept.sums}"] if any(self.kept) else []
        return "-".join(map(str, (*self[:2], *options, *self[3:7], *chosen)))


def has_whole_backwards(name: str, options: Mapping[str, Any], num_devices: int, num_microbatches: int) -> bool:
    if not REGISTRY[name].has_split_backward:
        return True
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)  # some have both
    return any(action.kind is Kind.B for row in schedule.rows for action in row)


FEW = tiers(
    [
        Case("mlp", "dualpipe", {}, 4, 8, data=2),
        Case("mlp", "zb_h1", {}, 4, 8, data=2, shard="none"),  # messages wait at their senders
        Case("mlp", "1f1b", {}, 2, 4, data=2, shard="gradients", kept=KeptChunks(sums=1)),
        Case("mlp", "breadth_first", {"num_chunks": 2}, 2, 4, data=2, shard="weights", kept=KeptChunks(1, 1)),
    ],
    ci=[
        Case("mlp", "interleaved_1f1b", {"extra_warm_up": True}, 4, 7, data=2),
        Case("mlp", "bpipe", {}, 4, 6, data=2, shard="weights"),
        Case("mlp", "v_half", {}, 2, 5),
        Case("mlp", "chimera", {"forward_doubling": True}, 6, 12),
        Case("mlp", "bitpipe", {}, 4, 6, split=True),
        Case("mlp", "gems", {}, 4, 3, data=2),
        Case("mlp", "gpipe", {}, 4, 6),
        Case("mlp", "hanayo", {"waves": 2}, 4, 9, data=2),
        Case("mlp", "mixpipe", {"injected": 3, "eager_sync": False}, 4, 9),
        Case("mlp", "zb_h2", {}, 8, 5, one_layer=True),
        Case("gpt", "zb_v", {}, 2, 3),
        Case("mlp", "v_min", {}, 4, 9),
        Case("mlp", "dualpipe_v", {}, 2, 4, one_layer=True),
        Case("mlp", "1f1b", {}, 4, 8, split=True, balanced=True),
    ],
    slow=[
        Case("mlp", "bitpipe", {}, 4, 8, data=2, split=True, shard="weights"),
        Case("mlp", "bitpipe", {}, 2, 4, data=2, shard="weights", kept=KeptChunks(2)),
        Case("mlp", "zb_v", {}, 2, 4, data=2, shard="weights", kept=KeptChunks(1, 2)),
        # A chunk of two layers leaves behind one of one.
        Case("mlp", "interleaved_1f1b", {}, 2, 4, data=2, shard="gradients", kept=KeptChunks(sums=1)),
        Case("mlp", "breadth_first", {"num_chunks": 3}, 3, 5, data=2, shard="gradients"),
        Case("mlp", "bitpipe", {"num_chunks": 3, "v_shape": False, "scaling": "figure"}, 4, 11, data=2),
        Case("gpt", "zb_v", {}, 2, 5, data=2, shard="weights"),
        Case("gpt", "interleaved_1f1b", {}, 4, 8, data=2, shard="weights", kept=KeptChunks(1, 2)),
        Case("bert", "chimera", {}, 4, 5, data=2, shard="weights", kept=KeptChunks(1)),
        Case("gpt", "interleaved_1f1b", {"group_size": 5}, 4, 7, data=2, tied=False),
        Case("bert", "v_half", {}, 2, 5, tied=False),
        Case("mlp", "bitpipe", {"scaling": "early_forwarding", "eager_sync": False}, 6, 24),
        Case("gpt", "bitpipe", {}, 4, 8, data=2),
        Case("gpt", "bitpipe", {"scaling": "early_forwarding"}, 4, 9, tied=False),
        Case("bert", "bpipe", {}, 4, 6, tied=False),
        Case("mlp", "bitpipe", {"num_chunks": 4}, 2, 1),
        Case("mlp", "bitpipe", {"num_chunks": 1, "scaling": "figure"}, 8, 16),
        Case("mlp", "chimera", {}, 8, 8),
        Case("mlp", "chimera", {"eager_sync": False}, 2, 5, data=2),
        Case("mlp", "mixpipe", {}, 8, 16),
    ],
)

_IN_FEW = {case.name for case in (getattr(each, "values", (each,))[0] for each in FEW)}
FEW += [Case("mlp", name, {}, 4, 6) for name in REGISTRY if name not in _IN_FEW]
# What devices keep, of each method.
FEW += tiers(
    [],
    slow=[
        Case("mlp", name, {}, 4, 6, data=2, shard=shard, kept=kept)
        for i, name in enumerate(sorted(REGISTRY))
        for shard, kept in (
            ("weights", KeptChunks(1 + i % 2)),
            ("weights", KeptChunks(2 - i % 2, 1 + i % 2)),
            ("gradients", KeptChunks(sums=1)),
        )
        if takes(name, 4, {}) and (name not in TWO_REPLICAS or not kept.sums)
    ],
)

SHARDS = ("optimizer", "gradients", "weights")
MODELS = [("mlp", True), ("gpt", True), ("gpt", False), ("bert", True), ("bert", False)]


def covering() -> list[Case]:
    """Five cases of each method and option, such that every legal pair of values of two fields of a case occurs.

    Each value of the longest fields, microbatches and models, meets each method; the other fields take turns.
    """
    cases = []
    for each, (name, options) in enumerate([*((name, {}) for name in sorted(REGISTRY)), *OPTIONS]):
        sizes = [d for d in (2, 4, 6, 8) if takes(name, d, options) and (d != 6 or name in TWO_REPLICAS)]
        num_small = each
        for turn in range(len(MODELS)):
            d = sizes[(each + turn) % len(sizes)]
            num_small += d <= 4
            n = (1, d, d + 1, 2 * d, 4 * d)[turn]
            model, tied = MODELS[(2 * each + turn) % len(MODELS)]
            cases.append(
                Case(
                    model,
                    name,
                    options,
                    num_devices=d,
                    num_microbatches=n,
                    data=1 + (d <= 4 and num_small % 2),  # eight devices in all
                    tied=tied,
                    split=(each // 3 + turn) % 3 == 0 and has_whole_backwards(name, options, d, n),
                    one_layer=(each // 4 + turn) % 2 == 0,
                    shard=SHARDS[(each // 2 + turn) % 3],
                )
            )
    return cases


ALL = covering()
ALL += [Case("gpt", "1f1b", {}, num_devices, 9, split=True, balanced=True) for num_devices in (4, 8)]


def schedule_of(case: Case) -> Schedule:
    schedule = build(case.name, num_devices=case.num_devices, num_microbatches=case.num_microbatches, **case.options)
    schedule = split_backward(schedule) if case.split else schedule
    return balance(schedule) if case.balanced else schedule


def num_layers_of(case: Case, schedule: Schedule) -> int:
    """One a stage, or a few more."""
    return schedule.num_stages + (0 if case.one_layer else 1 + schedule.num_stages // 8)


def assert_equivalent(case: Case) -> None:
    schedule = schedule_of(case)
    num_layers = num_layers_of(case, schedule)
    options = {"num_layers": num_layers, "data": case.data, "shard": case.shard, "kept": case.kept}
    if case.model == "mlp":
        tiny_mlp.assert_equivalent(tiny_mlp.make_pipeline(schedule, **options))
    elif case.model == "bert":
        tiny_bert.assert_equivalent(schedule, tie_embeddings=case.tied, **options)
    else:
        pipeline = tiny_gpt.make_pipeline(schedule, tie_embeddings=case.tied, **options)
        tiny_gpt.assert_equivalent(pipeline, tie_embeddings=case.tied)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_loss_and_every_gradient_are_those_of_plain_grad(case):
    assert_equivalent(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_loss_and_every_gradient_are_those_of_plain_grad_everywhere(case):
    assert_equivalent(case)


def test_the_covering_cases_have_each_pair_of_values():
    def fields(case: Case) -> dict[str, Any]:
        d = case.num_devices
        times = (1, d, d + 1, 2 * d, 4 * d).index(case.num_microbatches)
        method, model = f"{case.name} {case.options}", f"{case.model} {case.tied}"
        shared = {"data": case.data, "shard": case.shard}
        return {"method": method, "d": d, "times": times, "model": model, "split": case.split, **shared}

    found = [fields(case) for case in ALL[:-2]]  # without those that are balanced
    pairs = {pair for each in found for pair in combinations(each.items(), 2)}
    values = {name: {each[name] for each in found} for name in found[0]}
    missing = [
        (first, second)
        for first, second in combinations(values, 2)
        if any(((first, a), (second, b)) not in pairs for a, b in product(values[first], values[second]))
    ]
    # What is left is not legal: sizes of a method, its split, and more than eight devices in all.
    legal = [{"method", "d"}, {"method", "split"}, {"method", "data"}, {"d", "data"}]
    assert all(set(names) in legal for names in missing)
    assert all((("method", f"{method} {{}}"), ("data", 2)) in pairs for method in REGISTRY)


def two_replicas() -> Pipeline:
    return tiny_mlp.make_pipeline(build("bitpipe", num_devices=4, num_microbatches=5), num_layers=11)


def forget_an_exchange(pipeline: Pipeline) -> None:
    """One layer that arrives is not added."""
    grids = pipeline.table.grids["replica_gradients"]
    num_received = grids.num_recvs.copy()
    num_received[tuple(np.argwhere(num_received > 0)[-1])] -= 1
    pipeline.table.grids["replica_gradients"] = dataclasses.replace(grids, num_recvs=num_received)


def exchange_another_layer(pipeline: Pipeline) -> None:
    """A device gives one layer twice, in the place of another."""
    grids, moves = pipeline.table.grids["replica_gradients"], pipeline.table.transfers["replica_gradients"].sends
    given = grids.send_layer.copy()
    first, second = np.flatnonzero(moves.source == 0)[:2]
    given[moves.round[second] - 1, 0, moves.lane[second]] = given[moves.round[first] - 1, 0, moves.lane[first]]
    pipeline.table.grids["replica_gradients"] = dataclasses.replace(grids, send_layer=given)


@pytest.mark.parametrize("spoil", tiers([], ci=[forget_an_exchange], slow=[exchange_another_layer]))
def test_the_bound_would_show_gradients_that_are_not_exchanged(spoil):
    pipeline = two_replicas()
    spoil(pipeline)
    with pytest.raises(AssertionError):
        tiny_mlp.assert_equivalent(pipeline)


def kept_weights() -> Pipeline:
    schedule = build("breadth_first", num_devices=2, num_microbatches=4, num_chunks=2)
    return tiny_mlp.make_pipeline(schedule, num_layers=8, data=2, shard="weights", kept=KeptChunks(1, 1))


def read_what_is_stale(pipeline: Pipeline) -> None:
    """Actions gather their own chunk again, and the next one finds it."""
    pipeline.table.grids["kept_gathers"].chunk[:] = pipeline.table.chunk


def release_too_early(pipeline: Pipeline) -> None:
    """The first action that another one follows gathers the other chunk into the only slot."""
    grids = pipeline.table.grids["kept_gathers"]
    grids.chunk[tuple(np.argwhere(grids.ahead)[0])] = 1


def sum_into_another_chunk(pipeline: Pipeline) -> None:
    """What leaves is added to the sums of the chunk that comes."""
    pipeline.table.grids["leaving_sums"].chunk[:] = pipeline.table.chunk


def lose_a_chunk(pipeline: Pipeline) -> None:
    """The chunk that leaves is taken from a slot that has none."""
    cell = tuple(np.argwhere(pipeline.table.transfers["leaving_sums"].hangs(pipeline.table))[0])
    grids = pipeline.table.grids["leaving_sums"]
    grids.chunk[cell] = 1 - grids.chunk[cell]


@pytest.mark.parametrize(
    "spoil", tiers([], ci=[release_too_early], slow=[lose_a_chunk, read_what_is_stale, sum_into_another_chunk])
)
def test_the_bound_would_show_a_slot_that_has_another_chunk(spoil):
    pipeline = kept_weights()
    spoil(pipeline)
    with pytest.raises(AssertionError):
        tiny_mlp.assert_equivalent(pipeline)


def split_weights() -> Pipeline:
    schedule = build("interleaved_1f1b", num_devices=2, num_microbatches=4)
    return tiny_mlp.make_pipeline(schedule, num_layers=8, data=2, shard="weights")


def gather_another_layer(monkeypatch, pipeline: Pipeline) -> None:
    """The last layer of an action gathers the first one of its own chunk."""
    grids = pipeline.table.grids["weight_gathers"]
    pipeline.table.grids["weight_gathers"] = dataclasses.replace(grids, next_chunk=pipeline.table.chunk)


def gather_a_layer_too_late(monkeypatch, pipeline: Pipeline) -> None:
    """The first layer of an action computes with the copy of the action before."""
    monkeypatch.setattr(weight_gathers.OnLayers, "last", lambda self, row, carried, walk, state: state)


def sum_a_layer_twice(monkeypatch, pipeline: Pipeline) -> None:
    end = gradient_shards.OnLayers.end

    def twice(self, turn, row, arrived, carried, walk):
        _, again = end(self, turn, row, arrived, carried, walk)
        return end(self, turn, row, arrived, carried, again._replace(grads=walk.grads))

    monkeypatch.setattr(gradient_shards.OnLayers, "end", twice)


def lose_what_is_left(monkeypatch, pipeline: Pipeline) -> None:
    monkeypatch.setattr(gradient_shards.GradientShards, "end", lambda self, carry: carry)


@pytest.mark.parametrize("name", tiers([], ci=["sum_pieces"], slow=["copy_pieces"]))
def test_the_bound_would_show_a_piece_that_is_left_out(name):
    schedule = build("interleaved_1f1b", num_devices=2, num_microbatches=4)
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=8, data=2)
    pipeline.table.grids[name].piece[:] = 0  # that of the first action
    with pytest.raises(AssertionError):
        tiny_mlp.assert_equivalent(pipeline)


@pytest.mark.parametrize(
    "spoil",
    tiers([], ci=[gather_a_layer_too_late], slow=[sum_a_layer_twice, gather_another_layer, lose_what_is_left]),
)
def test_the_bound_would_show_weights_and_gradients_that_are_not_brought_together(monkeypatch, spoil):
    pipeline = split_weights()
    spoil(monkeypatch, pipeline)
    with pytest.raises(AssertionError):
        tiny_mlp.assert_equivalent(pipeline)


@pytest.mark.ci
def test_the_loss_alone_of_two_replicas_is_the_same():
    pipeline = two_replicas()
    assert not pipeline.forward_table.num_lanes("replica_gradients")
    params, batch = pipeline.to_stages(tiny_mlp.make_params(11)), tiny_mlp.make_batch(5)
    expected, _ = tiny_mlp.expected_loss_and_grads(11, 5)
    assert float(pipeline.loss(params, batch)) == pytest.approx(float(expected), rel=1e-5)
