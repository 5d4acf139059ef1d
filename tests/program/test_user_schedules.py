"""The program knows no schedule and no model: users' own ones give the gradients of plain `jax.grad`."""

import jax
import numpy as np
import pytest
from csv_schedules import CSV, LAYERS_PER_STAGE
from tiers import tiers
from tiny_mlp import assert_equivalent, make_batch, make_params, make_pipeline

from jaxpipe.lowering import RoundTable, lower
from jaxpipe.lowering.transfers.messages import OWN
from jaxpipe.schedules import Placement, Schedule, build, check, from_csv, parse_action, read_csv

OFTEN = ["V leaves", "leaves twice"]
SENDS_PAGES = ["some leave", "leaves twice", "crosswise", "away for a moment", "chunks leave", "V leaves"]


@pytest.mark.parametrize("what", tiers([], ci=OFTEN, slow=[what for what in CSV if what not in OFTEN]))
def test_a_schedule_from_csv_has_the_gradients_of_plain_grad(what, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(CSV[what])
    layers_per_stage = LAYERS_PER_STAGE[what]
    pipeline = make_pipeline(read_csv(path), num_layers=sum(layers_per_stage), layers_per_stage=layers_per_stage)
    assert_equivalent(pipeline)


def test_local_hops_and_messages_that_wait_are_among_these():
    inboxes = [lower(from_csv(text, name=what)).grids["messages"] for what, text in CSV.items()]
    assert any(inbox.num_inbox for inbox in inboxes)
    assert any(OWN in inbox.next_source for inbox in inboxes)
    assert any((inbox.store_own != inbox.num_inbox).any() for inbox in inboxes)
    assert any((inbox.store_arrival != inbox.num_inbox).any() for inbox in inboxes)


def table_of(what: str) -> RoundTable:
    return lower(from_csv(CSV[what], name=what), layers_per_stage=LAYERS_PER_STAGE[what])


def test_pages_that_travel_are_among_these_and_some_turn_back_at_once():
    assert [what for what in CSV if table_of(what).num_lanes("parked_pages")] == SENDS_PAGES
    moves = table_of("away for a moment").page_moves
    assert (moves.returns == moves.leaves + 1).any()


@pytest.mark.parametrize("what", tiers([], slow=["leaves twice", "V leaves"]))
def test_pages_of_unrolled_rounds_come_back_too(what):
    layers_per_stage = LAYERS_PER_STAGE[what]
    options = {"num_layers": sum(layers_per_stage), "layers_per_stage": layers_per_stage, "rolled": False}
    assert_equivalent(make_pipeline(from_csv(CSV[what], name=what), **options))


def test_what_leaves_twice_stays_away_in_between():
    """Two thirds of three pages are two, and they leave once."""
    table = table_of("leaves twice")
    microbatch = table.schedule.columns.microbatch[table.page_moves.backward]
    pages = sorted(zip(microbatch.tolist(), table.page_moves.layer.tolist(), strict=True))
    assert pages == [(0, 0), (0, 1), (1, 0), (1, 1)]


# Stages of two replicas on two devices; the first one's four stages in a V, of which two are summed early.
TWO_REPLICAS = {
    "no SYNC": (((0, 1), (1, 0)), 2, ("0F0 1F1@1 1B1@1 0B0", "1F0 1B0 0F1@1 0B1@1")),
    "SYNC of some": (
        ((0, 1, 1, 0), (1, 0, 0, 1)),
        2,
        (
            "0F0 3F0 3B0 3SYNC 1F1@1 2F1@1 2B1@1 2SYNC@1 0B0 1B1@1",
            "1F0 2F0 0F1@1 2B0 2SYNC 1B0 3F1@1 3B1@1 3SYNC@1 0B1@1",
        ),
    ),
}


@pytest.mark.parametrize("what", tiers([], ci=["SYNC of some"], slow=["no SYNC"]))
def test_two_replicas_as_a_user_writes_them_have_the_gradients_of_plain_grad(what):
    devices, num_microbatches, rows = TWO_REPLICAS[what]
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    schedule = check(Schedule(what, Placement(2, devices), num_microbatches, actions))
    assert_equivalent(make_pipeline(schedule, num_layers=2 * len(devices[0]) - 1))


@pytest.mark.parametrize("case", tiers([], slow=[("gpipe", 2), ("1f1b", 1)]), ids=str)
def test_a_model_of_one_layer_a_stage(case):
    name, data = case
    assert_equivalent(make_pipeline(build(name, num_devices=3, num_microbatches=5), num_layers=3, data=data))


@pytest.mark.slow
def test_unrolled_rounds_give_the_same():
    schedule = build("1f1b", num_devices=3, num_microbatches=4)
    assert_equivalent(make_pipeline(schedule, num_layers=4, rolled=False))


@pytest.mark.parametrize(
    "case",
    tiers(
        [],
        ci=[("bpipe", 4)],
        slow=[
            ("hanayo", 4),
            *(("zb_v", 4), ("bitpipe", 4), ("dualpipe_v", 2)),
            *((name, 4) for name in ("1f1b", "gems", "dualpipe", "mixpipe", "v_min")),
            *((name, 2) for name in ("zb_h1", "zb_v", "interleaved_1f1b")),
        ],
    ),
    ids=str,
)
def test_rounds_laid_out_for_blocking_permutes_give_the_same(case):
    name, num_devices = case
    schedule = build(name, num_devices=num_devices, num_microbatches=9)
    pipeline = make_pipeline(schedule, num_layers=schedule.num_stages + 1, blocking=True)
    assert_equivalent(pipeline)


@pytest.mark.ci
def test_gradients_of_bfloat16_add_up_in_float32():
    """All microbatches are the same one: the sum is a multiple of its gradient, exact in float32 only."""
    grads = {}
    for num_microbatches in (1, 17):
        pipeline = make_pipeline(build("1f1b", num_devices=2, num_microbatches=num_microbatches), num_layers=3)
        params = pipeline.to_stages(make_params(3, "bfloat16"))
        batch = jax.tree.map(lambda leaf, n=num_microbatches: leaf.repeat(n, axis=0), make_batch(1, "bfloat16"))
        grads[num_microbatches] = pipeline.from_stages(pipeline.loss_and_grads(params, batch)[1])
    for one, sum_ in zip(jax.tree.leaves(grads[1]), jax.tree.leaves(grads[17]), strict=True):
        assert sum_.dtype == np.float32
        np.testing.assert_array_equal(sum_, 17 * np.asarray(one))
        assert np.any(sum_ != sum_.astype("bfloat16").astype("float32"))


@pytest.mark.parametrize("data", tiers([], slow=[2, 1]))
def test_compute_copies_are_the_masters_in_the_dtype_asked_for(data):
    """Then float32 masters compute the same as masters that were rounded before, bit for bit."""
    schedule = build("gpipe", num_devices=2, num_microbatches=3)
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), make_params(3))
    results = []
    for params, dtype in ((make_params(3), "bfloat16"), (rounded, None)):
        pipeline = make_pipeline(schedule, num_layers=3, data=data, dtype=dtype)
        results.append(pipeline.loss_and_grads(pipeline.to_stages(params), make_batch(3, "bfloat16")))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert {leaf.dtype for leaf in jax.tree.leaves(results)} == {np.dtype("float32")}


