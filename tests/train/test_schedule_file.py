"""`pipeline.schedule` as the path of a file: checked, trained with, and said where it changes between two starts."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from running import losses, run, train

from jaxpipe import optimize
from jaxpipe.config import base_config, build_schedule, check
from jaxpipe.errors import ConfigError
from jaxpipe.schedules import build, from_json, to_csv, to_json
from jaxpipe.training import run_folder
from jaxpipe.training.resume import (
    check_same_config,
    check_same_schedule,
    config_changes,
    write_run_schedule,
)
from jaxpipe.training.run_folder import SCHEDULE

SIZES = {"num_devices": 2, "num_microbatches": 4}
TEXT = "the same words again and again, and then some other words. "


def config_with(path, **pipeline):
    config = base_config()
    config.mesh.pipe = 2
    config.data.batch_size = 4
    config.pipeline.update({"schedule": str(path), "num_microbatches": 4, **pipeline})
    return config


def written(path, name="1f1b", **options):
    """The path of a schedule's file, as its ending says."""
    schedule = build(name, **SIZES, **options)
    path.write_text(to_csv(schedule) if path.suffix == ".csv" else to_json(schedule))
    return path


@pytest.mark.parametrize(("name", "ending"), [("1f1b", "csv"), ("zb_v", "json"), ("chimera", "json")])
def test_a_file_is_the_schedule(tmp_path, name, ending):
    config = config_with(written(tmp_path / f"mine.{ending}", name))
    check(config)
    assert build_schedule(config).rows == build(name, **SIZES).rows


def test_options_of_the_config_reach_a_generator_that_takes_times():
    config = config_with("zb_v", options="input_gradient=1.5,weight_gradient=0.5")
    check(config)
    told = build("zb_v", **SIZES, input_gradient=1.5, weight_gradient=0.5)
    assert build_schedule(config) == told
    assert told.rows != build("zb_v", **SIZES).rows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"schedule": "no/mine.csv"},
            ["'no/mine.csv' is not a file", "looked from ", "schedule.json"],
        ),
        ({"schedule": "mine.txt"}, ["rule field-choice", "1f1b", ".csv or .json"]),
        ({"options": "num_chunks=2"}, ["rule file-options", "no effect", "pipeline.options=''"]),
        ({"num_microbatches": 2}, ["pipeline.num_microbatches=2 with", "repair: set pipeline.num_microbatches=4, or"]),
        ({"pipe": 4}, ["mesh.pipe=4 with", "num_devices=2, num_microbatches=4", "repair: set mesh.pipe=2, or"]),
        (
            {"pipe": 4, "num_microbatches": 2},
            ["mesh.pipe=4, pipeline.num_microbatches=2", "set mesh.pipe=2 and pipeline.num_microbatches=4"],
        ),
        ({"layers": 1}, ["rule layer-per-stage", "repair: set model.num_layers=2 or more"]),
    ],
)
def test_what_does_not_fit_a_file_is_one_error_with_its_repair(tmp_path, change, words):
    config = config_with(written(tmp_path / "mine.csv"))
    config.mesh.pipe = change.pop("pipe", 2)
    config.model.num_layers = change.pop("layers", 8)
    config.pipeline.update(change)
    with pytest.raises(ConfigError, match=r"^1 rule broken in here\n") as error:
        check(config, name="here")
    for word in [*words, "  rule ", "  repair: "]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1B0,1F0\n", ["forward-first", "swap positions 0 and 1 of device 1"]),
        ("0F0,X\n", ["'X'", "device 0, cell 1"]),
    ],
)
def test_a_file_that_breaks_a_rule_is_told(tmp_path, text, words):
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        check(config_with(path, num_microbatches=1))
    assert all(word in str(error.value) for word in words)


