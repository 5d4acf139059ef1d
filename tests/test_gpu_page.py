"""The page of a GPU: what is measured is kept at once and measured once; the whole runs small on a CPU."""

import json
import random
import re
import runpy
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from experiments.gpu import ab, mock, page, processes
from experiments.gpu.cells import Cell, Part, Results, Size, measure_missing
from experiments.gpu.runs import metrics_of_run
from experiments.gpu.training import MIXTURE
from jaxpipe.cluster.hardware import HARDWARE, RESERVE_BYTES
from jaxpipe.cluster.topology import Topology
from jaxpipe.config import check, model_config
from jaxpipe.estimate import memory, setting_of
from jaxpipe.measure.mock import check_stage, cluster_of
from jaxpipe.mesh.xla_flags import is_known
from jaxpipe.models.flops import model_flops
from jaxpipe.schedules import build
from jaxpipe.schedules.methods.registry import DELAYED, REGISTRY

ROOT = Path(__file__).parents[1]
A100 = HARDWARE["a100-80g"]


@pytest.fixture
def size(tmp_path):
    device = namedtuple("Device", "platform device_kind")("gpu", A100.description)
    return Size(quick=True, device=device, output=tmp_path)


def parts_that(calls, *, fails=()):
    """Two parts of two cells, which write down that they are called."""

    def cells(part):
        def cell(name):
            def measure():
                calls.append(f"{part}/{name}")
                if f"{part}/{name}" in fails:
                    raise RuntimeError("out of memory\nand more")
                return {"ms": 1.5}

            return Cell(name, measure)

        return lambda size: [cell("one"), cell("two")]

    return [Part(part, part.title(), cells(part), minutes=1, cell_s=0) for part in ("first", "second")]


def measured(size, parts, *, minutes=1.0):
    lines = []
    results = Results(size.output)
    results.check(size)
    done = measure_missing(parts, size, results, until_s=time.monotonic() + 60 * minutes, say=lines.append)
    return done, results, lines


def test_nothing_is_measured_twice(size):
    calls = []
    parts = parts_that(calls)
    first = [replace(parts[0], cells=lambda size: parts[0].cells(size)[:1])]
    assert measured(size, first)[0]
    done, results, lines = measured(size, parts)
    assert done
    assert calls == ["first/one", "first/two", "second/one", "second/two"]
    assert [line.split(":")[0] for line in lines] == calls[1:]
    assert measured(size, parts)[2] == []
    assert results.records == Results(size.output).records


def test_a_cell_is_kept_before_the_next_begins(size):
    calls = []
    parts = parts_that(calls)

    def killed():
        raise KeyboardInterrupt

    parts[1] = replace(parts[1], cells=lambda size: [Cell("one", killed)])
    with pytest.raises(KeyboardInterrupt):
        measured(size, parts)
    assert list(Results(size.output).records["first"]) == ["one", "two"]
    assert measured(size, parts_that(calls))[0]
    assert calls == ["first/one", "first/two", "second/one", "second/two"]


def test_it_ends_when_its_minutes_are_over(size):
    calls = []
    assert not measured(size, parts_that(calls), minutes=0)[0]
    assert calls == []


def test_a_part_ends_within_its_minutes_and_the_next_begins(size):
    """No cell begins that may last beyond the part's minutes: here the second of a cell of 61 s in a minute."""
    calls = []
    parts = parts_that(calls)
    parts[0] = replace(parts[0], cell_s=61.0)
    done, _, lines = measured(size, parts)
    assert not done
    assert calls == ["second/one", "second/two"]
    assert lines[0] == "first: its 1 minutes are over"
    assert measured(size, parts_that(calls))[0]
    assert calls[2:] == ["first/one", "first/two"]


def test_a_cell_that_fails_costs_itself_alone(size):
    _, results, lines = measured(size, parts_that([], fails=("first/two",)))
    assert results.records["first"]["two"]["error"] == "RuntimeError: out of memory"
    assert "error RuntimeError: out of memory" in lines[1]
    assert results.records["second"]["two"]["ms"] == 1.5


def test_a_folder_is_of_one_device(size):
    measured(size, parts_that([]))
    other = replace(size, quick=False)
    with pytest.raises(ValueError, match="name another --output"):
        Results(size.output).check(other)


