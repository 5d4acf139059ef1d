"""Nothing reads storage before it is written: filled with NaN it gives the same result, bit for bit.

The companions break a table and see the NaN: the poison reaches whatever reads what it should not.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gpt
import tiny_mlp
from csv_schedules import CSV
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch, random_params

from jaxpipe.lowering import IDLE, round_types
from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline
from jaxpipe.program.channel import with_part
from jaxpipe.program.channels import ParkedPages, ReplicaGradients
from jaxpipe.program.channels.host_pages import HostPages
from jaxpipe.schedules import Kind, balance, build, from_csv, split_backward
from jaxpipe.schedules.passes.overlap import overlap

LLAMA = config_of("llama", num_layers=4)


def make_gpt() -> Pipeline:
    return tiny_gpt.make_pipeline(
        build("1f1b", num_devices=4, num_microbatches=8), num_layers=8, layers_per_stage=(1, 3, 2, 2), data=2
    )


def make_mlp_that_gathers() -> Pipeline:
    """Copies of weights are storage, too, where actions gather them."""
    schedule = build("interleaved_1f1b", num_devices=2, num_microbatches=4)
    return tiny_mlp.make_pipeline(schedule, num_layers=8, data=2)


def make_llama() -> Pipeline:
    schedule = build("1f1b", num_devices=2, num_microbatches=5)
    return pipeline_of(schedule, LLAMA, data=2, tensor=2, layers_per_stage=(3, 1))


def loss_and_grads_of_llama(pipeline: Pipeline):
    params = jax.jit(pipeline.to_stages)(random_params(LLAMA))
    return pipeline.loss_and_grads(params, random_batch(5, seed=0))


def make_mlp_that_sends_pages(unit: str = "page") -> Pipeline:
    """With two lanes, as four of seven or all of four pages travel in three rounds."""
    schedule = build("bpipe", num_devices=4, num_microbatches=9, unit=unit)
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=28 if unit == "page" else 16)
    assert pipeline.table.num_lanes("parked_pages") == 2
    return pipeline


def make_mlp(name: str = "1f1b", num_microbatches: int = 6, **options) -> Pipeline:
    """Of a schedule as a user writes it; or of four devices and six microbatches, with up to two layers a stage."""
    if name in CSV:
        return tiny_mlp.make_pipeline(from_csv(CSV[name], name=name), num_layers=6)
    schedule = build(name, num_devices=4, num_microbatches=num_microbatches, **options)
    return tiny_mlp.make_pipeline(schedule, num_layers=schedule.num_stages + 2)


def make_mlp_of_pairs() -> Pipeline:
    """A pair reads the page of its backward while it writes those of its forward."""
    schedule = overlap(build("interleaved_1f1b", num_devices=2, num_microbatches=6, extra_warm_up=True))
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=8)
    assert any(Kind.PAIR in kinds for kinds in pipeline.table.kinds)
    return pipeline


def make_mlp_of_split_backwards() -> Pipeline:
    """With B, and with I whose W come later."""
    pipeline = make_mlp("dualpipe", num_microbatches=8)
    assert {Kind.B, Kind.I, Kind.W} <= set().union(*pipeline.table.kinds)
    return pipeline


def make_mlp_of_split_backwards_that_sends_pages() -> Pipeline:
    schedule = balance(split_backward(build("1f1b", num_devices=4, num_microbatches=8)))
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=12)
    assert pipeline.table.num_lanes("parked_pages")
    assert pipeline.table.schedule.has_split_backward
    return pipeline


def make_mlp_with_pages_on_hosts(**options) -> Pipeline:
    """Of seven pages of a microbatch three and four leave in turn, so that one place of a block carries nothing."""
    schedule = build("bpipe", num_devices=4, num_microbatches=9, to="host")
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=28, **options)
    assert pipeline.table.transfers["host_pages"].block_pages == 4
    return pipeline


def make_mlp_that_recomputes() -> Pipeline:
    """Forward keeps its input alone, which W reads: what I leaves has no room in its place."""
    schedule = build("v_half", num_devices=4, num_microbatches=6)
    functions = dataclasses.replace(tiny_mlp.FUNCTIONS, layer=jax.checkpoint(tiny_mlp.layer))
    pipeline = Pipeline(schedule, make_mesh(pipe=4), functions, num_layers=schedule.num_stages + 2)
    params = jax.eval_shape(pipeline.to_stages, tiny_mlp.make_params(pipeline.layout.num_layers))
    storage = pipeline.shapes(params, tiny_mlp.make_batch(6)).storage
    assert [len(place.chosen) for place in storage.deferred] == [0, 1]
    return pipeline


def make_mlp_that_recomputes_by_stage() -> Pipeline:
    """With pages of two sizes, of which the large ones travel, and of which what I leaves has its own."""
    schedule = balance(split_backward(build("1f1b", num_devices=4, num_microbatches=8)))
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=28, recomputed=(3, 2, 2, 0))
    assert pipeline.table.num_lanes("parked_pages")
    return pipeline


@pytest.fixture
def few_types(monkeypatch):
    """Few types of rounds, so that lanes carry nothing in some."""
    monkeypatch.setattr(round_types, "SMALL_WASTE", 1e9)


@pytest.fixture
def poison(monkeypatch):
    """A function that fills all storage of pipelines made from now on with NaN.

    Pages that have left, lanes that carry nothing, and what arrives in these are filled again in every round.
    """

    def poison_lanes(channel):
        store, read = channel.store, channel.read

        def store_from_poisoned_arrivals(self, round_type, row, arrived, carry):
            return store(self, round_type, row, poisoned_from(arrived, row.of[self.name].num_recvs), carry)

        def read_into_poisoned_lanes(self, round_type, row, carry):
            lanes = poisoned_from(carry.of[self.name], 0)
            return read(self, round_type, row, with_part(carry, self.name, lanes, carry.state))

        monkeypatch.setattr(channel, "store", store_from_poisoned_arrivals)
        monkeypatch.setattr(channel, "read", read_into_poisoned_lanes)

    def poison_pages_that_have_left():
        read = ParkedPages.read

        def read_and_poison(self, round_type, row, carry):
            carry, table, line = read(self, round_type, row, carry), self.table, row.of[self.name]
            is_sent = jnp.arange(table.num_lanes(self.name)) < line.num_sends
            pages = jnp.where(is_sent, line.send_page, table.pages.num_pages)
            slots, *others = carry.state.pools
            slots = [leaf.at[pages].set(jnp.nan, mode="drop") for leaf in slots]
            return carry._replace(state=carry.state._replace(pools=[slots, *others]))

        monkeypatch.setattr(ParkedPages, "read", read_and_poison)

    def poison_blocks():
        """Pages that have left, the block that has been stored, and that of which nothing is read."""
        store, read = HostPages.store, HostPages.read

        def of_used(used, values):
            return jax.tree.map(lambda leaf: jnp.where(used > 0, leaf, jnp.nan), values)

        def store_from_poisoned(self, round_type, row, arrived, carry):
            is_used = row.of[self.name].num_recvs
            carry = store(self, round_type, row, arrived, carry)
            held = carry.of[self.name]
            held = held._replace(block=of_used(1 - is_used, held.block))
            return with_part(carry, self.name, held, carry.state)

        def read_and_poison(self, round_type, row, carry):
            carry, line = read(self, round_type, row, carry), row.of[self.name]
            pages = jnp.where(line.num_sends > 0, line.send_page, self.table.pages.num_pages)
            slots, *others = carry.state.pools
            slots = [leaf.at[pages].set(jnp.nan, mode="drop") for leaf in slots]
            return carry._replace(state=carry.state._replace(pools=[slots, *others]))

        monkeypatch.setattr(HostPages, "store", store_from_poisoned)
        monkeypatch.setattr(HostPages, "read", read_and_poison)

    def fill():
        for module in ("start", "weight_copies"):
            monkeypatch.setattr(f"jaxpipe.program.{module}.empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
        for channel in (ParkedPages, ReplicaGradients):
            poison_lanes(channel)
        poison_pages_that_have_left()
        poison_blocks()

    return fill


def poisoned_from(lanes, first):
    """[lane] with NaN in all lanes from `first` on."""
    return [
        jax.tree.map(lambda part, lane=lane: jnp.where(lane < first, part, jnp.nan), carried)
        for lane, carried in enumerate(lanes)
    ]


# How each program is made and run.
PROGRAMS = {
    "pages": (make_mlp_that_sends_pages, tiny_mlp.loss_and_grads),
    "two replicas": (lambda: make_mlp("bitpipe"), tiny_mlp.loss_and_grads),
    "GPT": (make_gpt, tiny_gpt.loss_and_grads),
    "LLaMA over data and tensor": (make_llama, loss_and_grads_of_llama),
    "1f1b": (make_mlp, tiny_mlp.loss_and_grads),
    "gpipe": (lambda: make_mlp("gpipe"), tiny_mlp.loss_and_grads),
    "odd order": (lambda: make_mlp("odd order"), tiny_mlp.loss_and_grads),
    "V": (lambda: make_mlp("V"), tiny_mlp.loss_and_grads),
    "early forwarding": (lambda: make_mlp("bitpipe", scaling="early_forwarding"), tiny_mlp.loss_and_grads),
    "forward doubling": (lambda: make_mlp("chimera", forward_doubling=True), tiny_mlp.loss_and_grads),
    "interleaved": (lambda: make_mlp("interleaved_1f1b"), tiny_mlp.loss_and_grads),
    "whole microbatches": (lambda: make_mlp_that_sends_pages("microbatch"), tiny_mlp.loss_and_grads),
    "gathers": (make_mlp_that_gathers, tiny_mlp.loss_and_grads),
    "I and W": (lambda: make_mlp("zb_h1"), tiny_mlp.loss_and_grads),
    "B, I and W": (make_mlp_of_split_backwards, tiny_mlp.loss_and_grads),
    "I and W, and pages": (make_mlp_of_split_backwards_that_sends_pages, tiny_mlp.loss_and_grads),
    "pages on hosts": (make_mlp_with_pages_on_hosts, tiny_mlp.loss_and_grads),
    "pairs": (make_mlp_of_pairs, tiny_mlp.loss_and_grads),
    "recomputed by stage": (make_mlp_that_recomputes_by_stage, tiny_mlp.loss_and_grads),
    "deferred apart": (make_mlp_that_recomputes, tiny_mlp.loss_and_grads),
}


@pytest.mark.parametrize("what", tiers([], ci=["pages"], slow=[what for what in PROGRAMS if what != "pages"]))
def test_poisoned_storage_changes_nothing(what, poison):
    make, run = PROGRAMS[what]
    clean = run(make())
    poison()
    poisoned = run(make())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


@pytest.mark.ci
def test_poisoned_storage_does_not_change_the_loss_alone(poison):
    params, batch = tiny_mlp.make_params(6), tiny_mlp.make_batch(6)
    clean = make_mlp()
    expected = clean.loss(clean.to_stages(params), batch)
    poison()
    poisoned = make_mlp()
    np.testing.assert_array_equal(poisoned.loss(poisoned.to_stages(params), batch), expected)


def read_an_unwritten_page(pipeline: Pipeline) -> None:
    """One more residual page, which one layer of one B reads."""
    table, pages = pipeline.table, pipeline.table.pages
    of_layer = pages.of_layer.copy()
    round_, device = np.argwhere(table.kind == Kind.B)[-1]
    of_layer[round_, device, 0] = pages.num_pages
    vars(table)["pages"] = dataclasses.replace(pages, of_layer=of_layer, num_pages=pages.num_pages + 1)


def read_an_unwritten_message(pipeline: Pipeline) -> None:
    """One action takes its message from the inbox page that holds nobody's message."""
    table, inbox = pipeline.table, pipeline.table.grids["messages"]
    assert inbox.num_inbox == 0
    next_source = inbox.next_source.copy()
    round_, device = np.argwhere(table.kind == Kind.B)[-1]
    next_source[round_ - 1, device] = inbox.num_inbox
    table.grids["messages"] = dataclasses.replace(inbox, next_source=next_source)


