"""A run says which times its schedule is made for, keeps them, and goes on with them whatever it finds later."""

import json

import pytest
from running import losses, train

from jaxpipe.config import base_config
from jaxpipe.config.base import RunConfig
from jaxpipe.errors import ConfigError
from jaxpipe.schedules import build, from_json, simulate
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.training import fit, resume, run_folder

V_MIN = ["--config.pipeline.schedule=v_min", "--config.model.num_layers=4", "--config.checkpoint.save_every=1"]
ZB_H1 = "--config.pipeline.schedule=zb_h1"
SIZES = {"num_devices": 2, "num_microbatches": 6}
OF_SIZES = ["--config.pipeline.num_microbatches=6"]
PUBLISHED = {"forward": 18.522, "input_gradient": 18.086, "weight_gradient": 9.337}  # arXiv 2401.10241, table 6, 1.5B


def schedule_in(workdir):
    return from_json((workdir / "schedule.json").read_text())


def made_for(**times):
    return build("v_min", **SIZES, **times)


@pytest.mark.slow
def test_a_run_goes_on_with_the_costs_that_it_began_with(tmp_path):
    began = "input_gradient=1.0,weight_gradient=0.4"
    done = train(tmp_path, *V_MIN, *OF_SIZES, "--config.train.steps=1", f"--config.pipeline.costs={began}")
    assert done.returncode == 0, done.stderr
    assert "I = 1, W = 0.4 forwards (pipeline.costs)" in done.stdout
    assert schedule_in(tmp_path).rows == made_for(weight_gradient=0.4).rows != made_for().rows
    # Left to "auto", which on this machine means other times, the run keeps its own.
    done = train(tmp_path, *V_MIN, *OF_SIZES, "--config.train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "I = 1, W = 0.4 forward" in done.stdout
    assert "changed    pipeline" not in done.stdout
    assert schedule_in(tmp_path).rows == made_for(weight_gradient=0.4).rows
    assert json.loads((tmp_path / "config.json").read_text())["pipeline"]["costs"] == began
    assert len(losses(tmp_path)) == 2
    # Told otherwise, it changes and says so.
    done = train(tmp_path, *V_MIN, *OF_SIZES, "--config.train.steps=3", "--config.pipeline.costs=weight_gradient=1.0")
    assert done.returncode == 0, done.stderr
    assert f"changed    pipeline.costs: {began} -> weight_gradient=1.0" in done.stdout
    assert schedule_in(tmp_path).rows == made_for().rows


@pytest.mark.slow
def test_a_run_goes_on_with_the_times_in_its_options(tmp_path):
    options = "--config.pipeline.options=weight_gradient=0.4"
    for num_steps in (1, 2):
        done = train(tmp_path, *V_MIN, *OF_SIZES, f"--config.train.steps={num_steps}", options)
        assert done.returncode == 0, done.stderr
        assert "I = 1, W = 0.4 forwards (pipeline.options)" in done.stdout
        assert "changed    pipeline" not in done.stdout


@pytest.mark.slow
def test_a_run_with_the_published_times_has_the_published_bubble(tmp_path):
    sizes = ["--config.mesh.pipe=8", "--config.mesh.data=1", "--config.model.num_layers=8", "--config.train.steps=1"]
    sizes += ["--config.pipeline.num_microbatches=24", "--config.data.batch_size=24"]
    costs = ",".join(f"{name}={time}" for name, time in PUBLISHED.items())
    done = train(tmp_path, ZB_H1, *sizes, f"--config.pipeline.costs={costs}")
    assert done.returncode == 0, done.stderr
    timeline = simulate(schedule_in(tmp_path), Costs(**PUBLISHED, transfer=0.601))
    assert timeline.bubble_ratio_per_device_span == pytest.approx(0.1585, abs=0.0001)


@pytest.fixture
def run_by_a_file(tmp_path):
    """A run whose times were read from a file and whose head was left to be decided; both is in its config."""
    config = base_config()
    config.pipeline.update(schedule="zb_h1", costs="input_gradient=1.4,weight_gradient=0.8", vocab_over_pipe="false")
    run_folder.write_config(tmp_path, config)
    resume.write_run_schedule(tmp_path, build("zb_h1", num_devices=8, num_microbatches=16))
    return config


@pytest.mark.parametrize("head", ["false", "auto"])
def test_a_run_is_resumed_when_the_file_of_its_times_is_gone(run_by_a_file, tmp_path, monkeypatch, head):
    checked = []

    def check(config, **_):
        checked.append(config)
        raise ConfigError("far enough")

    monkeypatch.setattr("jaxpipe.training.trainer.check", check)
    config = run_by_a_file.copy_and_resolve_references()
    config.pipeline.update(costs=f"{tmp_path}/gone.json", vocab_over_pipe=head)
    with pytest.raises(ConfigError, match="far enough"):
        fit(config, str(tmp_path))
    assert checked[0].pipeline == RunConfig.of(run_by_a_file).pipeline


@pytest.mark.parametrize(("field", "value"), [("num_microbatches", 32), ("vocab_over_pipe", "true")])
def test_another_schedule_has_times_of_its_own(run_by_a_file, tmp_path, field, value):
    changes = {"pipeline.costs": f"{tmp_path}/gone.json", f"pipeline.{field}": value}
    config = RunConfig.of(run_by_a_file).replaced(changes)
    assert resume.with_kept_costs(tmp_path, config) == config


def test_a_head_that_was_decided_does_not_hide_the_schedule_of_a_run(run_by_a_file, tmp_path):
    told = RunConfig.of(run_by_a_file).replaced({"pipeline.vocab_over_pipe": "auto"})
    config = resume.with_kept_schedule(tmp_path, told)
    assert (config.pipeline.schedule, config.pipeline.vocab_over_pipe) == (f"{tmp_path}/schedule.json", "false")
