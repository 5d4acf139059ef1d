"""`python -m jaxpipe.show`: its content, its errors, its speed."""

import json
import subprocess
import sys
import time

import pytest

from jaxpipe.schedules import build, from_csv
from jaxpipe.show import main

SMALL = ["1f1b", "--num_devices=4", "--num_microbatches=6"]


def shown(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err


def test_json_content(capsys):
    values = json.loads(shown(capsys, *SMALL, "--backward=3", "--format=json"))
    assert set(values) == {
        "schedule", "num_devices", "num_microbatches", "num_stages", "num_replicas", "costs", "makespan",
        "bubble_ratio", "peak_activations", "actions", "spmd",
    }  # fmt: skip
    assert (values["schedule"], values["num_devices"], values["num_microbatches"]) == ("1f1b", 4, 6)
    assert (values["num_stages"], values["num_replicas"]) == (4, 1)
    assert values["costs"] == {
        "forward": 1, "backward": 3, "input_gradient": 1, "weight_gradient": 1, "transfer": 0,
    }  # fmt: skip
    assert values["makespan"] == (6 + 4 - 1) * (1 + 3)
    assert values["bubble_ratio"] == pytest.approx(3 / 9)
    assert values["peak_activations"] == [4, 3, 2, 1]
    assert [len(row) for row in values["actions"]] == [12] * 4
    assert values["actions"][3][:2] == [
        {"kind": "F", "replica": 0, "stage": 3, "microbatch": 0, "start": 3, "end": 4},
        {"kind": "B", "replica": 0, "stage": 3, "microbatch": 0, "start": 4, "end": 7},
    ]
    spmd = values["spmd"]
    assert set(spmd) == {"makespan", "num_rounds", "body_rounds", "num_slots", "permutes_per_step"}
    assert spmd["makespan"] == pytest.approx(values["makespan"])
    assert spmd["num_slots"] == 4  # the peak, min(D, N)


def test_text_is_grid_and_figures(capsys):
    lines = shown(capsys, "gpipe", "--num_devices=2", "--num_microbatches=2").splitlines()
    assert lines[:2] == [
        "0  0F0 0F1 ... ... ... 0B0 0B0 0B1 0B1",
        "1  ... 1F0 1F1 1B0 1B0 1B1 1B1 ... ...",
    ]
    assert "makespan          9" in lines
    assert "bubble ratio      0.3333" in lines
    assert "peak activations  2 2 Ma" in lines
    assert any(line.startswith("spmd              makespan 9,") for line in lines)


def test_csv_goes_round(capsys, tmp_path):
    written = shown(capsys, *SMALL, "--format=csv")
    assert from_csv(written, name="1f1b") == build("1f1b", num_devices=4, num_microbatches=6)
    path = tmp_path / "1f1b.csv"
    path.write_text(written)
    assert shown(capsys, f"--csv={path}", "--format=json") == shown(capsys, *SMALL, "--format=json")


@pytest.mark.parametrize("form", ["text", "json", "csv", "svg", "png", "chrome"])
def test_output_file_holds_what_is_printed(capsys, tmp_path, form):
    path = tmp_path / "picture"
    assert shown(capsys, *SMALL, f"--format={form}", f"--output={path}") == ""
    if form == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert path.read_text() == shown(capsys, *SMALL, f"--format={form}")
    if form in ("json", "chrome"):
        json.loads(path.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1"], "--num_devices is missing"),
        ([], "give the NAME of a schedule"),
        (["1f1", "--num_devices=4", "--num_microbatches=6"], "Did you mean '1f1b'?"),
        (["1f1b", "--num_devices=0", "--num_microbatches=6"], "num_devices=0"),
        (["1f1b", "--num_devices=two", "--num_microbatches=6"], "invalid int value: 'two'"),
        ([*SMALL, "--num_chunk=2"], "Did you mean '--num_chunks'?"),
        ([*SMALL, "--num_chunks=2"], "has no option 'num_chunks'"),
        ([*SMALL, "--option=key=1"], "has no option 'key'"),
        ([*SMALL, "--option=key"], "--option=key=value"),
        ([*SMALL, "--forward=-1"], "'-1' is not a time"),
        ([*SMALL, "--backward=nan"], "'nan' is not a time"),
        ([*SMALL, "--format=pdf"], "invalid choice: 'pdf'"),
        ([*SMALL, "--format=png"], "give --output=FILE too"),
        ([*SMALL, "--output=/no/such/folder/file"], "cannot write '/no/such/folder/file'"),
        ([*SMALL, "--csv=mine.csv"], "leave NAME out"),
        (["--csv=mine.csv", "--num_devices=4"], "leave --num_devices out"),
        (["--csv=/no/such/file.csv"], "cannot read '/no/such/file.csv'"),
    ],
)
def test_mistakes_are_told_in_plain_text(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_users_schedule_is_checked_by_the_rules(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    message = refused(capsys, f"--csv={path}")
    assert message.startswith("ScheduleError: 1 rule broken in 'mine'")
    assert "repair: swap positions 0 and 1 of device 1" in message


def test_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m jaxpipe.show 1f1b --num_devices=16 --num_microbatches=256 | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (" 0  0F0   ", "")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_large_schedule_is_shown_at_once(form):
    arguments = ["1f1b", "--num_devices=64", "--num_microbatches=512", f"--format={form}"]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "jaxpipe.show", *arguments], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2.0  # under 1 s on a free machine; tests share theirs
