"""`python -m jaxpipe.show`: its content, its errors, its speed."""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from showing import refused, shown

from jaxpipe.drawing.summary import sent_slots
from jaxpipe.lowering import lower
from jaxpipe.schedules import (
    REGISTRY,
    Costs,
    build,
    costs_of_stages,
    from_csv,
    read_schedule,
    simulate,
    to_csv,
    to_json,
)
from jaxpipe.schedules.methods.registry import DELAYED
from jaxpipe.show import main

SMALL = ["1f1b", "--num_devices=4", "--num_microbatches=6"]
CHIMERA = ["chimera", "--num_devices=4", "--num_microbatches=4"]
BPIPE = ["bpipe", "--num_devices=8", "--num_microbatches=32"]


def test_json_content(capsys):
    whole = json.loads(shown(capsys, *SMALL, "--backward=3", "--format=json"))
    values = whole["numbers"]
    assert set(values) == {
        "num_stages", "num_replicas", "costs_of", "costs", "makespan",
        "bubble_ratio", "bubble_ratio_per_device_span", "peak_activations", "actions", "spmd", "layers_per_stage",
        "transfers", "weights", "gradients",
    }  # fmt: skip
    assert (whole["name"], whole["num_devices"], whole["num_microbatches"]) == ("1f1b", 4, 6)
    assert (values["num_stages"], values["num_replicas"]) == (4, 1)
    assert values["costs_of"] == "a device's share of the model"
    assert values["costs"] == {
        "forward": 1, "backward": 3, "input_gradient": 1, "weight_gradient": 1, "transfer": 0, "slot_messages": 4 * 17,
        "gradient_messages": 4 * 15,
    }  # fmt: skip
    assert values["makespan"] == (6 + 4 - 1) * (1 + 3)
    assert values["bubble_ratio"] == pytest.approx(3 / 9)
    # device 0 is the first and the last to compute
    assert values["bubble_ratio_per_device_span"] == pytest.approx(3 / 9)
    assert values["peak_activations"] == [4, 3, 2, 1]
    assert [len(row) for row in values["actions"]] == [12] * 4
    assert values["actions"][3][:2] == [
        {"kind": "F", "replica": 0, "stage": 3, "microbatch": 0, "start": 3, "end": 4},
        {"kind": "B", "replica": 0, "stage": 3, "microbatch": 0, "start": 4, "end": 7},
    ]
    spmd = values["spmd"]
    assert set(spmd) == {
        "makespan",
        "num_rounds",
        "round_types",
        "traced_actions",
        "num_slots",
        "permutes_per_step",
        "messages_asked",
        "messages_sent",
        "waits_per_action",
    }
    assert spmd["makespan"] == pytest.approx(values["makespan"])
    assert spmd["num_slots"] == 4  # the peak, min(D, N)
    nothing = {"asked": [0] * 4, "sent": [0] * 4}
    assert values["transfers"] == {"evicted": nothing, "loaded": nothing}
    assert (values["weights"], values["gradients"]) == (1, nothing)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], [16, 12.8, 8]),  # 32 f: f = 1/2, 2/5, 1/4
        (["--option=unit=microbatch"], [15, 12, 8]),
        (["--option=unit=microbatch", "--option=overlapped=false"], [12, 10, 6]),
    ],
)
def test_json_tells_transfers_asked_for_and_sent(capsys, options, asked):
    values = json.loads(shown(capsys, *BPIPE, *options, "--format=json"))["numbers"]
    for moved in values["transfers"].values():
        assert moved["asked"] == [*asked, 0, 0, 0, 0, 0]
        assert moved["sent"][3:] == [0] * 5
        assert all(sent >= asked for sent, asked in zip(moved["sent"], moved["asked"], strict=True))


# ---- Times are of a device's share of the model, whatever the schedule


@pytest.mark.parametrize("name", REGISTRY)
def test_a_device_works_as_long_under_every_schedule(capsys, name):
    """The busiest works for N (F + B) forwards of its share, cut into however many stages."""
    values = json.loads(shown(capsys, name, "--num_devices=4", "--num_microbatches=8", "--format=json"))["numbers"]
    assert values["makespan"] * (1 - values["bubble_ratio"]) == pytest.approx(8 * 3)


