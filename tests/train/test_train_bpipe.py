"""Training with BPipe: the numbers of 1F1B, and options that say what is wrong with them."""

import pytest
from running import metrics, train

PIPELINE = [
    "--config.mesh.data=1",
    "--config.mesh.pipe=4",
    "--config.mesh.tensor=2",
    "--config.pipeline.num_microbatches=6",
    "--config.model.num_layers=5",
    "--config.model.hidden_dropout=0.1",
]


@pytest.mark.slow
def test_it_trains_as_1f1b_does_to_the_last_digit(tmp_path):
    found = {}
    for name, num_slots in (("1f1b", 4), ("bpipe", 3)):
        options = ["--config.pipeline.options=bound=3"] if name == "bpipe" else []
        done = train(tmp_path / name, *PIPELINE, f"--config.pipeline.schedule={name}", *options)
        assert done.returncode == 0, done.stderr
        assert f"slots      {num_slots} on each device" in done.stdout
        found[name] = [(row["loss"], row["grad_norm"], row.get("eval_loss")) for row in metrics(tmp_path / name)]
    assert len(found["1f1b"]) == 12
    assert found["bpipe"] == found["1f1b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.pipeline.options=bund=3"], ["no option 'bund'", "Did you mean 'bound'?"]),
        (["--config.pipeline.options=bound"], ["option 'bound' of a schedule", "rule schedule-options"]),
        (["--config.pipeline.options=bound=2"], ["bound=2", "repair: "]),
        (["--config.mesh.pipe=3"], ["rule bpipe-pays", "num_devices=4 or more"]),
        (["--config.mesh.order=pairs"], ["mesh.order='pairs'", "pair_adjacent"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path, arguments, words):
    done = train(tmp_path / "run", *PIPELINE, "--config.pipeline.schedule=bpipe", *arguments)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "run").exists()
