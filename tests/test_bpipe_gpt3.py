"""BPipe on GPT-3: what the experiment counts is the literature's, and what was published comes out as its page says."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from experiment_modules import modules_of

from experiments import megatron_bytes
from experiments.megatron_kernels import MegatronKernels
from experiments.pages import put_between
from experiments.png import content_of
from jaxpipe.estimate import Roofline


@pytest.fixture(scope="module")
def run():
    with modules_of("019_bpipe_gpt3") as modules:
        yield modules["run"]


@pytest.fixture(scope="module")
def cell(run):
    """A setting of GPT-3 96B, 12 stages x 4."""

    def setting(recompute, microbatch_size=1, schedule="1f1b"):
        return sys.modules["grid"].setting("gpt3_96b", (1, 12, 4), recompute, microbatch_size, schedule)

    return setting


def test_a_layer_keeps_what_korthikanti_et_al_count(cell):
    """MLSys 2023: s b h (10 + 24/t + 5 a s / (h t)); with sequence parallelism s b h (34 + 5 a s / h) / t."""
    h, a, s, t, b = 9984, 104, 2048, 4, 2
    kept = megatron_bytes.kept_bytes
    assert kept(cell("none", b)) == pytest.approx(s * b * h * (34 + 5 * a * s / h) / t)
    assert kept(cell("attention", b)) == pytest.approx(34 * s * b * h / t)
    assert kept(cell("full", b)) == pytest.approx(2 * s * b * h / t)
    assert kept(cell("none", b), sequence_parallel=False) == pytest.approx(
        s * b * h * (10 + 24 / t + 5 * a * s / h / t)
    )
    assert kept(cell("full", b), sequence_parallel=False) == pytest.approx(2 * s * b * h)
    assert kept(cell("attention", b), mlp_again=True) == pytest.approx(18 * s * b * h / t)


def test_parameters_are_those_of_the_literature(cell):
    """Narayanan et al., SC 2021, equation 2, and the last norm."""
    layers, h, s, v = 80, 9984, 2048, 51200
    expected = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h)) + 2 * h
    assert megatron_bytes.num_parameters(cell("none")) == pytest.approx(expected, rel=1e-9)


def test_stages_hold_as_many_slots_as_their_schedule(cell):
    of = cell("attention", 2)
    states = 18 * megatron_bytes.num_parameters(of) / 48
    layer = 34 * 2048 * 2 * 9984 / 4
    layers = np.array(of.layers_per_stage)
    assert megatron_bytes.stage_bytes(of) == pytest.approx(states + np.arange(12, 0, -1) * layers * layer)
    balanced = megatron_bytes.stage_bytes(cell("attention", 2, "bpipe"))
    assert balanced.max() <= states + 7 * layers.max() * layer * (1 + 1e-9)  # ceil((D+2)/2) slots


def test_the_feed_forwards_share_of_a_layer(cell):
    """24 s b h^2 (1 + s / (6 h)) of a layer's forward, of which its two products have 8 each."""
    layer = 24 * (1 + 2048 / (6 * 9984))
    assert megatron_bytes.mlp_share(cell("none"), with_last=True) == pytest.approx(16 / layer)
    assert megatron_bytes.mlp_share(cell("none"), with_last=False) == pytest.approx(8 / layer)


def test_the_chain_costs_its_bytes_where_heads_do_not_divide(cell, run):
    roofline = sys.modules["fits"].ROOFLINE
    source, always = MegatronKernels(roofline), MegatronKernels(roofline, always_fused=True)
    of = cell("attention", 1)  # 26 heads of a GPU
    chain, kernel = source.times(of), always.times(of)
    score_s = 26 * 2048**2 / (roofline.memory_fraction * 2.03904e12)
    assert chain.layer_forward_s - kernel.layer_forward_s == pytest.approx((37 - 4) * score_s)
    # Recomputed, then backward.
    assert chain.layer_backward_s - kernel.layer_backward_s == pytest.approx((37 - 4 + 41 - 6) * score_s)
    of = cell("none", 1)
    assert source.times(of).layer_backward_s - always.times(of).layer_backward_s == pytest.approx((41 - 6) * score_s)
    for fused in (cell("attention", 2), replace(of, tensor=2)):
        assert source.times(fused) == always.times(fused)