@pytest.mark.parametrize(("name", "percent"), [("1f1b", 5.8), ("bitpipe", 10.3), ("zb_h1", 2.7), ("v_half", 4.8)])
def test_messages_are_as_long_under_every_schedule(capsys, name, percent):
    """What a message of a tenth of a forward costs, D=8, N=32, of the same model: BitPipe loses most."""
    sizes = [name, "--num_devices=8", "--num_microbatches=32", "--format=json", "--gradient_messages=1e-9"]
    free, slow = (json.loads(shown(capsys, *sizes, f"--transfer={time}"))["numbers"]["makespan"] for time in (0, 0.1))
    assert round(100 * (slow / free - 1), 1) == percent


@pytest.mark.parametrize("form", ["json", "text", "svg", "chrome", "html"])
@pytest.mark.parametrize("name", ["zb_v", "bitpipe"])
def test_every_form_tells_the_same_makespan(capsys, tmp_path, name, form):
    sizes = ["--num_devices=8", "--num_microbatches=32", "--transfer=0.2"]
    schedule = build(name, num_devices=8, num_microbatches=32)
    share = Costs(transfer=0.2, slot_messages=2 * 4 * 17, gradient_messages=2 * 4 * 15)
    timeline = simulate(schedule, costs_of_stages(share, schedule.placement))
    if form == "html":  # beside 1F1B, a stage of which is twice as long
        shown(capsys, "1f1b", *sizes, "--layers_per_stage=8", f"--compare={name}", f"--html={tmp_path / 'page.html'}")
        row = (tmp_path / "page.html").read_text().split(f'<tr data-schedule="{name}">')[1]
        assert f'<td data-summary="makespan">{timeline.makespan:g}</td>' in row
        return
    text = shown(capsys, name, *sizes, f"--format={form}")
    if form == "chrome":
        events = [event for event in json.loads(text) if event["ph"] == "X"]
        assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1000 * timeline.makespan)
    else:
        told = {"json": f'"makespan": {timeline.makespan}', "text": f"makespan          {timeline.makespan:g} forwards"}
        assert told.get(form, f"makespan {timeline.makespan:g} forwards") in text
    if (name, form) == ("zb_v", "text"):
        assert "bubble ratio      0.0952" in text


def test_schedules_are_compared_as_text(capsys):
    """ZB-V is cut into twice as many stages as 1F1B; two batches of PipeDream-2BW are two steps, not a longer one."""
    sizes = ["--num_devices=8", "--num_microbatches=32"]
    lines = shown(capsys, "1f1b", *sizes, "--compare=zb_v", "--compare=pipedream_2bw").splitlines()
    table = {re.split(r"  +", line)[0]: re.split(r"  +", line)[1:] for line in lines[: lines.index("")]}
    assert table[""] == ["1f1b", "zb_v", "pipedream_2bw"]
    assert table["stages"] == ["8", "16", "8"]
    assert table["microbatches"] == ["32", "32", "96 in 3 steps"]
    assert table["makespan"][:2] == [f"{(32 + 7) * 3}", f"{(6 * 32 + 7) / 2:g}"]
    assert table["bubble ratio"][:2] == [f"{7 / 39:.4f}", f"{7 / (6 * 32 + 7):.4f}"]
    step = [(32 + 7) * 3, (6 * 32 + 7) / 2, 32 * 3]  # without flush, from one update to the next
    assert table["step / shortest"] == [f"{time / step[2]:.3f}" for time in step]
    assert table["peak activations, Ma"] == ["1 to 8", "8", "1 to 8"]
    assert table["messages asked / sent"][0].startswith("64 / ")
    [(rounds, types)] = re.findall(r"(\d+) rounds of (\d+) types", shown(capsys, "1f1b", *sizes))
    assert table["program: rounds"][0] == f"{types} types of rounds, {rounds} rounds"
    notes = "\n".join(lines)
    assert "Times are in forwards of a device's share of the model: F 1, B 2, I 1, W 1, a message 0." in notes
    assert "1 Ma is what one microbatch leaves on a device's share of the model" in notes
    seconds = shown(capsys, "1f1b", *sizes, "--forward=0.02", "--backward=0.04", "--compare=gpipe")
    assert "Times are those of a device's share of the model: F 0.02, B 0.04, a message 0." in seconds


