"""The experiments' scripts at small size."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
from experiment_modules import EXPERIMENTS, modules_of

from experiments.pages import BEGIN, END, put_between
from experiments.png import content_of
from jaxpipe.estimate import Roofline


def experiment(name):
    """The module of an experiment's script."""
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", EXPERIMENTS / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_bitpipes_ablation_has_the_published_order():
    run = experiment("007_bitpipe_ablation")
    for (num_devices, batch_size), published in run.TABLE_5.items():
        seconds = run.costs(num_devices)
        # 16-bit gradients of 12 h^2 weights a layer by 2 s b h: 12 h / (s b) = 15 for each layer of a chunk
        assert seconds.gradient_messages == pytest.approx(64 / (2 * num_devices) * 15)
        rates = run.samples_per_s(num_devices, batch_size, seconds)
        for found in (rates, published):
            assert found["BitPipe"] > found["without V"] > found["without eager sync"]
        steps_s = {name: batch_size / rate for name, rate in rates.items()}
        # Four exchanges after the last backward where one is left: three more.
        exchange_s = seconds.gradient_messages * seconds.transfer
        assert steps_s["without eager sync"] - steps_s["BitPipe"] == pytest.approx(3 * exchange_s)
        # A microbatch crosses one link more on its way there and one on its way back.
        assert steps_s["without V"] - steps_s["BitPipe"] > 1.99 * seconds.transfer
    assert run.samples_per_s(8, 32, run.costs(8))["BitPipe"] == pytest.approx(39.17, rel=1e-3)


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    with modules_of("010_cluster") as modules:
        yield modules["run"]


TINY = """
from jaxpipe.config import base_config

def get_config(arg=""):
    config = base_config("gpt")
    config.model.num_layers, config.model.hidden, config.model.num_heads = 8, 16, 2
    config.data.batch_size, config.data.seq_len = 8, 16
    config.pipeline.num_microbatches = 8
    config.mesh.pipe, config.mesh.platform = 4, "cpu"
    return config
"""