def compute_in_a_bubble(pipeline: Pipeline) -> None:
    """A device that should idle in round 0 runs a B, on a message and residuals that are not there."""
    table = pipeline.table
    idle = next(device for device in range(4) if table.kind[0, device] == IDLE)
    with_backward = next(t for t, kinds in enumerate(table.kinds) if Kind.B in kinds)
    round_ = next(r for r in range(table.num_rounds) if table.round_type[r] == with_backward)
    assert table.kind[round_, idle] == IDLE
    kind = table.kind.copy()
    kind[round_, idle] = Kind.B
    vars(table)["kind"] = kind


@pytest.mark.parametrize("spoil", tiers([read_an_unwritten_page], ci=[read_an_unwritten_message, compute_in_a_bubble]))
def test_the_poison_would_be_seen(spoil, poison):
    for poisoned in (False, True):
        if poisoned:
            poison()
        pipeline = make_mlp(num_microbatches=8)
        spoil(pipeline)
        finite = [bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(tiny_mlp.loss_and_grads(pipeline))]
        assert all(finite) != poisoned, finite


def weights_of_an_unwritten_page(pipeline: Pipeline) -> None:
    """One more page, which one layer of one W reads."""
    table, pages = pipeline.table, pipeline.table.pages
    of_layer = pages.of_layer.copy()
    round_, device = np.argwhere(table.kind == Kind.W)[-1]
    of_layer[round_, device, 0] = pages.num_pages
    vars(table)["pages"] = dataclasses.replace(pages, of_layer=of_layer, num_pages=pages.num_pages + 1)