def test_a_config_s_times_are_of_a_device_s_share_too(capsys):
    """Uneven stages add up to it: N (F + B) of work on the mean device."""
    config = ["--config=configs/quickstart.py", "--config.mesh.pipe=4", "--config.pipeline.num_microbatches=8"]
    for uneven in ([], ["--config.model.num_layers=9", "--config.pipeline.layers_per_stage=1,1,1,1,1,2,1,1"]):
        arguments = [*config, *uneven, "--config.pipeline.schedule=interleaved_1f1b", "--format=json"]
        actions = json.loads(shown(capsys, *arguments))["numbers"]["actions"]
        spent = [sum(action["end"] - action["start"] for action in row) for row in actions]
        assert sum(spent) / 4 == pytest.approx(8 * 3)


@pytest.mark.parametrize("num_layers", [1, 4, 10])
def test_sent_is_what_the_permutes_of_each_round_carry(num_layers):
    schedule = build("bpipe", num_devices=8, num_microbatches=20)
    table = lower(schedule, layers_per_stage=(num_layers,) * 8)
    away, back = np.zeros(8), np.zeros(8)  # [device] pages
    for round_type in table.round_type:
        for source, target in itertools.chain(*table.permutes_of("parked_pages")[round_type]):
            if source < target:  # early devices evict
                away[source] += 1
            else:
                back[target] += 1
    carried = sent_slots(table)
    assert carried.evicted.tolist() == pytest.approx(away / num_layers)
    assert carried.loaded.tolist() == pytest.approx(back / num_layers)
    moves = table.transfers["parked_pages"].sends
    assert (away + back).sum() >= len(moves.round) > 0


def test_slots_of_the_program_are_those_of_its_layers(capsys):
    values = json.loads(shown(capsys, *BPIPE, "--layers_per_stage=8", "--format=json"))["numbers"]
    assert values["layers_per_stage"] == 8
    assert values["costs"]["slot_messages"] == 8 * 17
    assert values["spmd"]["num_slots"] == 5  # ceil((D + 2) / 2)
    assert values["peak_activations"][:4] == [5, 5, 5, 5]
    values = json.loads(shown(capsys, *BPIPE, "--slot_messages=3.5", "--format=json"))["numbers"]
    assert values["costs"]["slot_messages"] == 3.5


def test_text_is_grid_and_figures(capsys):
    lines = shown(capsys, "gpipe", "--num_devices=2", "--num_microbatches=2").splitlines()
    assert lines[:2] == [
        "0  0F0 0F1 ... ... ... 0B0 0B0 0B1 0B1",
        "1  ... 1F0 1F1 1B0 1B0 1B1 1B1 ... ...",
    ]
    assert "costs             F 1, B 2, a message 0: of a device's share of the model, 1 stage" in lines
    assert "makespan          9 forwards" in lines
    assert "bubble ratio      0.3333" in lines
    assert "by device span    0.3333, each device from its own first action on" in lines
    assert any(line.startswith("peak activations  2 2 Ma, by device; 1 Ma is what one microbatch") for line in lines)
    assert "compiled program  makespan 9 forwards: devices wait only where the schedule says so" in lines


def test_text_has_lines_on_transfers(capsys):
    lines = shown(capsys, "bpipe", "--num_devices=4", "--num_microbatches=8").splitlines()
    assert "parked share      1/2 - - - of a microbatch, by stage" in lines
    assert any(line.startswith("evicted           4 0 0 0 slots asked for, ") for line in lines)
    assert any(line.startswith("loaded            4 0 0 0 slots asked for, ") for line in lines)
    assert not any(line.startswith(("parked", "evicted")) for line in shown(capsys, *SMALL).splitlines())