RECORDS = {
    "about": {"run": {"device": A100.description, "quick": False, "jax": "0.10.2", "date": "2026-11-23"}},
    "layers": {
        "matmul": {"side": 8192, "tflop_per_s": 250.0},
        "LLaMA": {"ms": {"F": 10.0, "B": 20.0}, "estimated_ms": {"F": 11.0, "B": 18.0}},
        "broken": {"error": "RuntimeError: no"},
    },
    "rounds": {"guard, not taken": {"us": 8.0}, "page written": {"us": 400.0, "gb_per_s": 1600.0}},
    "update": {"norm": {"ms": 1.0, "gb_per_s": 1800.0}, "cast": {"ms": 1.0, "gb_per_s": 1700.0}},
    "stages": {"LLaMA": {"costs": {"format": 1}, "ms": {"head": 2.0}}},
}


def test_the_page_has_a_row_for_each_cell_and_how_good_the_estimates_are(size):
    text = page.page([Part("layers", "A layer", list, 1), Part("head", "The head", list, 1)], RECORDS)
    assert text.startswith(f"# {A100.description}\n\nMeasured on 2026-11-23: jax 0.10.2.")
    row = next(line for line in text.splitlines() if line.startswith("| LLaMA"))
    assert "1.1 | 0.9" in row  # estimated / measured
    assert "RuntimeError: no" in text
    assert text.endswith("## The head\n\nNot measured yet.\n")


def test_constants_are_fractions_of_the_data_sheet(size):
    found = page.constants(size, RECORDS)
    assert found["hardware"] == "a100-80g"
    assert set(found) == {"hardware", "source", "memory_fraction"}  # none of the layers is known by its name
    assert found["memory_fraction"] == pytest.approx(1700 / 2039, abs=1e-3)
    assert page.costs(RECORDS) == {"format": 1}


@pytest.mark.ci
def test_the_matmul_fraction_is_the_one_that_predicts_the_layers(size):
    from experiments.gpu.layers import SHAPES, _estimated, config_of, fitted_matmul_fraction

    large = replace(size, quick=False)
    records = {shape.name: {"ms": _estimated(config_of(shape, large), large, 0.7)} for shape in SHAPES}
    assert fitted_matmul_fraction(large, records) == pytest.approx(0.7, abs=2e-3)
    assert fitted_matmul_fraction(large, {}) is None


def test_flops_of_a_layer_are_those_of_the_literature(size):
    """Narayanan et al., SC 2021, section 5.1: 24 B s h^2 + 4 B s^2 h forward, and twice that backward."""
    from experiments.gpu.layers import SHAPES, config_of, layer_flops

    large = replace(size, quick=False)
    llama, gpt, shared = SHAPES[0], SHAPES[-2], SHAPES[-1]
    s, h = 2048, 5120
    assert layer_flops(model_config(config_of(gpt, large)), gpt, s) == 3 * 4 * (24 * s * h**2 + 4 * s**2 * h)
    s, h, width, key_and_value = 8192, 4096, 14336, 2 * 8 * 128
    kernels = h * (2 * h + key_and_value + 3 * width)
    assert layer_flops(model_config(config_of(llama, large)), llama, s) == 3 * (2 * s * kernels + 4 * s**2 * h)
    config = config_of(shared, large)
    s, h = config.data.seq_len, config.model.hidden
    assert layer_flops(model_config(config), shared, s) == 3 * (24 * s * h**2 + 4 * s**2 * h) / 4


def test_the_training_runs_model_has_about_a_billion_parameters():
    model = model_config(runpy.run_path(str(ROOT / "experiments" / "gpu" / "llama_1b.py"))["get_config"]())
    flops = model_flops(model, seq_len=1, num_predicted=None)
    assert flops / 6 == pytest.approx(1.07e9, rel=0.01)  # all but the token table's 67 million, which no matmul reads


# ---- PyTorch's block


@pytest.fixture
def torch_block():
    pytest.importorskip("torch", reason="the page compares with PyTorch")
    from experiments.gpu import torch_block

    return torch_block


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_our_block_and_pytorchs_have_the_same_outputs_and_gradients(torch_block, name):
    assert torch_block.difference(torch_block.small_case(name, "cpu")) < 1e-4


@pytest.mark.ci
def test_a_block_with_other_rotary_frequencies_is_seen_to_differ(torch_block, monkeypatch):
    plain = torch_block.frequencies
    monkeypatch.setattr(torch_block, "frequencies", lambda *arguments: 1.01 * plain(*arguments))
    with pytest.raises(ValueError, match="differ by"):
        torch_block.compare("llama", torch_block.small_case("llama", "cpu"))


# ---- Several processes on one GPU


def rows_of(losses):
    return [{"loss": loss, "grad_norm": 1.0, "step_time_s": 0.5} for loss in losses]


@pytest.fixture
def runs(monkeypatch):
    """Stands for the runs of the part `processes`: returns their losses in turn, and keeps how they were started."""
    started, losses = [], []

    def run(config, fields, **how):
        started.append((config.name, fields, how))
        return rows_of(losses.pop(0))

    monkeypatch.setattr(processes, "metrics_of_run", run)
    processes._one.cache_clear()
    return SimpleNamespace(started=started, losses=losses)