def leave_it_elsewhere(pipeline: Pipeline) -> None:
    """One I leaves what has no room in the slot in a page that no W reads; its W reads one that nobody writes."""
    table, pages = pipeline.table, pipeline.table.weight_gradient_pages
    of_layer, num_pages = pages.of_layer.copy(), pages.num_pages
    columns = table.schedule.columns
    weights = np.flatnonzero(columns.kind == Kind.W)[-1]
    inputs = table.dependencies.local[weights]
    device = columns.device[weights]
    of_layer[table.rounds[weights], device, 0] = num_pages
    of_layer[table.rounds[inputs], device, 0] = num_pages + 1
    vars(table)["weight_gradient_pages"] = dataclasses.replace(pages, of_layer=of_layer, num_pages=num_pages + 2)


@pytest.mark.parametrize(
    ("make", "spoil"),
    [
        pytest.param(lambda: make_mlp("zb_h1"), weights_of_an_unwritten_page, id="in place", marks=pytest.mark.ci),
        pytest.param(make_mlp_that_recomputes, leave_it_elsewhere, id="apart", marks=pytest.mark.slow),
    ],
)
def test_the_poison_would_be_seen_by_weight_gradients(make, spoil, poison):
    for poisoned in (False, True):
        if poisoned:
            poison()
        pipeline = make()
        spoil(pipeline)
        loss, grads = tiny_mlp.loss_and_grads(pipeline)
        assert np.isfinite(loss)  # no W is needed for it
        finite = [bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads)]
        assert all(finite) != poisoned, finite


