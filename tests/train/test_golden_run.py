"""A run that commit 33dd3c0 has written is resumed with the losses that this commit had, and read by all commands."""

import json
import shutil
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from running import metrics, run

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.checkpoints.arrays import read_array, shapes

# golden/run_33dd3c0.zip: `run`, ended after step 2 of 4; `losses.jsonl`, the metrics of all steps; `text.txt`:
#   python -m jaxpipe.train --config=configs/quickstart.py --workdir=run --config.mesh.platform=cpu --config.mesh.pipe=2
#     --config.pipeline.num_microbatches=2 --config.model.num_layers=2 --config.model.hidden=8
#     --config.model.num_heads=1
#     --config.model.hidden_dropout=0.1 --config.model.vocab_size=256 --config.data.files=text.txt
#     --config.data.batch_size=4 --config.data.seq_len=8 --config.train.steps=4 --config.train.eval_every=2
#     --config.train.eval_batches=1 --config.checkpoint.save_every=2
GOLDEN = Path(__file__).parents[1] / "golden" / "run_33dd3c0.zip"


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(folder)
    return folder


def command(golden, workdir):
    """The config as the run has written it, but for where its text lies here."""
    config = json.loads((golden / "run" / "config.json").read_text())
    fields = [
        f"--config.{section}.{field}={value}"
        for section, values in config.items()
        for field, value in values.items()
        if (section, field) not in (("model", "family"), ("data", "files"))
    ]
    return ["--config=configs/quickstart.py", f"--workdir={workdir}", *fields, f"--config.data.files={golden}/text.txt"]


@pytest.mark.ci
def test_it_is_resumed_with_the_losses_that_it_had(golden, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(golden / "run", workdir)
    (workdir / "config.json.partial").write_text("{")  # of a process that was killed
    (workdir / "partial.schedule.json").write_text("{")  # as that commit named it
    done = run("train", *command(golden, workdir))
    assert done.returncode == 0, done.stderr
    assert "resumes    from the checkpoint of step 2\n" in done.stdout
    assert "other actions than before" not in done.stdout
    expected = [json.loads(line) for line in (golden / "losses.jsonl").read_text().splitlines()]
    found = metrics(workdir)
    assert found[:2] == expected[:2]  # the rows are kept as they are
    for name in ("loss", "grad_norm", "learning_rate"):
        # Other processors and compiler options round otherwise; without its moments, Adam's first step differs by 10 %.
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-5)
    assert found[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=1e-5)


def test_its_files_match_their_sums_and_its_arrays_have_their_names(golden):
    done = run("checkpoints.__main__", "verify", str(golden / "run"))
    assert (done.returncode, done.stdout) == (0, "step 2: undamaged\n")
    folder = golden / "run" / CHECKPOINTS / "2"
    assert shapes(folder)["params.layers.attention.query_key_value.kernel"][0] == 2  # layers
    assert read_array(folder, "step") == np.asarray(jnp.int32(2))


def test_sample_reads_its_parameters(golden):
    done = run("sample", f"--workdir={golden}/run", "--prompt=2 micro", "--num_tokens=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("parameters of step 2\n2 micro")