def test_csv_keeps_evictions_and_their_shares(capsys, tmp_path):
    path = tmp_path / "bpipe.csv"
    path.write_text(shown(capsys, *BPIPE, "--format=csv"))
    schedule = build("bpipe", num_devices=8, num_microbatches=32)
    assert from_csv(path.read_text(), name="bpipe") == schedule
    assert [str(share) for share in schedule.parked[:3]] == ["1/2", "2/5", "1/4"]
    assert shown(capsys, f"--csv={path}", "--format=json") == shown(capsys, *BPIPE, "--format=json")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_memory_is_drawn_beside_others(capsys, tmp_path, ending):
    path = tmp_path / f"memory.{ending}"
    arguments = [*BPIPE, "--format=memory", "--compare=1f1b", "--compare=gpipe", "--slot_bytes=1e9"]
    assert shown(capsys, *arguments, f"--output={path}") == ""
    content = path.read_bytes()
    if ending == "png":
        assert content.startswith(b"\x89PNG")
        return
    for words in ("32 (29.8 GiB) gpipe", "8 (7.45 GiB) 1f1b", "5 (4.66 GiB) bpipe", "bound, 5 slots"):
        assert f">{words}</text>" in content.decode()


@pytest.mark.parametrize(
    ("arguments", "bounds"), [([*BPIPE, "--option=bound=6"], {"bound, 6 slots"}), (["1f1b", *BPIPE[1:]], set())]
)
def test_memory_has_the_bound_that_was_asked_for(capsys, tmp_path, arguments, bounds):
    path = tmp_path / "memory.svg"
    assert shown(capsys, *arguments, "--format=memory", f"--output={path}") == ""
    assert set(re.findall(r">(bound[^<]*)</text>", path.read_text())) == bounds


def test_csv_goes_round(capsys, tmp_path):
    written = shown(capsys, *SMALL, "--format=csv")
    assert from_csv(written, name="1f1b") == build("1f1b", num_devices=4, num_microbatches=6)
    path = tmp_path / "1f1b.csv"
    path.write_text(written)
    assert shown(capsys, f"--csv={path}", "--format=json") == shown(capsys, *SMALL, "--format=json")


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_schedule_in_json_is_shown(capsys, tmp_path, name):
    path = tmp_path / "mine.json"
    path.write_text(to_json(build(name, num_devices=4, num_microbatches=6)))
    assert shown(capsys, f"--json={path}") == shown(capsys, name, *SMALL[1:])


@pytest.mark.parametrize("name", ["1f1b", "chimera", "bpipe"])
def test_what_is_shown_in_json_is_read_again(capsys, tmp_path, name):
    """One JSON, both ways; so it also is a schedule for a config."""
    path = tmp_path / "mine.json"
    assert shown(capsys, name, *SMALL[1:], f"--output={path}") == ""
    assert read_schedule(path) == build(name, num_devices=4, num_microbatches=6)
    assert shown(capsys, f"--json={path}") == shown(capsys, name, *SMALL[1:])


