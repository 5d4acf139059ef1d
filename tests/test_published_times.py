"""Experiment 023: predicted step times beside published ones."""

import doctest
from dataclasses import replace

import pytest
from experiment_modules import modules_of


@pytest.fixture(scope="module")
def of_023():
    with modules_of("023_published_times") as modules:
        yield modules


@pytest.mark.slow
def test_predictions_hold_against_published_tables(of_023):
    run, cells = of_023["run"], of_023["cells"]
    rows, second = cells.zero_bubble(run.STEP), cells.vocabulary(run.STEP)
    agreed, num_pairs = run.agreement(rows)
    assert agreed >= 66
    assert num_pairs == 72
    assert run.error(cell.ratio for row in rows for cell in row) <= 0.04
    assert run.error(run.of_schedule(second, "1f1b")) <= 0.09
    assert run.error(run.of_schedule(second, "v_half")) <= 0.06
    assert run.error(run.gains(second)) <= 0.04
    assert run.error(run.of_schedule(second, "v_half", run.SPLIT)) <= 0.06
    assert run.error(run.gains(second, run.SPLIT)) <= 0.04
    assert run.error(run.gains(second, run.SPLIT, run.MOVED)) <= 0.05


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="it is 6.2 % since V-Half's orders changed on 25 November: see the page")
def test_a_head_over_all_devices_is_predicted_within_six_percent(of_023):
    run = of_023["run"]
    second = of_023["cells"].vocabulary(run.STEP)
    assert run.error(run.of_schedule(second, None, run.SPLIT)) <= 0.06


def test_every_mechanism_changes_times_messages_or_the_program(of_023):
    run, their_step = of_023["run"], of_023["their_step"]
    setting = of_023["cells"].of_zero_bubble("1.5B", 24, "1f1b")
    split = replace(setting, vocab_over_pipe=True)

    def seen(step):
        programs = step.program("1f1b"), step.program("zb_h1")
        return step.times(setting), step.times(split), step.link(in_node=True), programs, step.peak_flops_per_s

    for words, change in run.LEFT_OUT.items():
        assert seen(their_step.TheirStep(**change)) != seen(run.STEP), words


def test_the_published_mfu_divides_by_320_tflops(of_023):
    cells, their_step = of_023["cells"], of_023["their_step"]
    tables = {row[2]: row[6:] for row in cells.PUBLISHED["vocabulary"]["rows"] if row[:2] == ["1f1b", 8]}
    for seq_len, words, *of_ways in cells.PUBLISHED["profile"]["rows"]:
        column = cells.PUBLISHED["vocabulary"]["vocab_sizes"].index(words)
        for mfu, tflops in zip(tables[seq_len], of_ways[:3], strict=True):
            assert 1e14 * tflops / mfu[column] == pytest.approx(their_step.PEAK_FLOPS_PER_S, rel=5e-4)


def test_layers_take_longer_beside_collectives_by_the_profile(of_023):
    of_layers = [row[5:9] for row in of_023["cells"].PUBLISHED["profile"]["rows"]]
    ratios = [(split_f + split_b) / (f + b) for f, b, split_f, split_b in of_layers]
    assert sum(ratios) / len(ratios) == pytest.approx(of_023["their_step"].BESIDE_COLLECTIVES, abs=5e-4)


def test_layers_moved_from_the_head(of_023):
    assert doctest.testmod(of_023["cells"]) == (0, 2)