def table_cells(text):
    """Schedule -> the cells of its row."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.mark.ci
def test_the_cluster_experiment_reads_what_runs_have_left(cluster, tmp_path, capsys):
    for name, times_s in {"1f1b": [9.0, 2.0, 1.0, 3.0], "bpipe": [9.0, 2.0, 2.0, 5.0]}.items():
        (tmp_path / name).mkdir()
        rows = [{"step": step, "step_time_s": time_s} for step, time_s in enumerate(times_s, start=1)]
        if name == "1f1b":
            rows = [row | {"mfu": 0.9 / row["step_time_s"], "peak_bytes_in_use": row["step"] * 2**29} for row in rows]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cluster.main(["--read", f"--config={tmp_path}/tiny.py", f"--workdir={tmp_path}", "--warmup_steps=1"])
    printed = capsys.readouterr().out
    assert "3 steps after 1 to warm up" in printed
    cells = table_cells(printed)
    # 3 steps of 8 samples in 6 s and in 9 s. 1F1B's bubble is (D-1)/(N+D-1); BitPipe's of D=4, N=2D 6 forwards of a
    # stage beside 6N; the work is the same, so their steps are as 1 - 6/54 to 1 - 3/11.
    not_yet = "not yet measured"
    assert cells["1f1b"][:-1] == ["4.00", "2", "1.000", "1.000", "0.273", "0.450", "2.00"]
    assert cells["bpipe"][:-1] == ["2.67", "2", "1.000", "1.000", "0.273", "-", "-"]
    assert cells["bitpipe"][:-1] == [not_yet, not_yet, not_yet, "0.818", "0.111", not_yet, not_yet]
    assert all(float(row[-1]) >= 0 for row in cells.values())


@pytest.mark.slow
def test_the_cluster_experiment_runs_end_to_end(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "SCHEDULES", ("1f1b",))
    page = tmp_path / "README.md"
    page.write_text(f"Before.\n{BEGIN}old\n{END}After.\n")
    monkeypatch.setattr(cluster, "README", page)
    further = ["--config.mesh.pipe=2", "--config.model.num_layers=2", "--config.model.vocab_size=256"]
    arguments = [f"--config={tmp_path}/tiny.py", f"--workdir={tmp_path}/runs", "--warmup_steps=1", "--steps=2"]
    cluster.main([*arguments, "--write", "--", *further])
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/1f1b/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    written = page.read_text()
    assert written.startswith("Before.\n")
    assert written.endswith("After.\n")
    assert "2 steps after 1 to warm up" in written
    samples_per_s, step_time_s, ratio, *_ = table_cells(written)["1f1b"]
    assert float(samples_per_s) * float(step_time_s) == pytest.approx(8, rel=0.05)  # of two, the median is the mean
    assert ratio == "1.000"


def test_the_page_of_the_cluster_experiment_takes_the_table(cluster):
    assert put_between("new", cluster.README.read_text()).count("new\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("which", ["gpt", "experts"])
def test_kills_lose_nothing(tmp_path, which):
    run = experiment("011_kills")
    size = run.Size(num_steps=20, num_processes=1, schedule="1f1b", run=which)
    kills, wrong = run.measure(tmp_path, size, num_kills=2, seed=3)
    assert wrong == []
    assert kills[0].num_half_written == 1  # so that it is a kill in the middle of a save


def test_without_chunks_no_more_is_exposed_than_nothing_can_hide():
    """Besides the first layer's gather and the last one's sum: two points of a step at most."""
    with modules_of("031_data_parallel") as modules:
        run, cases = modules["run"], modules["settings"].CASES
        plain = [case.setting() for case in cases if case.schedule == "1f1b"]
        for setting in plain:
            source = Roofline(setting.topology.hardware)
            found = run.estimate(setting, source)
            exposed, least = run.exposed_fraction(found, source), sum(run.least_exposed(found, source))
            assert least < exposed <= least + 0.02
        assert len(plain) == 6


def test_the_crossover_counts_what_a_prediction_can_tell_apart():
    with modules_of("031_data_parallel") as modules:
        compared = modules["run"].Compared
        steps = {1: (1.0, 1.0), 2: (1.0, 1.02), 4: (1.0, 0.9), 8: (1.0, 1.1), 16: (None, 1.0), 32: (1.0, None)}
        rows = {
            step_s: SimpleNamespace(step_s=step_s) if step_s else None for pair in steps.values() for step_s in pair
        }
        lines = [compared("llama", 8, nodes, rows[alone], rows[piped]) for nodes, (alone, piped) in steps.items()]
        table = modules["run"].crossover_table(lines)
    assert table.splitlines()[-1] == "| llama | 8 | 32, 128 | 64, 256 |"


@pytest.mark.ci
def test_layers_by_stage_reach_what_bpipe_does_not_and_the_picture_says_so():
    with modules_of("032_remedies") as modules:
        run, remedies = modules["run"], modules["remedies"]
        page = (EXPERIMENTS / "032_remedies" / "README.md").read_text()
        assert f"{modules['host'].line(0, 4)}\n" in page
        names = [remedy.name for remedy in remedies.REMEDIES]
        plain, bpipe, by_stage = (remedies.cell(0, 4, names.index(name)) for name in ("1F1B", "BPipe", "by stage"))
        assert not plain.fits
        assert not bpipe.fits
        assert bpipe.held.total < plain.held.total
        assert by_stage.fits
        assert plain.estimate.step_s < by_stage.estimate.step_s
        assert sum(by_stage.setting.recomputed.counts) < by_stage.setting.model.num_layers
        assert by_stage.setting.model.num_layers == sum(by_stage.setting.layers_per_stage)
        drawn = json.loads(content_of(run.PICTURE))[0]
        assert drawn["title"] == remedies.MODELS[0].preset
        of_four = dict(zip(names, drawn["steps"][run.MICROBATCH_SIZES.index(4)], strict=True))
        assert of_four["1F1B"] is of_four["BPipe"] is None
        assert of_four["by stage"] == round(by_stage.estimate.step_s, 3)


@pytest.mark.ci
def test_pages_come_back_from_the_hosts_memory_as_they_left(capsys):
    with modules_of("033_host_pages") as modules:
        run = modules["run"]
        run.executed()
        cells = table_cells(capsys.readouterr().out)
        assert cells.keys() == run.FORMS.keys()
        assert {float(difference) for (difference,) in cells.values()} == {0.0}
