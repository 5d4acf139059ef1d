"""Experiment 026: its page holds what is kept, its tables are of what was timed, and PyTorch's steps can be timed."""

import json

import pytest
from experiment_modules import EXPERIMENTS, modules_of

from experiments.markdown_tables import tables
from experiments.pages import put_between
from jaxpipe.estimate import Times, stage_costs
from jaxpipe.schedules import Costs, build

NOT_YET = "not yet measured"
ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"  # 1F1B in PyTorch's form
LAYER = {"layer_forward_s": 1.0, "layer_backward_s": 2.0, "layer_input_gradient_s": 1.0, "layer_weight_gradient_s": 1.0}
TIMES = LAYER | {"embed_forward_s": 0.0, "embed_backward_s": 0.0, "head_s": 0.0, "update_s": 0.0}
NUMBERS = {"num_layer_parameters": 1, "num_shared_parameters": 1, "num_update_parameters": 1}
COSTS = NUMBERS | {
    "format": 1,
    "identity": {"num_repeats": 3, "jax_version": "0.10.2", "date": "2026-11-24"},
    "subject": {},
    "times": {"2": TIMES},
    "spread_ratio": {"2": 0.0},
    "link": None,
}


@pytest.fixture(scope="module")
def run():
    pytest.importorskip("torch", reason="the experiment compares with PyTorch")
    with modules_of("026_wall_clock") as modules:
        yield modules["run"]


def record(step_s, **more):
    """A run whose unpipelined step takes 16 s, and 20 s as one of two copies."""
    timed = {"pipelined_wall_s": step_s, "unpipelined_wall_s": 16.0}
    return timed | {"efficiency": 16.0 / (2 * step_s), "efficiency_of_cores": 0.8} | more


def test_the_page_holds_what_is_kept(run):
    page = run.PAGE.read_text()
    kept = json.loads(run.RAW.read_text()) if run.RAW.exists() else {}
    assert put_between(run.document(run.CASES, run.SIZE, kept), page) == page


def test_the_tables_are_of_what_was_timed(run):
    kept = {
        "jaxpipe costs": [COSTS],
        "jaxpipe 1f1b": [record(10.0), record(16.0), record(12.5)],
        "PyTorch ScheduleZBVZeroBubble": [record(20.0, torch_version="2.13.0", rows=ROWS)],
    }
    text = run.document(run.CASES, run.SIZE, kept)
    (steps,) = tables(text)
    assert text.startswith("Runs of a case: 1, of 3 steps each; jax 0.10.2, torch 2.13.0, 2026-11-24.")
    assert [(row["library"], row["schedule"]) for row in steps.rows] == run.CASES
    rows = {row["schedule"]: list(row.values())[2:] for row in steps.rows}
    bubble = f"{16 / 17:.3f}"  # N / (N + D - 1) of 1F1B
    assert rows["1f1b"] == ["12.500", "48.0%", "16.000", "20.000", "0.640", "0.800", bubble, bubble]
    zb_v = ["20.000", "0.0%", "16.000", "20.000", "0.400", "0.500", f"{2 / 3:.3f}", "-"]
    assert rows["ScheduleZBVZeroBubble"] == zb_v
    assert rows["bitpipe"][:6] == [NOT_YET] * 6
    assert rows["ScheduleDualPipeV"] == [*[NOT_YET] * 7, "-"]


def test_the_clock_pays_for_split_backwards(run):
    schedule = build("zb_h1", num_devices=2, num_microbatches=16)
    dear = Costs(input_gradient=1.5, weight_gradient=1.5)
    assert run.clock_efficiency(schedule, dear) < 0.8 < run.clock_efficiency(schedule, Costs())
    ends = stage_costs(Times(**TIMES | {"embed_forward_s": 0.5, "head_s": 0.25}), [2] * 4)
    assert (ends.forward, ends.backward) == ((2.5, 2.0, 2.0, 2.25), (4.0,) * 4)


def test_a_second_call_goes_on_where_the_first_stopped(run, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "measure", lambda *case, num_steps: seen.append(case[:2]) or {"number": len(seen)})
    kept = {"jaxpipe costs": [{}, {}], "PyTorch Schedule1F1B": [{}]}
    cases = [("jaxpipe", "1f1b"), ("PyTorch", "Schedule1F1B")]
    calls = run.measure_all(cases, run.TINY, kept, runs=2, steps=1)
    next(calls)
    assert kept["jaxpipe 1f1b"] == [{"number": 1}]
    list(calls)
    assert seen == [cases[0], cases[0], cases[1]]
    assert {len(records) for records in kept.values()} == {2}
    assert list(run.measure_all(cases, run.TINY, kept, runs=2, steps=1)) == []


@pytest.mark.slow
def test_every_schedule_of_pytorchs_runs(run, monkeypatch):
    """The script itself holds pipelined gradients against unpipelined ones."""
    monkeypatch.setenv("PYTHONPATH", str(EXPERIMENTS.parent))
    for name in run.PYTORCH:
        found = run.measure("PyTorch", name, run.TINY, num_steps=1)
        assert found["pipelined_wall_s"] > 0
        assert run.schedule_of("PyTorch", name, [found], 4).num_microbatches == 4