def cell_of(part, size, name):
    return next(cell for cell in part.cells(size) if cell.name == name)


def test_every_method_is_tried_with_two_and_four_processes_or_cannot_be(size):
    large = replace(size, quick=False)
    names = [cell.name for part in (processes.PART, processes.METHODS) for cell in part.cells(large)]
    assert len(set(names)) == len(names)
    for method in [*REGISTRY, *DELAYED]:
        for count in (2, 4):
            is_tried = f"{count} processes, {method}, pipe {count}" in names
            assert is_tried or (method, count) == ("bpipe", 2)  # which pairs devices of four or more
    assert {"data", "tensor", "expert"} < {word for name in names for word in name.replace(",", "").split()}


def test_every_case_is_a_config_that_trains():
    for case in (*processes.FIRST, *processes.OTHERS):
        preset = MIXTURE if case.is_mixture else processes.QUICKSTART
        config = runpy.run_path(str(preset))["get_config"]()
        config.update_from_flattened_dict((processes._MIXTURE if case.is_mixture else {}) | case.fields)
        check(config)
        num_microbatches = config.pipeline.num_microbatches
        assert build(case.method, num_devices=config.mesh.pipe, num_microbatches=num_microbatches).num_microbatches
        mesh = config.mesh.data * config.mesh.pipe * config.mesh.expert * config.mesh.tensor
        assert mesh == case.num_processes


@pytest.mark.parametrize(
    ("apart", "agree"), [(0.0, "True"), (0.9e-5, "True"), (1.1e-5, "False"), (float("nan"), "False")]
)
def test_losses_of_processes_stand_beside_those_of_one(size, runs, apart, agree):
    runs.losses.extend([[4.0, 2.0 * (1 + apart)], [4.0, 2.0], [4.0, 2.0]])
    record = cell_of(processes.PART, size, "2 processes, 1f1b, pipe 2").measure()
    assert record["within 1e-05"] == agree
    assert record["most_apart"] == pytest.approx(apart, abs=1e-12) or agree == "False"
    cell_of(processes.PART, size, "2 processes, 1f1b, data 2").measure()
    several, alone, data = runs.started  # the one process runs once
    assert (several[2]["num_processes"], alone[2]["num_processes"], data[2]["num_processes"]) == (2, 1, 2)
    assert (several[1]["mesh.pipe"], alone[1]["mesh.pipe"], data[1]["mesh.data"]) == (2, 1, 2)


def test_a_delayed_method_stands_beside_virtual_devices(size, runs):
    runs.losses.extend([[4.0], [4.0]])
    record = cell_of(processes.METHODS, replace(size, quick=False), "4 processes, pipedream_2bw, pipe 4").measure()
    assert record["within 1e-05"] == "True"
    assert [(fields["mesh.platform"], fields["mesh.pipe"]) for _, fields, _ in runs.started] == [("gpu", 4), ("cpu", 4)]
    assert [how["num_processes"] for _, _, how in runs.started] == [4, 1]


def test_a_repeated_run_is_compared_digit_by_digit(size, runs):
    runs.losses.extend([[4.0, 2.0, 1.0], [4.0, 2.0, 1.0000000000000002]])
    record = cell_of(processes.PART, size, "2 processes, 1f1b, pipe 2, repeated").measure()
    assert (record["same digits"], record["steps of the same digits"]) == ("False", 2)
    assert all(fields["mesh.deterministic"] for _, fields, _ in runs.started)


