"""CSV and JSON: what is written reads back equal, PyTorch's files are read, mistakes are named."""

from fractions import Fraction

import pytest
from legal_devices import takes

from jaxpipe.drawing.summary import Summary
from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    REGISTRY,
    Action,
    Costs,
    Kind,
    Placement,
    Schedule,
    build,
    from_csv,
    from_json,
    linear,
    parse_action,
    read_csv,
    read_json,
    read_schedule,
    to_csv,
    to_json,
    violations,
    write_schedule,
)
from jaxpipe.schedules.methods.registry import find_method, method_names
from jaxpipe.schedules.rules import check

REGISTERED = [
    (name, num_devices, num_microbatches)
    for name in REGISTRY
    for num_devices, num_microbatches in ((1, 1), (3, 2), (4, 9), (8, 20))
    if takes(name, num_devices)
]
TWO_REPLICAS = Schedule(
    "both ways",
    Placement(2, ((0, 1), (1, 0))),
    2,
    (
        tuple(map(parse_action, ["0F0", "0EVICT0", "1F1@1", "1B1@1", "1SYNC@1", "0LOAD0", "0I0", "0W0", "0SYNC"])),
        tuple(map(parse_action, ["0F1@1", "1F0", "1I0", "1W0", "1SYNC", "0B1@1", "0SYNC@1"])),
    ),
)


@pytest.mark.parametrize(("name", "num_devices", "num_microbatches"), REGISTERED)
def test_csv_and_json_read_back_equal(name, num_devices, num_microbatches):
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    assert from_json(to_json(schedule)) == schedule
    if schedule.num_replicas == 1:
        assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_json_holds_replicas_and_all_kinds():
    check(TWO_REPLICAS)
    assert from_json(to_json(TWO_REPLICAS)) == TWO_REPLICAS


def test_csv_as_pytorch_writes_it():
    # idle steps as empty cells, CRLF, a chunk's stages on one line, split and whole backward, overlapped pairs
    text = "0F0,0F1,,3F0,3I0,(3F1;0B0)OVERLAP_F_B,3B1,,0B1,3W0\r\n,1F0,2F0,1F1,2F1,2B0,1I0,2I1,1B1,1W0,2W1\r\n"
    schedule = check(from_csv(text, name="v"))
    assert schedule.placement == Placement(2, ((0, 1, 1, 0),))
    assert schedule.num_microbatches == 2
    assert [str(action) for action in schedule.rows[0]] == [
        "0F0",
        "0F1",
        "3F0",
        "3I0",
        "3F1",
        "0B0",
        "3B1",
        "0B1",
        "3W0",
    ]
    assert [action.joined for action in schedule.rows[0]].index(True) == 4
    assert "3I0,(3F1;0B0)OVERLAP_F_B,3B1" in to_csv(schedule)
    assert from_json(to_json(schedule)) == schedule
    assert from_csv(to_csv(schedule), name="v") == schedule


def test_csv_holds_transfers_and_shares():
    text = "# parked: 2/5 1\r\n0F0,0EVICT0,0LOAD0,0B0\r\n1F0,1B0\r\n"
    schedule = check(from_csv(text, name="mine"))
    assert schedule.parked == (Fraction(2, 5), Fraction(1))
    assert [str(action) for action in schedule.rows[0]] == ["0F0", "0EVICT0", "0LOAD0", "0B0"]
    assert to_csv(schedule) == text.replace("\r", "")


def test_files_hold_where_activations_are_parked():
    text = "# parked: 2/5 1\n# parked_on: host host\n0F0,0EVICT0,0LOAD0,0B0\n1F0,1B0\n"
    schedule = check(from_csv(text, name="mine"))
    assert schedule.parks_on_host
    assert to_csv(schedule) == text
    assert from_json(to_json(schedule)) == schedule