@pytest.mark.parametrize("form", ["text", "json", "csv", "svg", "png", "pdf", "html"])
def test_the_ending_of_the_file_says_its_form(capsys, tmp_path, form):
    ending = {"text": "txt"}.get(form, form)
    by_name, by_flag = tmp_path / f"by_name.{ending}", tmp_path / f"by_flag.{ending}"
    assert shown(capsys, *SMALL, f"--output={by_name}") == ""
    flag = [f"--html={by_flag}"] if form == "html" else [f"--format={form}", f"--output={by_flag}"]
    assert shown(capsys, *SMALL, *flag) == ""
    if form != "pdf":  # it has the time in it
        assert by_name.read_bytes() == by_flag.read_bytes()
    assert by_name.stat().st_size > 0


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
        (["1f1b", "--num_devices=two", "--num_microbatches=6"], "--num_devices=two: invalid literal for int()"),
        ([*SMALL, "--num_chunk=2"], "Did you mean '--num_chunks'?"),
        ([*SMALL, "--num_chunks=2"], "has no option 'num_chunks'"),
        ([*SMALL, "--option=key=1"], "has no option 'key'"),
        ([*SMALL, "--option=key"], "rule schedule-options: key=value"),
        ([*SMALL, "--forward=-1"], "'-1' is not a time"),
        ([*SMALL, "--backward=nan"], "'nan' is not a time"),
        ([*SMALL, "--format=jpg"], "--format=jpg: value should be one of <text|"),
        ([*SMALL, "--format=png"], "add --output=FILE.png"),
        ([*SMALL, "--format=memory"], "the name ends in .png or .svg or .pdf"),
        ([*SMALL, "--format=memory", "--output=memory.txt"], "the name ends in .png or .svg or .pdf"),
        ([*SMALL, "--format=memory", "--output=no.svg", "--compare=gpip"], "Did you mean 'gpipe'?"),
        ([*SMALL, "--compare=gpipe", "--format=json"], "--compare=gpipe has no effect: it needs --format=text, "),
        ([*SMALL, "--compare=gpip"], "Did you mean 'gpipe'?"),
        ([*SMALL, "--slot_bytes=1e9"], "--slot_bytes=1000000000.0 has no effect: it needs --html or --format=memory"),
        ([*SMALL, "--slot_bytes=0"], "'0' is not a size"),
        ([*SMALL, "--layers_per_stage=0"], "--layers_per_stage=0: 0 is not an integer in the range [1, 10000]"),
        (
            [*SMALL, "--placement", "--topology=h200:1x4", "--slot_messages=3"],
            "--slot_messages=3.0 has no effect",
        ),
        ([*SMALL, "--output=/no/such/folder/file"], "cannot write '/no/such/folder/file'"),
        ([*SMALL, "--csv=mine.csv"], "--name=1f1b has no effect: --csv gives the whole schedule"),
        (["--csv=mine.csv", "--num_devices=4"], "--num_devices=4 has no effect: --csv gives the whole schedule"),
        (["--csv=/no/such/file.csv"], "cannot read '/no/such/file.csv'"),
        ([*SMALL, "--json=mine.json"], "--name=1f1b has no effect: --json gives the whole schedule"),
        (["--csv=mine.csv", "--json=mine.json"], "--json=mine.json has no effect: --csv gives the whole schedule"),
        (["--list", *SMALL], "has no effect: --list shows all methods"),
        (["--json=/no/such/file.json"], "cannot read '/no/such/file.json'"),
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


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m jaxpipe.show 1f1b --num_devices=16 --num_microbatches=256 | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (" 0  0F0   ", "")


@pytest.mark.parametrize("form", ["text", pytest.param("json", marks=pytest.mark.ci)])
def test_a_large_schedule_is_shown(capsys, form):
    assert "64" in shown(capsys, "1f1b", "--num_devices=64", "--num_microbatches=512", f"--format={form}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bpipe", "--num_devices=8", "--num_microbatches=32", "--transfer=0.1"], "% shorter, since a slot travels in"),
        # Fill and drain, which take longer in the program, are no part of what a step costs.
        (["wpipe", "--num_devices=4", "--num_microbatches=4"], "devices wait only where the schedule says so"),
        (["wpipe", "--num_devices=3", "--num_microbatches=3", "--backward=3"], "% longer from batch to batch, since"),
    ],
)
def test_what_rounds_cost_is_said(capsys, arguments, words):
    assert words in shown(capsys, *arguments)


def test_a_name_like_a_mark_of_the_page_is_shown(tmp_path, capsys):
    schedule = replace(build("1f1b", num_devices=2, num_microbatches=2), name="#SCRIPT#")
    (tmp_path / "mine.json").write_text(to_json(schedule))
    shown(capsys, f"--json={tmp_path / 'mine.json'}", f"--html={tmp_path / 'page.html'}")
    assert "<title>#SCRIPT#" in (tmp_path / "page.html").read_text()


def test_the_list_has_every_method_with_its_options(capsys):
    paragraphs = shown(capsys, "--list").split("\n\n")
    methods = REGISTRY | DELAYED
    assert [paragraph.splitlines()[0] for paragraph in paragraphs] == list(methods)
    listed = dict(zip(methods, paragraphs, strict=True))
    assert (
        "bubble ratio: (D-1)/(N+D-1)\n    peak activations, Ma: 1..min(D, N)\n" in listed["1f1b"]
    )  # DAPPLE, PPoPP 2021
    for name, method in methods.items():
        assert all(f"{option.name}=" in listed[name] for option in method.options)


def test_help_names_each_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Shows a pipeline schedule")
    for words in (
        "--num_chunks: ",
        "--forward: Time of the forward of a device's share of the model.",
        "<text|json|csv|svg|",
    ):
        assert words in printed


def test_text_has_lines_on_replicas(capsys):
    lines = shown(capsys, *CHIMERA).splitlines()
    assert "weights           held 2 times, once by each replica" in lines  # BitPipe (arXiv 2410.19367), Table 2
    assert any(line.startswith("gradients         2 2 2 2 stages summed with the paired device, ") for line in lines)