@pytest.mark.slow
def test_the_poison_would_be_seen_in_a_block_that_comes_from_another_place(poison):
    """One block is read where the host has what nobody needs."""
    for poisoned in (False, True):
        if poisoned:
            poison()
        pipeline = make_mlp_with_pages_on_hosts()
        table, grids = pipeline.table, pipeline.table.grids["host_pages"]
        _, num_places = table.transfers["host_pages"].on_host
        back_block = grids.back_block.copy()
        round_, device = np.argwhere(back_block < num_places - 1)[0]
        back_block[round_, device] = num_places - 1
        table.grids["host_pages"] = dataclasses.replace(grids, back_block=back_block)
        loss, grads = tiny_mlp.loss_and_grads(pipeline)
        assert np.isfinite(loss)  # no backward is needed for it
        assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads)) != poisoned


@pytest.mark.slow
def test_the_poison_would_be_seen_in_a_layer_that_is_gathered_too_late(poison):
    """No action gathers the first layer of the second chunk: each gathers its own once more."""
    for poisoned in (False, True):
        if poisoned:
            poison()
        pipeline = make_mlp_that_gathers()
        vars(pipeline.table.grids["copy_gathers"])["next_chunk"] = pipeline.table.chunk
        loss, _ = tiny_mlp.loss_and_grads(pipeline)
        assert bool(np.isfinite(loss)) != poisoned


