"""The page of a GPU: what is measured is kept at once and measured once; the whole runs small on a CPU."""

import json
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from experiments.gpu import ab, mock, page
from experiments.gpu.cells import Cell, Part, Results, Size, measure_missing
from jaxpipe.cluster.hardware import HARDWARE, RESERVE_BYTES
from jaxpipe.cluster.topology import Topology
from jaxpipe.config import check, model_config
from jaxpipe.estimate import memory, setting_of
from jaxpipe.measure.mock import check_stage, cluster_of
from jaxpipe.mesh.xla_flags import is_known
from jaxpipe.models.anatomy import model_flops

ROOT = Path(__file__).parents[1]
A100 = HARDWARE["a100-80g"]


@pytest.fixture
def size(tmp_path):
    device = SimpleNamespace(platform="gpu", device_kind=A100.description)
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
    monkeypatch.setattr(torch_block, "frequencies", lambda *arguments: [1.01 * f for f in plain(*arguments)])
    with pytest.raises(ValueError, match="differ by"):
        torch_block.compare("llama", torch_block.small_case("llama", "cpu"))


# ---- The whole


PARTS = {"mock", "ab", "sanity", "layers", "head", "rounds", "update", "stages", "training"}


@pytest.mark.parametrize(
    ("only", "parts", "written"),
    [
        pytest.param(["--only=rounds"], {"rounds"}, set(), marks=pytest.mark.ci, id="one part"),
        pytest.param([], PARTS, {"layers.png", "head.png", "costs.json"}, marks=pytest.mark.slow, id="all"),
    ],
)
def test_it_runs_small_without_a_gpu_and_goes_on_where_it_was(tmp_path, only, parts, written):
    pytest.importorskip("torch", reason="its columns would stay empty")
    command = [sys.executable, "-m", "experiments.gpu", "--quick", f"--output={tmp_path / 'page'}", "--minutes=20"]
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


@pytest.mark.ci
def test_both_programs_of_a_candidate_take_turns_and_have_their_own_options(tmp_path):
    size = Size(quick=True, device=jax.devices()[0], output=tmp_path)
    step = "LLaMA of 1.1 B"
    found = ab.compare(size, ab.Candidate("microbatches", step, b_fields={"pipeline.num_microbatches": 4}))
    assert found["temporary_gib"]["a"] != found["temporary_gib"]["b"]
    assert found["b / a"] == pytest.approx(found["ms"]["b"] / found["ms"]["a"])
    with pytest.raises(Exception, match="no_such_option"):
        ab.compare(size, ab.Candidate("none", step, b={"no_such_option": True}))
