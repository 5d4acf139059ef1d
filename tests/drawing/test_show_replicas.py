"""`show` of schedules with two replicas: what the second one costs, and SYNC in every format."""

import json

import pytest

from jaxpipe.show import main

CHIMERA = ["chimera", "--num_devices=4", "--num_microbatches=4"]


def shown(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_text_has_lines_on_replicas(capsys):
    lines = shown(capsys, *CHIMERA).splitlines()
    assert "weights           2 M_theta" in lines  # BitPipe (arXiv 2410.19367), Table 2
    assert any(line.startswith("gradients         2 2 2 2 stages summed with the paired device, ") for line in lines)


def test_each_device_sends_the_gradients_of_its_stages_up(capsys):
    values = json.loads(shown(capsys, *CHIMERA, "--format=json"))
    assert values["weights"] == 2
    assert values["gradients"]["asked"] == [2] * 4
    assert all(sent >= 1 for sent in values["gradients"]["sent"])


@pytest.mark.parametrize(
    ("flags", "ratio"), [([], 4 * 15), (["--layers_per_stage=1"], 15), (["--gradient_messages=2.5"], 2.5)]
)
def test_an_exchange_takes_as_long_as_it_is_said_to(capsys, flags, ratio):
    values = json.loads(shown(capsys, *CHIMERA, "--transfer=0.25", *flags, "--format=json"))
    assert values["costs"]["gradient_messages"] == ratio
    syncs = [action for row in values["actions"] for action in row if action["kind"] == "SYNC"]
    assert len(syncs) == 8
    assert {(sync["end"] - sync["start"], sync["microbatch"]) for sync in syncs} == {(0.25 * ratio, None)}


def test_traces_have_exchanges(capsys):
    events = json.loads(shown(capsys, *CHIMERA, "--transfer=0.25", "--gradient_messages=2", "--format=chrome"))
    assert [event["dur"] for event in events if event.get("cat") == "SYNC"] == [500.0] * 8


@pytest.mark.parametrize("form", ["svg", "memory"])
def test_pictures_are_drawn(capsys, tmp_path, form):
    path = tmp_path / "picture.svg"
    arguments = [*CHIMERA, "--transfer=0.25", f"--format={form}", f"--output={path}"]
    assert shown(capsys, *arguments) == ""
    # BitPipe, Table 2: (D + 2) / 2 Ma on the outer devices, D Ma on the middle ones.
    for words in ("SYNC, replica 1",) if form == "svg" else ("3 chimera", "4 chimera"):
        assert f"{words}</text>" in path.read_text()