def wait_in_the_place_of_another(pipeline: Pipeline) -> None:
    """Of two microbatches that wait for their W at once, both have left what it needs in the same page."""
    table, pages = pipeline.table, pipeline.table.weight_gradient_pages
    columns, of_layer = table.schedule.columns, pages.of_layer.copy()
    weights = np.flatnonzero(columns.kind == Kind.W)
    inputs = table.dependencies.local[weights]
    device, left, read = columns.device[weights], table.rounds[inputs], table.rounds[weights]
    a, b = next(
        (a, b)
        for a in range(len(weights))
        for b in range(len(weights))
        if device[a] == device[b] and left[a] < left[b] < read[a]
    )
    of_layer[left[b], device[b]] = of_layer[read[b], device[b]] = of_layer[left[a], device[a]]
    vars(table)["weight_gradient_pages"] = dataclasses.replace(pages, of_layer=of_layer)


@pytest.mark.slow
def test_gradients_would_show_that_what_waits_is_overwritten():
    """All is written before it is read: no poison is seen."""
    tiny_mlp.assert_equivalent(make_mlp_that_recomputes())
    pipeline = make_mlp_that_recomputes()
    wait_in_the_place_of_another(pipeline)
    with pytest.raises(AssertionError):
        tiny_mlp.assert_equivalent(pipeline)


def read_a_page_before_it_lands(pipeline: Pipeline) -> None:
    """A page that comes back lands where none has lain before; the backward before its own reads it too."""
    table, pages, moves = pipeline.table, pipeline.table.pages, pipeline.table.page_moves
    grids = table.grids["parked_pages"]
    of_layer, landing = pages.of_layer.copy(), grids.recv_page.copy()
    home, there = moves.home[-1], moves.returns[-1]
    read = table.rounds[moves.backward[-1]]
    before = max(r for r in range(there + 1) if table.kind[r, home] == Kind.B)
    page = of_layer[read, home, moves.layer[-1]]
    lane = landing[there, home].tolist().index(page)
    landing[there, home, lane] = of_layer[read, home, moves.layer[-1]] = pages.num_pages
    of_layer[before, home, 0] = pages.num_pages
    vars(table)["pages"] = dataclasses.replace(pages, of_layer=of_layer, num_pages=pages.num_pages + 1)
    table.grids["parked_pages"] = dataclasses.replace(grids, recv_page=landing)


def send_back_a_page_that_is_not_there(pipeline: Pipeline) -> None:
    """The partner reads a page that has not landed into a lane."""
    table, pages, moves = pipeline.table, pipeline.table.pages, pipeline.table.page_moves
    grids = table.grids["parked_pages"]
    departure = grids.send_page.copy()
    departure[moves.returns[-1] - 1, moves.host[-1], 0] = pages.num_pages
    vars(table)["pages"] = dataclasses.replace(pages, num_pages=pages.num_pages + 1)
    table.grids["parked_pages"] = dataclasses.replace(grids, send_page=departure)


