"""The re-evaluation of BPipe: its statements come out, for the reason that it gives."""

import sys

import pytest
from experiment_modules import modules_of

from experiments.pages import put_between
from experiments.png import content_of


@pytest.fixture(scope="module")
def run():
    with modules_of("020_reevaluation") as modules:
        yield modules["run"]


@pytest.mark.ci
def test_every_published_statement_comes_out(run):
    for said in run.PUBLISHED["statements"]:
        *_, by_equation, simulated = run.gains(said["model"], said["kernel"], ours=False)
        assert run.agrees(said, by_equation), said
        assert run.agrees(said, simulated), said
        assert by_equation == pytest.approx(simulated, abs=0.02)


def test_a_gain_where_none_was_found_is_no_agreement(run):
    effective, *others = run.PUBLISHED["statements"]
    assert not run.agrees(effective, 0.0)
    assert not any(run.agrees(said, 0.3) for said in others)


def test_memory_leaves_room_for_twice_the_microbatch(run):
    """18 bytes x 96.2e9 / 32 and 8 slots x 10 layers x 34 s b h / 4: 50.4 + 25.9 GiB at b = 2, 5 slots 16.2."""
    assert run.gains("gpt3_96b", "softmax", ours=False)[:2] == (1, 2)
    assert run.gains("llama_65b", "softmax", ours=False)[:2] == (2, 4)


def test_the_gain_is_the_kernels(run):
    """104 and 64 heads over 4 GPUs: 26 are no multiple of 4, 52 and 16 are."""
    fused = {
        (model, size): run.is_fused(run.setting(model, "softmax", size, "1f1b"))
        for model in run.MODELS
        for size in (1, 2)
    }
    assert fused == {("gpt3_96b", 1): False, ("gpt3_96b", 2): True, ("llama_65b", 1): True, ("llama_65b", 2): True}
    chain, one = (run.simulated_mfu("gpt3_96b", kernel, 1, "1f1b") for kernel in ("softmax", "one"))
    twice = run.simulated_mfu("gpt3_96b", "one", 2, "bpipe")
    assert twice / chain > 1.2
    assert twice / one < 1.05
    assert run.simulated_mfu("gpt3_96b", "softmax", 2, "bpipe") == twice


def test_what_the_bubble_leaves(run):
    """B / (B + b (p - 1)) with B = 128, p = 8."""
    for size, left in ((1, 128 / 135), (2, 128 / 142), (4, 128 / 156)):
        found = run.reevaluated("llama_65b", "flash")[size]
        assert found.formula_mfu / found.stage_mfu == pytest.approx(left)


def test_the_page_takes_the_tables(run):
    assert put_between("new", run.README.read_text()).count("new\n") == 1


def test_the_picture_is_of_these_figures(run):
    assert content_of(run.PICTURE) == sys.modules["picture"].content(run.panels())
