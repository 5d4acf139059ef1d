"""A measurement of a small model is whole, and `Measured` reads it. Nothing timed is asserted."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import jax
import numpy as np
import pytest

from jaxpipe.bench import clock_efficiency
from jaxpipe.config import base_config, check
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Times
from jaxpipe.estimate.costs import costs_of
from jaxpipe.estimate.measured import Measurement
from jaxpipe.lowering.pairs import pairs_in_rounds
from jaxpipe.measure import __main__ as command
from jaxpipe.measure.__main__ import check_output, sizes_of
from jaxpipe.measure.actions import (
    NUM_MICROBATCHES,
    compile_runs,
    make_stages,
    solve,
    some_actions,
    stages_with_pairs,
    three_stages,
    times_of,
)
from jaxpipe.measure.measurement import measure, num_parameters
from jaxpipe.schedules import Costs
from jaxpipe.schedules.passes.overlap import num_pairs
from jaxpipe.schedules.rules import check as check_rules
from jaxpipe.schedules.schedule import Kind


def small_config(*, vocab_over_pipe="false", overlap=False, **fields):
    config = base_config()
    config.model.update(num_layers=4, hidden=32, num_heads=2, vocab_size=256)
    config.data.update(seq_len=16, batch_size=8)
    config.pipeline.update(num_microbatches=4, vocab_over_pipe=vocab_over_pipe, overlap=overlap)
    config.mesh.update(pipe=2, platform="cpu", **fields)
    check(config)
    return config


@pytest.fixture(scope="module")
def stages():
    return make_stages(small_config(), jax.devices()[:1], microbatch_size=2, num_layers=2)


@pytest.mark.parametrize("splits_head", [False, True])
@pytest.mark.parametrize("by_halves", [False, True])
def test_the_stages_keep_the_rules(by_halves, splits_head):
    check_rules(three_stages(NUM_MICROBATCHES, by_halves=by_halves, splits_head=splits_head))


def test_the_stages_with_pairs_keep_the_rules_and_all_their_pairs_run():
    schedule = stages_with_pairs(NUM_MICROBATCHES)
    check_rules(schedule)
    assert num_pairs(pairs_in_rounds(schedule)) == num_pairs(schedule) == NUM_MICROBATCHES - 1


def test_one_device_waits_for_nobody_by_the_clock_with_s_and_t():
    costs = Costs(head_statistics=0.7, head_gradients=1.1)
    assert clock_efficiency(three_stages(4, by_halves=False, splits_head=True), costs) == pytest.approx(1.0)


@pytest.mark.ci
def test_all_actions_are_loss_and_grads_and_none_is_nothing(stages):
    run, arguments = stages.compile_some(stages.whole), (stages.params, stages.batch)
    scale = 1.0 / (NUM_MICROBATCHES * 2 * 16)  # of every token
    whole = stages.whole.loss_and_grads(*arguments, scale)
    of_all = run(np.ones(stages.whole.table.kind.shape, bool))
    np.testing.assert_allclose(of_all[0], whole[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), of_all[1], whole[1])
    of_none = run(np.zeros(stages.whole.table.kind.shape, bool))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_none))


@pytest.mark.ci
def test_the_stages_with_pairs_have_the_same_gradients_and_their_runs_count_them():
    stages = make_stages(small_config(overlap=True), jax.devices()[:1], microbatch_size=2, num_layers=2)
    found, wanted = (of.loss_and_grads(stages.params, stages.batch) for of in (stages.pairs, stages.whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
    kinds = stages.pairs.table.kind[some_actions(stages.pairs, 1, tuple(Kind))]
    counts = {name: number // stages.num_layers for name, number in compile_runs(stages)[-1].counts.items()}
    assert counts["layer_pair_s"] == np.sum(kinds == Kind.PAIR) == np.sum(kinds == Kind.PUT) == NUM_MICROBATCHES - 1
    assert counts["layer_forward_s"] == np.sum(kinds == Kind.F) == np.sum(kinds == Kind.B) == 1


@pytest.mark.ci
def test_the_part_of_a_split_head_is_that_of_a_smaller_vocabulary():
    """S and T of all rows of the part are loss and gradients of the model that has these rows alone."""
    make = {"devices": jax.devices()[:1], "microbatch_size": 2, "num_layers": 1}
    part = make_stages(small_config(vocab_over_pipe="true"), **make).part
    assert part.params["shared"]["embedding"]["token"].shape == (128, 32)
    within = {**part.batch, "tokens": part.batch["tokens"] % 128, "targets": part.batch["targets"] % 128}
    found, wanted = (
        each.whole.loss_and_grads(part.params, within) for each in (part, make_stages(part.config, **make))
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found[1], wanted[1])
    is_head = np.isin(part.whole.table.kind, (Kind.S, Kind.T))
    of_head = part.compile_some(part.whole)(is_head)[1]
    assert np.any(of_head["shared"]["embedding"]["token"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_head["layers"]))


def test_some_actions_reach_their_stage_alone(stages):
    run = stages.compile_some(stages.whole)
    loss, grads = run(some_actions(stages.whole, 2, (Kind.F, Kind.B)))
    assert loss > 0
    for leaf in jax.tree.leaves(grads["layers"]):  # [device, chunk, ...]
        assert not np.any(leaf[0, :2])
        assert np.any(leaf[0, 2])


def test_times_are_what_runs_have_in_common():
    """Runs made up from known times give these times back."""
    unknowns = {"layer_forward_s": 3.0, "layer_backward_s": 7.0, "head_s": 2.0, "embed_forward_s": 0.0}
    unknowns |= {"layer_input_gradient_s": 4.0, "layer_weight_gradient_s": 3.5, "embed_backward_s": 0.5}
    unknowns |= {"statistics_s": 1.5, "gradients_s": 2.5}
    names, random = list(unknowns), np.random.default_rng(0)
    runs = []
    for _ in range(12):
        counts = dict(zip(names, random.integers(0, 4, len(names)).tolist(), strict=True))
        runs.append((counts, sum(counts[name] * unknowns[name] for name in names)))
    assert asdict(times_of(runs, update_s=1.0)) == pytest.approx(asdict(Times(**unknowns, update_s=1.0)), abs=1e-9)


def test_a_pair_that_takes_longer_than_its_halves_hides_less_than_nothing():
    runs = [({"layer_forward_s": 1}, 2.0), ({"layer_backward_s": 1}, 4.0), ({"layer_pair_s": 2}, 13.0)]
    others = ["layer_input_gradient_s", "layer_weight_gradient_s", "embed_forward_s", "embed_backward_s", "head_s"]
    times = times_of([*runs, *(({name: 1}, 1.0) for name in others)], update_s=1.0)
    assert times.layer_hidden_s == pytest.approx(-0.5)
    assert costs_of(times).pair == 1.1


def test_no_time_is_below_zero():
    assert solve([({"a": 1}, 2.0), ({"a": 1, "b": 1}, 1.9)])["b"] == 0


def test_parameters_are_counted(stages):
    h, words, positions = 32, 256, 16
    # Korthikanti et al. 2023: 12 h^2 of kernels; biases 4 h, h, 3 h + h; two norms of 2 h.
    layer = 12 * h * h + 4 * h + h + 4 * h + 4 * h
    shared = (words + positions) * h + 2 * h
    found = num_parameters(stages.whole, stages.params, num_layers=6)
    assert found["num_layer_parameters"] == layer
    assert found["num_shared_parameters"] == shared
    assert found["num_update_parameters"] == 6 * layer + shared


def assert_whole(found: Measurement, sizes):
    assert list(found.times) == list(found.spread_ratio) == sizes
    for times in found.times.values():
        values = {name: value for name, value in asdict(times).items() if value is not None}
        assert ("statistics_s" in values) == ("gradients_s" in values) == (found.head_parts > 1)
        assert all(np.isfinite(value) and value >= 0 for name, value in values.items() if name != "layer_hidden_s")
        assert times.update_s > 0
    assert found.identity.keys() >= {"device_kind", "jax_version", "date", "num_processes", "num_repeats"}
    assert found.subject.items() >= {"hidden": 32, "recompute": "none", "dtype": "float32", "seq_len": 16}.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "vocab_over_pipe", "overlap"), [(1, "false", False), (2, "true", False), (2, "false", True)]
)
def test_one_process_measures(tensor, vocab_over_pipe, overlap):
    config = small_config(tensor=tensor, vocab_over_pipe=vocab_over_pipe, overlap=overlap)
    found = measure(config, jax.devices()[: tensor + 1], microbatch_sizes=[2], num_layers=1, num_repeats=1)
    assert_whole(found, [2])
    assert found.subject["tensor"] == tensor
    assert (found.times[2].layer_hidden_s != 0) == overlap
    assert found.head_parts == (2 if vocab_over_pipe == "true" else 1)
    assert found.link is not None
    alone = measure(config, jax.devices()[:tensor], microbatch_sizes=[1, 2], num_layers=1, num_repeats=1)
    assert_whole(alone, [1, 2])
    assert alone.link is None


def run_command(*arguments, folder):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    fields = {"model.hidden": 32, "model.num_heads": 2, "mesh.pipe": 2, "data.seq_len": 16}
    chosen = [f"--config.{field}={value}" for field, value in fields.items()]
    program = [sys.executable, "-m", "jaxpipe.measure"]
    command = [*program, f"--config={os.getcwd()}/configs/bench_cpu.py", "--num_repeats=1"]
    return subprocess.run(
        [*command, *chosen, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.getcwd()},
        timeout=250,
    )


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_processes_measure_at_once_and_write(tmp_path):
    arguments = ("--num_processes=2", "--microbatch_sizes=2", "--num_layers=1", "--output=costs.json")
    ran = run_command(*arguments, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]
    found = Measurement.from_json(json.loads((tmp_path / "costs.json").read_text()))
    assert_whole(found, [2])
    assert found.identity["num_processes"] == 2
    assert found.link is not None
    timed = [field for field, value in asdict(found.times[2]).items() if value is not None]
    assert all(field.removesuffix("_s").replace("_", " ") in ran.stdout for field in timed)


def test_the_pipeline_of_a_config_does_not_count(monkeypatch):
    asked = []
    monkeypatch.setattr(command, "_measure", lambda values, *rest: asked.append(rest) or sys.exit(3))
    fields = ("mesh.pipe=8", "model.num_layers=2", "pipeline.costs=not_yet.json", "pipeline.schedule=none.csv")
    with pytest.raises(SystemExit, match="3"):
        command.main(["--config=configs/bench_cpu.py", *(f"--config.{field}" for field in fields)])
    ((config, sizes),) = asked
    assert (config.mesh.pipe, config.model.num_layers, config.pipeline.schedule) == (1, 2, "1f1b")
    assert sizes == [config.data.batch_size // config.pipeline.num_microbatches]
    feedback = ["--config.pipeline.schedule=pipedream_2bw", "--config.optimizer.error_feedback=true"]
    with pytest.raises(SystemExit, match="3"):
        command.main(["--config=configs/bench_cpu.py", *feedback])
    with pytest.raises(SystemExit, match="3"):
        command.main(["--config=configs/bench_cpu.py", "--config.pipeline.vocab_over_pipe=true"])
    config = asked[-1][0]
    assert (config.mesh.pipe, config.pipeline.vocab_over_pipe) == (8, "true")


def test_a_file_is_not_overwritten_unasked(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="rule output"):
        check_output(str(file), overwrite=False)
    check_output(str(file), overwrite=True)
    with pytest.raises(ConfigError, match="no folder"):
        check_output(str(tmp_path / "missing" / "costs.json"), overwrite=True)
    assert file.read_text() == "kept"


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(command.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="may not be written to"):
        check_output(str(tmp_path / "costs.json"), overwrite=False)


@pytest.mark.parametrize("written", [["0"], ["1", "two"], [], ["-1"]])
def test_sizes_are_whole_numbers(written):
    with pytest.raises(ConfigError, match="rule microbatch-sizes"):
        sizes_of(written, small_config())


def test_sizes_are_the_configs_by_default():
    assert sizes_of(None, small_config()) == [2]
    assert sizes_of(["1", "4"], small_config()) == [1, 4]