def test_each_device_sends_the_gradients_of_its_stages_up(capsys):
    values = json.loads(shown(capsys, *CHIMERA, "--format=json"))["numbers"]
    assert values["weights"] == 2
    assert values["gradients"]["asked"] == [2] * 4
    assert all(sent >= 1 for sent in values["gradients"]["sent"])


@pytest.mark.parametrize(
    ("flags", "ratio"), [([], 4 * 15), (["--layers_per_stage=1"], 15), (["--gradient_messages=2.5"], 2.5)]
)
def test_an_exchange_takes_as_long_as_it_is_said_to(capsys, flags, ratio):
    values = json.loads(shown(capsys, *CHIMERA, "--transfer=0.25", *flags, "--format=json"))["numbers"]
    assert values["costs"]["gradient_messages"] == ratio
    syncs = [action for row in values["actions"] for action in row if action["kind"] == "SYNC"]
    assert len(syncs) == 8
    assert {(sync["end"] - sync["start"], sync["microbatch"]) for sync in syncs} == {(0.25 * ratio, None)}


def test_traces_have_exchanges(capsys):
    events = json.loads(shown(capsys, *CHIMERA, "--transfer=0.25", "--gradient_messages=2", "--format=chrome"))
    assert [event["dur"] for event in events if event.get("cat") == "SYNC"] == [500.0] * 8


@pytest.mark.parametrize("form", ["svg", "memory"])
def test_pictures_of_two_replicas_are_drawn(capsys, tmp_path, form):
    path = tmp_path / "picture.svg"
    arguments = [*CHIMERA, "--transfer=0.25", f"--format={form}", f"--output={path}"]
    assert shown(capsys, *arguments) == ""
    # BitPipe, Table 2: (D + 2) / 2 Ma on the outer devices, D Ma on the middle ones.
    for words in ("SYNC, replica 1",) if form == "svg" else ("3 chimera", "4 chimera"):
        assert f"{words}</text>" in path.read_text()


# ---- --config

LLAMA = ["--config=configs/llama3_8b.py", "--config.pipeline.schedule=zb_h1", "--config.pipeline.num_microbatches=8"]


def test_a_config_is_shown_as_it_would_run(capsys):
    text = shown(capsys, *LLAMA, "--topology=h100-80g:1x8")
    costs = re.match(r"costs     backward=([\d.]+),input_gradient=([\d.]+),weight_gradient=([\d.]+): estimated", text)
    assert costs
    times = {"input_gradient": float(costs[2]), "weight_gradient": float(costs[3])}
    assert times["input_gradient"] > 1 > times["weight_gradient"]
    csv = shown(capsys, *LLAMA, "--topology=h100-80g:1x8", "--format=csv")
    assert csv == to_csv(build("zb_h1", num_devices=4, num_microbatches=8, **times))
    assert "costs     backward=2.0,input_gradient=1.0,weight_gradient=1.0: by model.recompute" in shown(capsys, *LLAMA)


@pytest.mark.parametrize("extra", ["--num_devices=4", "--backward=3", "--placement"])
def test_a_config_gives_all_that_is_shown(capsys, extra):
    assert "--config gives the schedule and its times" in refused(capsys, *LLAMA, extra)


def test_memory_of_a_config_is_drawn_in_the_bytes_of_its_stages(capsys, tmp_path):
    """Five layers and four of 2 microbatches more: each device holds what the line on recomputation says."""
    config = ["--config=configs/quickstart.py", "--config.mesh.pipe=2", "--config.model.recompute=full:1,0"]
    config += ["--config.model.num_layers=9", "--config.pipeline.layers_per_stage=5,4"]
    (line,) = (line for line in shown(capsys, *config).splitlines() if "GiB that each stage saves" in line)
    saved = line.rpartition(": ")[2].split(", ")
    path = tmp_path / "memory.svg"
    shown(capsys, *config, f"--output={path}", "--format=memory")
    peaks = re.findall(r">[\d.]+ \(([\d.e-]+) GiB\) 1f1b</text>", path.read_text())
    assert peaks == saved
    assert float(peaks[0]) != 2 * float(peaks[1])  # as they are in slots