@pytest.mark.ci
def test_a_run_that_hangs_is_told_and_killed_with_all_its_processes(tmp_path):
    program = """
        import os, pathlib, time
        def get_config(arg=""):
            print("waits for ever", flush=True)
            time.sleep(0.5)
            (pathlib.Path(__file__).parent / f"pid_{os.getpid()}").touch()
            time.sleep(1000)
    """
    (tmp_path / "hangs.py").write_text(textwrap.dedent(program))
    for timeout_s in (6, 24, 96):  # on a busy machine the processes may not have come so far
        with pytest.raises(RuntimeError) as told:
            metrics_of_run(tmp_path / "hangs.py", {}, num_processes=2, timeout_s=timeout_s)
        pids = [int(path.name.removeprefix("pid_")) for path in tmp_path.glob("pid_*")]
        if len(pids) >= 2:
            break
    assert len(pids) >= 2
    assert re.fullmatch(rf"hangs: killed after {timeout_s} s and 0 steps; .*waits for ever", str(told.value))
    until = time.monotonic() + 30
    while any(map(runs_still, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(runs_still, pids))


def runs_still(pid):
    """Whether there is such a process, other than one that nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- The whole


@pytest.mark.slow
def test_what_is_measured_is_kept_when_it_is_killed_at_any_moment(tmp_path):
    """Twenty kills between the first line and a second later; a cell takes a fraction of a second or two."""
    rng, records = random.Random(0), {}
    command = [sys.executable, "-m", "experiments.gpu", "--quick", "--only=rounds", f"--output={tmp_path / 'page'}"]
    results, num_running = tmp_path / "page" / "results.json", 0
    for _ in range(20):
        page = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        page.stdout.readline()
        time.sleep(rng.uniform(0, 1))
        num_running += page.poll() is None
        page.kill()
        page.communicate()
        before = records
        records = json.loads(results.read_text()).get("rounds", {}) if results.exists() else {}
        assert {name: records.get(name) for name in before} == before
    assert num_running
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    final = json.loads(results.read_text())["rounds"]
    assert {name: final[name] for name in records} == records
    assert not [record for record in final.values() if "error" in record]


PARTS = {"processes", "mock", "ab", "training", "sanity", "layers", "grouped", "head", "stages", "rounds", "update"}
PARTS |= {"recomputed", "methods"}


@pytest.mark.parametrize(
    ("only", "parts", "written"),
    [
        pytest.param(["--only=rounds"], {"rounds"}, set(), marks=pytest.mark.slow, id="one part"),
        pytest.param([], PARTS, {"layers.png", "head.png", "costs.json"}, marks=pytest.mark.slow, id="all"),
    ],
)
def test_it_runs_small_without_a_gpu_and_goes_on_where_it_was(tmp_path, only, parts, written):
    pytest.importorskip("torch", reason="its columns would stay empty")
    command = [sys.executable, "-m", "experiments.gpu", "--quick", f"--output={tmp_path / 'page'}", "--minutes=40"]
    command += only
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "page" / "results.json").read_text())
    assert not [name for cells in records.values() for name, record in cells.items() if "error" in record], done.stdout
    assert set(records) == {"about", *parts}
    assert {path.name for path in (tmp_path / "page").iterdir()} == {"results.json", "page.md", *written}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert len(again.stdout.splitlines()) == 2  # the device, the files
    assert json.loads((tmp_path / "page" / "results.json").read_text()) == records


def test_without_a_gpu_only_quick_runs(tmp_path):
    from experiments.gpu.__main__ import main

    with pytest.raises(SystemExit) as stopped:
        main([f"--output={tmp_path}"])
    assert stopped.value.code == 2


# ---- One device of many, and two ways of compiling


@pytest.mark.parametrize("quick", [False, True])
def test_every_mocked_device_is_one_of_its_mesh_and_fits(size, quick):
    size = replace(size, quick=quick)
    for case in mock.cases(size):
        config = runpy.run_path(str(ROOT / "configs" / f"{case.preset}.py"))["get_config"]()
        config.update_from_flattened_dict(mock.fields_of(size, case))
        check(config)
        command = mock.command_of(size, case, Path("costs.json"))[3:]
        flags = dict(part.removeprefix("--").split("=", 1) for part in command)
        num_nodes, gpus_per_node = cluster_of(flags["mock"], config)
        check_stage(int(flags["stage"]), config)
        topology = Topology(HARDWARE["h100-80g"], num_nodes, gpus_per_node)
        assert memory(setting_of(config, topology)).total + RESERVE_BYTES < topology.hardware.memory_bytes
    names = [cell.name for cell in mock.PART.cells(size)]
    assert len(set(names)) == len(names)


def test_options_of_the_compiler_are_known_and_no_words():
    for candidate in ab.CANDIDATES:
        assert candidate.step in ab.STEPS
        for name, value in {**candidate.a, **candidate.b}.items():
            assert is_known(name), name
            assert str(value).lower() not in ("true", "false") or isinstance(value, bool), (name, value)


@pytest.mark.slow
def test_both_programs_of_a_candidate_take_turns_and_have_their_own_options(tmp_path):
    size = Size(quick=True, device=jax.devices()[0], output=tmp_path)
    step = "LLaMA of 1.1 B"
    found = ab.compare(size, ab.Candidate("microbatches", step, b_fields={"pipeline.num_microbatches": 4}))
    assert found["temporary_gib"]["a"] != found["temporary_gib"]["b"]
    assert found["b / a"] == pytest.approx(found["ms"]["b"] / found["ms"]["a"])
    with pytest.raises(Exception, match="no_such_option"):
        ab.compare(size, ab.Candidate("none", step, b={"no_such_option": True}))