@pytest.mark.ci
def test_scale_multiplies_loss_and_gradients():
    pipeline = make_pipeline(build("1f1b", num_devices=2, num_microbatches=3), num_layers=2)
    params, batch = pipeline.to_stages(make_params(2)), make_batch(3)
    # A power of two scales every float exactly.
    for one, quarter in zip(
        jax.tree.leaves(pipeline.loss_and_grads(params, batch)),
        jax.tree.leaves(pipeline.loss_and_grads(params, batch, 0.25)),
        strict=True,
    ):
        np.testing.assert_array_equal(quarter, one / 4)


@pytest.mark.ci
def test_rows_of_shorter_stages_have_no_gradient():
    pipeline = make_pipeline(build("1f1b", num_devices=2, num_microbatches=3), num_layers=4, layers_per_stage=(1, 3))
    _, grads = pipeline.loss_and_grads(pipeline.to_stages(make_params(4)), make_batch(3))
    kernel = np.asarray(grads["layers"]["kernel"])  # [device, chunk, layer, ...]
    assert kernel.shape[:3] == (2, 1, 3)
    assert not kernel[0, 0, 1:].any()
    assert kernel[0, 0, 0].any()
    assert kernel[1].any(axis=(-2, -1)).all()


def test_to_stages_and_from_stages_are_inverse():
    pipeline = make_pipeline(from_csv(CSV["V"], name="V"), num_layers=7, layers_per_stage=(1, 3, 2, 1))
    params = make_params(7)
    jax.tree.map(np.testing.assert_array_equal, pipeline.from_stages(pipeline.to_stages(params)), params)
