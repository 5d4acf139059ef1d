"""A method from a file of one's own, by --method=: from its picture to a run that outlives the file."""

import json
import re
import shutil

import pytest
from running import ROOT, losses, run, train

from jaxpipe import python_file
from jaxpipe.schedules import REGISTRY, spec
from jaxpipe.training.run_folder import read_written

SMALL = ["--config.mesh.data=1", "--config.train.steps=2", "--config.train.eval_every=2"]
SMALL += ["--config.checkpoint.save_every=2", "--config.pipeline.options=num_ahead=3"]
FIRST_ROW = "0  0F0 0F1 0F2 ... 0B0"


@pytest.fixture
def forget():
    """Forgets files that were read, as a new process has."""
    known = dict(REGISTRY)

    def clear():
        for name in set(REGISTRY) - set(known):
            del REGISTRY[name]
        python_file._DEFINED.clear()
        python_file._module.cache_clear()
        spec._built.cache_clear()
        spec.forget_files()

    yield clear
    clear()


def ran(*call):
    done = run(*call)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_own_method_from_its_picture_to_a_run_that_outlives_it(tmp_path, forget):
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    shutil.copy(ROOT / "tests/schedules/eager_1f1b.py", file)
    method, sizes = f"--method={file}", ["--num_devices=2", "--num_microbatches=3"]

    assert FIRST_ROW in ran("show", method, *sizes)
    assert "eager_1f1b" in ran("optimize", f"--schedule={file}", *sizes, "--memory_bound=3", "--num_trials=1")
    ran("optimize", method, *sizes, "--memory_bound=3", "--num_trials=1")
    planned = ["--config.data.batch_size=8", "--config.model.num_layers=4", "--top=1000"]
    assert str(file) in ran("plan", "--config=configs/gpt3_125m.py", "--topology=a100-80g:1x2", method, *planned)

    done = train(folder, method, *SMALL)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "schedule.json").read_text())["name"] == "eager_1f1b"
    before = ran("eval", f"--workdir={folder}", method)

    file.unlink()
    forget()
    evaluated = ran("eval", f"--workdir={folder}")
    assert re.findall(r"step 2: held-out loss .*", before) == re.findall(r"step 2: held-out loss .*", evaluated)
    assert "step 2: held-out loss" in evaluated
    assert "parameters of step 2" in ran("sample", f"--workdir={folder}", "--prompt=def ", "--num_tokens=3")
    for steps in (4, 6):  # more than once: the run does not forget what it was told
        forget()
        done = train(folder, method, *SMALL, f"--config.train.steps={steps}")
        assert done.returncode == 0, done.stderr
        assert f"changed    pipeline.schedule: {file} is not there, {folder}/schedule.json is\n" in done.stdout
        assert "pipeline.options:" not in done.stdout
        assert read_written(str(folder)).pipeline.schedule == str(file)
        assert read_written(str(folder)).pipeline.options == "num_ahead=3"
    assert len(losses(folder)) == 6
    refused = train(folder, method, *SMALL, "--config.pipeline.num_microbatches=6")
    assert refused.returncode == 2
    assert "is not a file" in refused.stderr


@pytest.mark.slow
def test_a_run_of_a_configs_own_generator_is_evaluated_without_the_config(tmp_path, forget):
    config, folder = tmp_path / "mine.py", tmp_path / "run"
    own = (ROOT / "tests/schedules/eager_1f1b.py").read_text()
    config.write_text(
        f"{own}\n\nfrom jaxpipe.config import base_config\nfrom jaxpipe.schedules import REGISTRY, register\n\n"
        "def get_config(arg=''):\n"
        "    if 'eager_1f1b' not in REGISTRY:\n"
        "        register(METHOD)\n"
        "    config = base_config()\n"
        "    config.pipeline.schedule = 'eager_1f1b'\n"
        "    return config\n"
    )
    done = train(folder, *SMALL, config=config)
    assert done.returncode == 0, done.stderr
    forget()
    assert "eager_1f1b" not in REGISTRY
    assert "step 2: held-out loss" in ran("eval", f"--workdir={folder}")


@pytest.mark.ci
def test_a_run_of_a_schedule_file_is_evaluated_without_the_file(tmp_path, forget):
    file, folder = tmp_path / "mine.csv", tmp_path / "run"
    ran("show", "1f1b", "--num_devices=2", "--num_microbatches=3", "--format=csv", f"--output={file}")
    done = train(folder, *SMALL[:-1], f"--config.pipeline.schedule={file}")
    assert done.returncode == 0, done.stderr
    file.unlink()
    forget()
    assert "step 2: held-out loss" in ran("eval", f"--workdir={folder}")


def test_one_schedule_is_named(tmp_path):
    done = train(tmp_path / "run", "--method=mine.py", "--config.pipeline.schedule=gpipe")
    assert done.returncode == 2
    assert "--method=mine.py with --config.pipeline.schedule=gpipe\n  rule one-schedule" in done.stderr