def test_csv_file_names_the_schedule(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbf" + b" 0F0, 0B0\n\n")  # as a spreadsheet saves it
    schedule = read_csv(path)
    assert schedule == Schedule("mine", linear(1), 1, ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"'mine', device 1, cell 1: '1X0' is not a compute action"),
        ("0F0,,0SEND_F0\n", r"device 0, cell 2: '0SEND_F0' is not a compute action"),
        ("0F0,0B0,0SYNC\n", r"device 0, cell 2: '0SYNC' .* need JSON"),
        ("# parked: 1/2 x\n0F0,0B0\n", r"first line: '# parked: 1/2 x' does not list shares"),
        ("# parked: 1/0\n0F0,0B0\n", r"first line: '# parked: 1/0' does not list shares"),
        ("# parked:\n0F0,0B0\n", r"first line: '# parked:' does not list shares"),
        ("# my schedule\n0F0,0B0\n", r"device 0, cell 0: '# my schedule' is not a compute action"),
        ("0F0@1,0B0@1\n", r"device 0, cell 0: '0F0@1' .* need JSON"),
        ("(0F0;0Q0)OVERLAP_F_B\n", r"device 0, cell 0: .* is not a compute action"),
        ("0F0,0B0\n1F0,0F1\n", r"device 1, cell 1: 0F1 and device 0, cell 0: 0F0 are of stage 0"),
        ("0F0,0B0\n2F0,2B0\n", r"no line has an action of stage 1, but there is stage 2"),
        ("0F0,0B0,0F999999999\n", r"no line has an action of microbatch 1, but there is microbatch 999999999"),
        ("", r"no line has an action of stage 0"),
        ("0F\uff10,0B0\n", r"device 0, cell 0: '0F\uff10' is not a compute action"),
        (f"0F0,{'1' * 5000}B0\n", r"device 0, cell 1: '1+\.\.\. \([0-9,]+ characters\)"),
        ("x" * 10**7, r"device 0, cell 0: 'x+\.\.\. \([0-9,]+ characters\)"),
        (f"# parked: {'1' * 5000}\n0F0,0B0\n", r"first line: '# parked: 1+\.\.\. "),
    ],
)
def test_csv_mistakes_are_named(text, message):
    with pytest.raises(ScheduleError, match=f"(?s){message}") as error:
        from_csv(text, name="mine")
    assert "\n  rule " in str(error.value)
    assert "\n  repair: " in str(error.value)
    assert len(str(error.value)) < 1000


def test_csv_cannot_hold_what_json_can():
    with pytest.raises(ScheduleError, match=r"(?s)num_replicas=2 .*repair: write it as JSON"):
        to_csv(TWO_REPLICAS)
    synced = Schedule("synced", linear(1), 1, (tuple(map(parse_action, ["0F0", "0B0", "0SYNC"])),))
    with pytest.raises(ScheduleError, match=r"(?s)device 0, position 2: 0SYNC.*repair: write it as JSON"):
        to_csv(synced)


def test_csv_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ScheduleError, match="No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\x00")
    with pytest.raises(ScheduleError, match="not a text file"):
        read_csv(tmp_path / "picture.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2"),
        ("[]", "it is a list, not an object"),
        ('{"nam": "x"}', "unknown key 'nam'. Did you mean 'name'"),
        ('{"name": "x"}', "the key 'num_devices' is missing"),
        (
            '{"name": "x", "num_devices": true, "num_microbatches": 1, "devices": [[0]], "rows": [[]]}',
            "num_devices=True",
        ),
        (
            '{"name": "a\\ud800", "num_devices": 1, "num_microbatches": 1, "devices": [[0]], "rows": [[]]}',
            "name='a.ud800' has characters that are not printable",
        ),
        (
            '{"name": "x", "num_devices": 1, "num_microbatches": 1, "devices": [0], "rows": [[]]}',
            "'devices' is not a list",
        ),
        (
            '{"name": "x", "num_devices": 1, "num_microbatches": 1, "devices": [[0]], "rows": [[0]]}',
            "'rows' is not a list",
        ),
        (
            '{"name": "x", "num_devices": 1, "num_microbatches": 1, "devices": [[0]], "rows": [["0F0", "B"]]}',
            "device 0, position 1: 'B' is not an action",
        ),
        (
            '{"name": "x", "num_devices": 1, "num_microbatches": 1, "devices": [[0]], "rows": [[]], "parked": [0.5]}',
            r"parked=\[0.5\] is not a list of shares",
        ),
        (
            '{"name": "x", "num_devices": 1, "num_microbatches": 1, "devices": [[0]], "rows": [[]], "park": []}',
            "unknown key 'park'. Did you mean 'parked'",
        ),
    ],
)
def test_json_mistakes_are_named(text, message):
    with pytest.raises(ScheduleError, match=message) as error:
        from_json(text)
    assert "repair: " in str(error.value)


