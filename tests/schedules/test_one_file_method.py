"""A method from one file outside the package, `eager_1f1b.py`, is known to commands, planner, estimator and sweeps."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe import optimize, plan, show
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import base_config, check
from jaxpipe.errors import ScheduleError
from jaxpipe.estimate import Roofline, estimate, setting_of
from jaxpipe.estimate.plan.space import legal_variants
from jaxpipe.schedules import REGISTRY, Costs, Problem, build, find_method, peak_activations
from jaxpipe.schedules.methods.registry import register_file
from jaxpipe.schedules.ordering.optimize import registered

ROOT = Path(__file__).parents[2]
FILE = "tests/schedules/eager_1f1b.py"
NAME = f"{FILE}:eager_1f1b"
TOPOLOGY = parse_topology("a100-80g:1x4")
SWEEPS = (
    "schedules/test_text_forms.py",
    "schedules/test_methods.py",
    "lowering/test_storage.py",
    "estimate/test_clock.py",
    "program/test_every_schedule.py",
)


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    """What the file registers is forgotten again."""
    monkeypatch.chdir(ROOT)
    before = dict(REGISTRY)
    yield
    for name in set(REGISTRY) - set(before):
        del REGISTRY[name]


def config(num_microbatches: int = 8, **pipeline):
    """A small GPT on four stages."""
    made = base_config("gpt")
    made.model.update(num_layers=4, hidden=64, num_heads=4)
    made.data.update(batch_size=num_microbatches, seq_len=64)
    made.mesh.pipe = 4
    made.pipeline.update(num_microbatches=num_microbatches, **pipeline)
    check(made)
    return made


def test_show(capsys):
    assert show.main([FILE, "--num_devices=2", "--num_microbatches=3"]) == 0
    assert "0  0F0 0F1 0F2 ... 0B0 0B0 ... 0B1 0B1 ... 0B2 0B2" in capsys.readouterr().out
    assert show.main([f"--method={FILE}", "--num_devices=2", "--num_microbatches=3"]) == 0
    assert "0  0F0 0F1 0F2 ... 0B0 0B0 ... 0B1 0B1 ... 0B2 0B2" in capsys.readouterr().out
    arguments = ["--config.mesh.pipe=2", "--config.pipeline.num_microbatches=3", "--config.data.batch_size=3"]
    assert show.main(["--config=configs/quickstart.py", f"--method={FILE}", *arguments]) == 0
    assert "0  0F0 0F1 0F2 ... 0B0" in capsys.readouterr().out
    assert show.main(["--list", f"--method={FILE}"]) == 0
    assert "eager_1f1b\n    1F1B with more forwards ahead" in capsys.readouterr().out


@pytest.mark.slow
def test_plan_tries_it_and_writes_a_config_that_runs_it(capsys, tmp_path):
    arguments = ["--config=configs/gpt3_125m.py", "--topology=a100-80g:1x2", f"--method={FILE}", "--top=100000"]
    arguments += ["--config.data.batch_size=8", "--config.model.num_layers=4"]
    assert plan.main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"{NAME} num_ahead={ahead}" in printed for ahead in (2, 3))


def test_one_schedule_is_shown(capsys):
    sizes = ["--num_devices=2", "--num_microbatches=3", f"--method={FILE}"]
    for more in (["1f1b"], [f"--method={FILE}"]):
        assert show.main([*sizes, *more]) == 2
        assert f"--method={FILE} has no effect: one schedule is shown" in capsys.readouterr().err


def test_one_method_of_a_file_is_registered(tmp_path):
    more = "from dataclasses import replace\nMORE = replace(METHOD, name='b')\n"
    (tmp_path / "two.py").write_text((ROOT / FILE).read_text() + more)
    assert register_file(f"{tmp_path}/two.py:b") == [f"{tmp_path}/two.py:b"]
    assert f"{tmp_path}/two.py:eager_1f1b" not in REGISTRY
    assert register_file(f"{tmp_path}/two.py") == [f"{tmp_path}/two.py:eager_1f1b", f"{tmp_path}/two.py:b"]


@pytest.mark.parametrize("file", [True, False])
def test_a_plan_tries_the_method_of_its_config(monkeypatch, file):
    asked = []
    monkeypatch.setattr(plan, "search_with_fewer", lambda *_, **__: asked.append(NAME in REGISTRY) or exit(0))
    arguments = ["--config=configs/gpt3_125m.py", "--topology=a100-80g:1x2"]
    with pytest.raises(SystemExit):
        plan.main([*arguments, *([f"--config.pipeline.schedule={FILE}"] if file else [])])
    assert asked == [file]


def test_it_is_planned_after_a_plan_without_it():
    group = setting_of(config(), TOPOLOGY)
    before = legal_variants(group)
    register_file(FILE)
    assert {variant.name for variant in set(legal_variants(group)) - set(before)} == {NAME}


@pytest.mark.ci
def test_optimize_starts_from_it(capsys):
    register_file(FILE)
    names = [each.name for each in registered(Problem(4, 8), Costs(), room_ma=8.0)]
    assert names.count("eager_1f1b") >= 4  # both values of its option, whole and split
    arguments = [f"--schedule={FILE}", "--option=num_ahead=3", "--num_devices=4", "--num_microbatches=6"]
    assert optimize.main([*arguments, "--memory_bound=6", "--num_trials=1"]) == 0
    assert optimize.main([*arguments[2:], "--memory_bound=6", "--num_trials=1", f"--method={FILE}"]) == 0
    assert "eager_1f1b" in REGISTRY[NAME].name


def test_estimate_and_its_extension_to_many_microbatches():
    times = [
        estimate(setting_of(config(n, schedule=FILE, options="num_ahead=1"), TOPOLOGY), Roofline(TOPOLOGY.hardware))
        for n in (8, 64)
    ]
    same = [estimate(setting_of(config(n, schedule="1f1b"), TOPOLOGY), Roofline(TOPOLOGY.hardware)) for n in (8, 64)]
    assert [each.step_s for each in times] == pytest.approx([each.step_s for each in same], rel=1e-9)


@pytest.mark.parametrize("name", [FILE, NAME])
def test_build_by_file_or_by_file_and_name(name):
    schedule = build(name, num_devices=4, num_microbatches=8, num_ahead=2)
    assert peak_activations(schedule).tolist() == [7, 5, 3, 1]
    assert find_method(name) is REGISTRY[NAME]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "none.py", "is not a file.*looked from"),
        ("x = 1", "none.py", "defines no method"),
        ("from jaxpipe.schedules.methods.gpipe import METHOD", "imported.py", "defines no method"),
        ("1 / 0", "broken.py", "cannot be run: ZeroDivisionError"),
        ("MORE = [METHOD, other := replace(METHOD, name='b')]", "two.py", "of type Method in .*two.py: eager_1f1b, b"),
        ("", "one.py:late", "does not say which.*of type Method in .*one.py: eager_1f1b"),
    ],
)
def test_files_that_say_no_method(tmp_path, monkeypatch, text, name, message):
    if text is not None:
        own = "" if "x" in text or "import" in text or "/" in text else (ROOT / FILE).read_text()
        (tmp_path / name.partition(":")[0]).write_text(f"{own}\nfrom dataclasses import replace\n{text}\n")
    with pytest.raises(ScheduleError, match=f"(?s){message}.*repair: "):
        find_method(f"{tmp_path}/{name}")


@pytest.mark.ci
def test_every_sweep_takes_it_up():
    """Rules, text forms, closed forms, lowering, clocks and gradients, of the method alone."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-rA", f"--method={FILE}"]
    files = [f"tests/{file}" for file in SWEEPS]
    done = subprocess.run([*command, "-k", "eager_1f1b", *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for file in files:
        assert f"PASSED {file}::" in done.stdout, file
