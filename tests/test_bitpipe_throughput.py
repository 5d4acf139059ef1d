"""Experiment 018: BitPipe's throughput on its authors' machines, predicted."""

import pytest
from experiment_modules import modules_of

from experiments.pages import put_sections


@pytest.fixture(scope="module")
def experiment():
    with modules_of("018_bitpipe_throughput") as modules:
        yield modules


@pytest.fixture(scope="module")
def fitted(experiment):
    return experiment["calibration"].FITTED


def run_of(experiment, model, method, **sizes):
    return experiment["runs"].run_of(model, method, **sizes)


def test_the_page_has_what_the_command_gives(experiment):
    page = experiment["run"].README.read_text()
    assert put_sections(experiment["run"].sections(), page) == page


def test_winners_and_errors_are_what_the_page_claims(experiment, fitted):
    """The bar: four of five winners everywhere; ratios within 5 % for the figures, honestly not for Table 7."""
    comparison = experiment["comparison"]
    sevens = comparison.pairs_of_table_7(comparison.table_7(fitted))
    figures = [comparison.pairs_of_figure_9(fitted), comparison.pairs_of_figure_10(fitted)]
    assert len(sevens) == 5 * 6  # columns x pairs of four methods
    assert comparison.num_right(sevens) / len(sevens) >= 0.8
    for pairs in figures:
        assert comparison.num_right(pairs) == len(pairs) == 6
        assert comparison.mean_error(pairs) <= 0.05
    assert comparison.mean_error(sevens) <= 0.12


def test_a_pair_is_right_where_both_ratios_are_on_one_side_of_one(experiment):
    pair = experiment["comparison"].Pair
    assert pair("", "", "", 1.1, 1.2).is_right
    assert pair("", "", "", 0.9, 0.5).is_right
    assert not pair("", "", "", 1.1, 0.9).is_right
    assert pair("", "", "", 1.1, 1.0).error == pytest.approx(0.1)


def test_table_7_has_a_work_of_n_equal_d(experiment):
    for model, pipe in experiment["published"].TABLE_7:
        run = run_of(experiment, model, "DAPPLE", data=32 // pipe, pipe=pipe)
        assert run.num_microbatches == pipe
        assert run.num_samples == {"BERT-64": 128, "GPT-96": 32}[model]


def test_depths_of_table_4_fill_the_gpus(experiment):
    for (_, num_gpus), row in experiment["published"].TABLE_4.items():
        assert {data * pipe for data, pipe, _ in row.values()} == {num_gpus}


def test_without_costs_of_messages_and_head_a_step_is_the_papers_formula(experiment):
    """DAPPLE (N + D - 1) (F + B); 1F1B-Int (2N + D - 1) of half; BitPipe (3N + D - 2) chunk forwards; all at N = D."""
    machine = experiment["machine"].Machine(0.5, 0.0, 1e18)
    plain = experiment["runs"].Model(64, 2560, 64, 512, vocab_size=0, microbatch_size=4, samples_per_gpu=4)
    layer_s = experiment["machine"].layer_forward_s(machine, plain, 4)
    for method, chunk_forwards in (("DAPPLE", 2 * 3 * 15), ("1F1B-Int", 3 * 23), ("BitPipe", 3 * 16 + 2 * 6)):
        run = experiment["runs"].Run(plain, experiment["runs"].METHODS[method], 1, 8, 4, 8)
        found = experiment["their_step"].step_of(machine, run).pipeline_s
        assert found == pytest.approx(chunk_forwards * 4 * layer_s, rel=2e-2), method  # messages over NVLink


def test_a_layer_takes_its_flops_and_its_bytes(experiment):
    """24 B s h^2 + 4 B s^2 h operations, s b h (34 + 5 a s / h) bytes; GPT-96: 2.45e11 and 2.7e8."""
    machine, model = experiment["machine"], experiment["runs"].MODELS["GPT-96"]
    assert machine.saved_bytes(model, 1) == 1024 * 3072 * 34 + 5 * 32 * 1024**2
    found = machine.layer_forward_s(machine.Machine(0.5, 0.0), model, 1)
    assert found == pytest.approx(
        (24 * 1024 * 3072**2 + 4 * 1024**2 * 3072) / 156e12 + 2 * 274.7e6 / 2.039e12, rel=1e-3
    )


@pytest.mark.parametrize(("data", "pipe", "together"), [(8, 4, False), (4, 8, True), (2, 16, True)])
def test_the_published_placement_parts_the_pairs_at_a_depth_of_4_alone(experiment, data, pipe, together):
    nodes = experiment["machine"].nodes_of(run_of(experiment, "BERT-64", "BitPipe", data=data, pipe=pipe))
    assert all((nodes[device] == nodes[-1 - device]) == together for device in range(pipe))
    # All hops of the pipeline but the one between the two devices in the middle cross nodes where pairs are together.
    crossing = sum(nodes[device] != nodes[device + 1] for device in range(pipe - 1))
    assert crossing == (pipe - 2 if together else pipe - 1)


def test_the_exchange_at_a_depth_of_4_takes_all_gradients_through_one_adapter(experiment, fitted):
    """Half of 64 layers of 12 h^2 weights on a device, 2 bytes each, of 8 GPUs, at 25 GB/s."""
    run = run_of(experiment, "BERT-64", "MixPipe", data=8, pipe=4)
    gradient_bytes = 32 * 12 * 2560**2 * 2
    found = experiment["machine"].exchange_s(fitted, run, 0, 3, gradient_bytes)
    assert found == pytest.approx(1.61, abs=0.005)
    other = run_of(experiment, "BERT-64", "DAPPLE", data=8, pipe=4)
    step_s = [experiment["their_step"].step_of(fitted, each).pipeline_s for each in (run, other)]
    assert step_s[0] - 1.61 < step_s[1]  # without it MixPipe's bubble is the smaller one


def test_one_f_one_b_interleaved_runs_all_forwards_first_with_n_equal_d(experiment):
    row = run_of(experiment, "BERT-64", "1F1B-Int", data=4, pipe=8).schedule.rows[0]
    assert [action.kind.name for action in row] == ["F"] * 16 + ["B"] * 16
    longer = run_of(experiment, "BERT-64", "1F1B-Int", data=1, pipe=8, num_samples=64).schedule.rows[0]
    assert [action.kind.name for action in longer][:32] != ["F"] * 32


def test_what_was_published_as_best_fits_by_our_count(experiment):
    grid, machine = experiment["grid"], experiment["machine"]
    for (model, _), row in experiment["published"].TABLE_4.items():
        for method, (data, pipe, size) in row.items():
            run = run_of(experiment, model, method, data=data, pipe=pipe, microbatch_size=size)
            assert grid.bytes_of(run) <= machine.GPU.memory_bytes


@pytest.mark.slow
def test_the_two_numbers_are_what_the_fit_gives(experiment, fitted):
    found = experiment["calibration"].fit()
    assert found.product_ratio == pytest.approx(fitted.product_ratio, abs=1e-3)
    assert found.hop_s == pytest.approx(fitted.hop_s, abs=5e-5)
