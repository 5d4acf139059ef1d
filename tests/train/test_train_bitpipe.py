"""Training with BitPipe: 1F1B's losses, and a checkpoint that knows neither replicas nor chunks."""

import re

import pytest
from running import losses, metrics, run, train

PIPELINE = ["--config.mesh.pipe=4", "--config.model.num_layers=9", "--config.pipeline.num_microbatches=6"]
BITPIPE, PLAIN = (f"--config.pipeline.schedule={name}" for name in ("bitpipe", "1f1b"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("bitpipe") / "run"
    return workdir, train(workdir, *PIPELINE, BITPIPE)


@pytest.mark.slow
def test_it_trains_as_1f1b_does(trained, tmp_path):
    workdir, done = trained
    assert done.returncode == 0, done.stderr
    assert "bitpipe: 8 stages on 4 devices, 6 microbatches" in done.stdout
    assert train(tmp_path / "plain", *PIPELINE, PLAIN).returncode == 0
    # float32 sums in another order, twelve steps apart
    assert losses(workdir) == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], [PLAIN, "--config.mesh.pipe=2", "--config.pipeline.num_microbatches=3"]])
def test_eval_reads_the_checkpoint_with_any_schedule(trained, arguments):
    workdir, _ = trained
    done = run("eval", f"--workdir={workdir}", *arguments)
    found = re.search(r"step 12: held-out loss ([\d.]+)", done.stdout)
    assert found, done.stderr
    # Printed with four digits; float32 sums in another order change the seventh.
    assert float(found[1]) == pytest.approx(metrics(workdir)[-1]["eval_loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.mesh.pipe=3"], ["rule even-devices", "num_devices=2 or 4"]),
        (["--config.pipeline.options=num_chunks=4"], ["rule layer-per-stage", "4 x 4 on each device = 16"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path, arguments, words):
    done = train(tmp_path / "run", *PIPELINE, BITPIPE, *arguments)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "run").exists()