def test_a_file_that_has_changed_is_said_and_the_run_goes_on(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    config = config_with(written(tmp_path / "mine.json"))
    run_folder.write_config(path, config)
    assert config_changes(path, config) == []  # of a run that kept none
    write_run_schedule(path, build("1f1b", **SIZES))
    assert from_json((path / SCHEDULE).read_text()) == build("1f1b", **SIZES)
    assert config_changes(path, config) == []
    write_run_schedule(path, build("gpipe", **SIZES))
    name = config.pipeline.schedule
    assert config_changes(path, config) == [f"pipeline.schedule: {name} has other actions than before"]
    config.pipeline.schedule = "1f1b"
    assert config_changes(path, config) == [f"pipeline.schedule: {name} -> 1f1b"]
    assert [file.name for file in path.iterdir() if "partial" in file.name] == []


def test_processes_with_other_schedules_are_told_apart():
    schedule, words = build("1f1b", **SIZES), []

    def first(on, word):
        words.append(word)
        return word

    def later(on, word):
        return words[0]

    def process(index, agree) -> Any:
        return SimpleNamespace(index=index, agree=agree)

    check_same_schedule(process(0, first), schedule, "backward=2.0")
    check_same_schedule(process(1, later), build("1f1b", **SIZES), "backward=2.0")
    others = (build("gpipe", **SIZES), "backward=2.0"), (build("1f1b", **SIZES), "backward=1.8")
    for other, costs in others:  # other costs may lay out other rounds
        with pytest.raises(ConfigError, match="process 1 has another schedule than process 0\n  rule same-schedule"):
            check_same_schedule(process(1, later), other, costs)


@pytest.mark.slow
def test_a_schedule_that_was_searched_for_trains_as_1f1b_does(tmp_path):
    path, text = tmp_path / "mine.csv", tmp_path / "text.txt"
    text.write_text(TEXT * 200)
    search = ["--num_devices=2", "--num_microbatches=4", "--memory_bound=1.5", "--input_gradient=1.2"]
    assert optimize.main([*search, "--weight_gradient=0.8", "--placement=v", f"--output={path}"]) == 0
    assert "I" in path.read_text()
    small = ["--config.mesh.data=1", "--config.model.num_layers=4", "--config.pipeline.num_microbatches=4"]
    small += [f"--config.data.files={text}", "--config.train.steps=2"]
    costs = "--config.pipeline.costs=input_gradient=1.2,weight_gradient=0.8"
    ours = train(tmp_path / "ours", *small, f"--config.pipeline.schedule={path}", costs)
    assert ours.returncode == 0, ours.stderr
    assert re.search(r"^schedule +mine: 4 stages on 2 devices, 4 microbatches$", ours.stdout, re.M)
    assert re.search(r"^bubble +[\d.]+% predicted, I = 1.2, W = 0.8 forwards \(pipeline.costs\)$", ours.stdout, re.M)
    assert re.search(
        r"^split +of a microbatch a stage keeps [\d.]+ MiB from F to I, and then [\d.]+ MiB until W", ours.stdout, re.M
    )
    theirs = train(tmp_path / "theirs", *small)
    assert theirs.returncode == 0, theirs.stderr
    assert "split  " not in theirs.stdout
    assert losses(tmp_path / "ours") == pytest.approx(losses(tmp_path / "theirs"), rel=1e-5)
    kept = tmp_path / "ours" / SCHEDULE
    assert from_json(kept.read_text()).name == "mine"
    path.unlink()
    evaluated = run("eval", f"--workdir={tmp_path}/ours", f"--config.pipeline.schedule={kept}")
    assert "step 2: held-out loss" in evaluated.stdout, evaluated.stderr


def test_processes_with_other_configs_are_told_apart():
    config, words = base_config(), []

    def first(on, word):
        words.append(word)
        return word

    def process(index, agree) -> Any:
        return SimpleNamespace(index=index, agree=agree)

    check_same_config(process(0, first), config)
    other = config.copy_and_resolve_references()
    other.data.files = "/mnt/elsewhere/*.txt"
    check_same_config(process(1, lambda on, word: words[0]), other)
    other.optimizer.learning_rate = 0.5
    words_of_error = r"process 1 has another config than process 0\n *rule same-config: .*\n *optimizer.learning_rate: "
    with pytest.raises(ConfigError, match=f"{words_of_error}0.001 in process 0, 0.5 here"):
        check_same_config(process(1, lambda on, word: words[0]), other)
