"""Experiment 022: what is measured of growth is what schedules have, and its page holds what is kept."""

import json
import sys

import pytest
from experiment_modules import modules_of

from experiments.pages import put_between
from jaxpipe.lowering.round_types import MAX_TYPES


@pytest.fixture(scope="module")
def run():
    with modules_of("022_growth") as modules:
        yield modules["run"]


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches", "actions", "slots"),
    [
        ("1f1b", 8, 64, 2 * 8 * 64, 8),  # F and B; D microbatches are stored
        ("bpipe", 8, 16, 2 * 8 * 16, 5),  # without moves, which lowering gives rounds to themselves; ceil((D+2)/2)
        ("zb_h1", 8, 16, 3 * 8 * 16, 8),  # F, I and W
    ],
)
def test_records_are_of_the_schedule(run, name, num_devices, num_microbatches, actions, slots):
    record = sys.modules["schedule_growth"].measure(name, num_devices, num_microbatches)
    moves = record["actions"] - actions
    assert moves == 0 or (name == "bpipe" and moves > 0)
    assert record["slots"] == slots
    assert min(record[field] for field in ("build_s", "simulate_s", "lower_s")) >= 0


def test_what_is_kept_is_every_case_and_programs_are_bounded(run):
    records = json.loads(run.RECORDS.read_text())
    assert set(records) == set(run.KINDS)
    cases = sys.modules["schedule_growth"].cases()
    assert [(r["schedule"], r["D"], r["N"]) for r in records["schedules"]] == cases
    assert max(record["types of rounds"] for record in records["schedules"]) <= MAX_TYPES  # whatever D and N
    on_cpu = {(r["D"], r["N"]): r for r in records["programs"]}
    assert on_cpu[8, 4096]["instructions"] == pytest.approx(on_cpu[8, 64]["instructions"], rel=0.01)


def test_the_page_holds_what_is_kept(run):
    page, records = run.PAGE.read_text(), json.loads(run.RECORDS.read_text())
    assert put_between(run.document(records), page) == page


def test_quick_makes_the_small_cases_anew(run):
    small = {"schedule": "1f1b", "D": 2, "N": 3, "actions": 12, "slots": 99}
    large = {"schedule": "1f1b", "D": 2, "N": 3, "actions": 10**6, "slots": 99}
    again = run.small_again([small, large])
    assert again[0]["slots"] == 2
    assert again[1] is large


def test_a_table_has_fields_and_what_is_made_of_them(run):
    text = run.table(["D", "slots"], [{"D": 8, "slots": 5.0, "s": 0.126}], {"s": run._seconds("s")})
    assert text == "| D | slots | s |\n| --- | --- | --- |\n| 8 | 5 | 0.13 |\n"