@pytest.mark.parametrize(("name", "ending"), [("zb_v", "csv"), ("bpipe", "csv"), ("zb_v", "json"), ("chimera", "json")])
def test_files_read_back_equal_by_their_ending(tmp_path, name, ending):
    schedule, path = build(name, num_devices=4, num_microbatches=5), tmp_path / f"{name}.{ending}"
    write_schedule(schedule, path)
    assert read_schedule(path) == schedule
    assert path.read_text() == (to_csv if ending == "csv" else to_json)(schedule)


def test_files_that_are_no_schedules_are_named(tmp_path):
    schedule = build("chimera", num_devices=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match=r"rule schedule-file: its name ends in \.csv or \.json\n.*'mine\.json'"):
        write_schedule(schedule, "mine.txt")
    with pytest.raises(ScheduleError, match=r"rule schedule-file: its name ends in \.csv or \.json\n"):
        read_schedule("mine.txt")
    with pytest.raises(ScheduleError, match=r"cannot write '.*/no/mine\.json': No such file or directory"):
        write_schedule(schedule, tmp_path / "no" / "mine.json")
    with pytest.raises(ScheduleError, match=r"cannot be written as CSV"):
        write_schedule(schedule, tmp_path / "mine.csv")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "mine.json"
    with pytest.raises(ScheduleError, match=r"cannot read '.*/mine\.json': No such file or directory"):
        read_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ScheduleError, match=r"cannot read '.*/mine\.json': it is not a text file"):
        read_json(path)
    path.write_text("{}")
    with pytest.raises(ScheduleError, match=r"mine\.json: this is not a schedule in JSON: the key 'name' is missing"):
        read_json(path)
    path.write_text(to_json(schedule).replace("0F0", "0F7"))
    with pytest.raises(ScheduleError, match=r"broken in 'chimera'"):
        read_schedule(path)


HEAD = '{"name": "a", "num_devices": 1, "num_microbatches": 1, "devices": [[0]]'
DIGITS = "1" * 5000  # more than Python reads as one number


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        f'{{"num_devices": {DIGITS}}}',
        f'{{"{"k" * 10**6}": 1}}',
        f'{HEAD}, "rows": [["{DIGITS}F0"]]}}',
        f'{HEAD}, "rows": [["0F\uff10", "0B0"]]}}',
        f'{HEAD}, "rows": [[]], "parked": ["{DIGITS}"]}}',
    ],
    ids=["brackets", "digits", "key", "action", "full width", "parked"],
)
def test_json_that_nobody_writes_is_refused_in_a_few_lines(text):
    with pytest.raises(ScheduleError, match=r"(?s)\n  rule .*\n  repair: ") as error:
        from_json(text)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("row", [("0F0", "0B0"), (1, 2), (None,), ((0, 0, 0),), "0F0"])
def test_rows_of_other_things_than_actions_are_refused(row):
    with pytest.raises(ScheduleError, match=r"(?s)device 0, position 0: .* is no Action\n  rule action: "):
        violations(Schedule("mine", linear(1), 1, (row,)))


def test_more_microbatches_than_actions_take_no_memory():
    found = violations(Schedule("mine", linear(1), 10**11, ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)),)))
    assert [violation.rule for violation in found] == ["row-per-device"]


def test_sizes_that_no_memory_holds_are_refused():
    with pytest.raises(ScheduleError, match=r"(?s)num_devices=3000.*rule most-actions: .*set num_microbatches=333 or"):
        build("gpipe", num_devices=3000, num_microbatches=3000)
    for method in method_names():
        for option in find_method(method).options:
            if type(option.swept[0] if option.swept else None) is int or option.name == "group_size":
                with pytest.raises(ScheduleError, match=rf"(?s){option.name}=1000000000"):
                    build(method, num_devices=4, num_microbatches=4, **{option.name: 10**9})
    with pytest.raises(ScheduleError, match=r"rule most-actions: num_devices x num_microbatches x num_chunks "):
        build("interleaved_1f1b", num_devices=4, num_microbatches=4, num_chunks=10**7)
    with pytest.raises(ScheduleError, match="rule summary-size: "):
        Summary(build("gpipe", num_devices=3000, num_microbatches=1), Costs(), 1)