def forget_a_lane(pipeline: Pipeline) -> None:
    """The first pages that leave a device are not read."""
    grids, moves = pipeline.table.grids["parked_pages"], pipeline.table.page_moves
    num_departures = grids.num_sends.copy()
    first = moves.leaves.argmin()
    num_departures[moves.leaves[first] - 1, moves.home[first]] = 0
    pipeline.table.grids["parked_pages"] = dataclasses.replace(grids, num_sends=num_departures)


def store_a_lane_that_carries_nothing(pipeline: Pipeline) -> None:
    """In a round in which one page lands, two are stored, the second where one lies that a backward reads."""
    table, pages, grids = pipeline.table, pipeline.table.pages, pipeline.table.grids["parked_pages"]
    landing, num_landings = grids.recv_page.copy(), grids.num_recvs.copy()
    *_, (round_, device) = (
        (round_, target)
        for round_, round_type in enumerate(table.round_type)
        if len(table.permutes_of("parked_pages")[round_type]) > 1
        for _, target in table.permutes_of("parked_pages")[round_type][1]
        if num_landings[round_, target] == 1
    )  # the last: what the next backward reads has been written
    backward = next(r for r in range(round_ + 1, table.num_rounds) if table.kind[r, device] == Kind.B)
    landing[round_, device, 1] = pages.of_layer[backward, device, -1]
    num_landings[round_, device] = 2
    table.grids["parked_pages"] = dataclasses.replace(grids, recv_page=landing, num_recvs=num_landings)


@pytest.mark.parametrize(
    "spoil",
    tiers(
        [],
        ci=[read_a_page_before_it_lands],
        slow=[forget_a_lane, send_back_a_page_that_is_not_there, store_a_lane_that_carries_nothing],
    ),
)
@pytest.mark.usefixtures("few_types")
def test_the_poison_would_be_seen_in_what_travels(spoil, poison):
    for poisoned in (False, True):
        if poisoned:
            poison()
        pipeline = make_mlp_that_sends_pages()
        spoil(pipeline)
        finite = [bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(tiny_mlp.loss_and_grads(pipeline))]
        assert all(finite) != poisoned, finite


def forget_a_gradient(pipeline: Pipeline) -> None:
    """The last layer that leaves is not read."""
    grids, moves = pipeline.table.grids["replica_gradients"], pipeline.table.transfers["replica_gradients"].sends
    num_given = grids.num_sends.copy()
    last = moves.round.argmax()
    num_given[moves.round[last] - 1, moves.source[last]] = 0
    pipeline.table.grids["replica_gradients"] = dataclasses.replace(grids, num_sends=num_given)


def add_a_lane_that_carries_nothing(pipeline: Pipeline) -> None:
    """In a round in which no gradient comes to a device, though some do to others, it adds one."""
    table, grids = pipeline.table, pipeline.table.grids["replica_gradients"]
    num_received = grids.num_recvs.copy()
    round_, device = next(
        (round_, target)
        for round_, round_type in enumerate(table.round_type)
        if num_received[round_].any()
        for _, target in table.permutes_of("replica_gradients")[round_type][0]
        if not num_received[round_, target]
    )
    num_received[round_, device] = 1
    table.grids["replica_gradients"] = dataclasses.replace(grids, num_recvs=num_received)


@pytest.mark.parametrize("spoil", tiers([], ci=[forget_a_gradient], slow=[add_a_lane_that_carries_nothing]))
@pytest.mark.usefixtures("few_types")
def test_the_poison_would_be_seen_in_gradients_that_are_exchanged(spoil, poison):
    for poisoned in (False, True):
        if poisoned:
            poison()
        pipeline = make_mlp("bitpipe")
        spoil(pipeline)
        finite = [bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(tiny_mlp.loss_and_grads(pipeline))]
        assert all(finite) != poisoned, finite