def test_without_the_chain_times_are_the_rooflines(cell, run):
    """But for the masks of dropout, which Megatron-LM does not draw as jaxpipe does."""
    of = cell("attention", 2)
    dry = replace(of, model=replace(of.model, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0))
    roofline = Roofline(of.topology.hardware)
    assert MegatronKernels(roofline).times(of) == roofline.times(dry)


def test_bpipe_fits_what_1f1b_does_not_as_compiled(run):
    fits = {(row["model"], row["schedule"]): run.fits(row["total_bytes"]) for row in run.COMPILED}
    for model in ("gpt3_96b", "gpt3_134b"):
        assert not fits[model, "1f1b"]
        assert fits[model, "bpipe"]
    for row in run.COMPILED:
        assert row["overlapped"] == row["evict_load_permutes"]
        case = row["model"], tuple(row["mesh"]), row["recompute"], row["microbatch_size"], row["schedule"]
        assert run.memory(run.setting(*case)).total == pytest.approx(row["total_bytes"], rel=0.05)


def test_memory_is_flat_with_bpipe(run):
    plain, balanced = run.panels().values()
    layers = np.array(run.setting(*run.SHOWN, "1f1b").layers_per_stage)
    page_bytes = plain.own[-1] / layers[-1]  # the last stage keeps one microbatch
    assert plain.own == pytest.approx(np.arange(12, 0, -1) * layers * page_bytes)
    held = balanced.own + balanced.parked + balanced.in_transit
    assert held.max() <= 7 * layers.max() * page_bytes * (1 + 1e-9)
    assert balanced.in_transit.max() > 0
    assert balanced.parked[:6].max() == 0
    assert max(plain.own) / min(plain.own) > 10
    assert held.max() / held.min() < 1.3


def test_evict_and_load_are_hidden_over_nvlink_and_not_over_one_adapter(run):
    moves, roofline = sys.modules["moves"], sys.modules["fits"].ROOFLINE
    case = moves.CASES[1]
    (_, near, whole), _, (_, far, share) = moves.LINKS
    found = moves.move(case, moves.Slow(roofline, whole), near)
    assert found.pages == found.microbatches == pytest.approx(1)
    assert found.program < 1.05
    found = moves.move(case, moves.Slow(roofline, share), far)
    assert min(found.pages, found.microbatches, found.program) > 1.2


def test_a_slower_network_is_slower_between_nodes_alone(run):
    moves, roofline = sys.modules["moves"], sys.modules["fits"].ROOFLINE
    slow = moves.Slow(roofline, 0.125)
    assert slow.link(in_node=True) == roofline.link(in_node=True)
    assert slow.link(in_node=False).bytes_per_s == roofline.link(in_node=False).bytes_per_s / 8


def test_the_gain_is_where_memory_binds(run):
    fits = sys.modules["fits"]
    of = list(run.cells(models=("gpt3_96b",), meshes=((1, 8, 4),)))
    without, balanced = (fits.best(of, fits.MEGATRON, balanced=each) for each in (False, True))
    assert balanced.recompute == "attention"
    assert balanced.setting.microbatch_size == 2
    assert 1.1 < balanced.mfu / without.mfu < run.PUBLISHED["most_speed_up"]
    least = fits.mfu(run.one(of, "attention").plain, fits.MEGATRON)
    assert run.PUBLISHED["least_speed_up"] < balanced.mfu / least < run.PUBLISHED["most_speed_up"]


def test_the_page_takes_the_tables(run):
    assert put_between("new", run.README.read_text()).count("new\n") == 1


def test_the_picture_is_of_these_figures(run):
    assert content_of(run.PICTURE) == sys.modules["picture"].content(run.panels(), run.LIMIT_BYTES)
