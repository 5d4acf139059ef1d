"""The pictures show every action, at its time, on its device."""

import io
import json
import re
from dataclasses import replace
from fractions import Fraction
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxpipe.drawing import chrome_trace, memory, png, svg, text
from jaxpipe.drawing.pictures import styles
from jaxpipe.drawing.tracks import Tracks, place_boxes
from jaxpipe.schedules import Costs, Kind, Placement, Schedule, build, linear, parse_action, simulate
from jaxpipe.schedules.passes.vocabulary import vocabulary

SVG = "{http://www.w3.org/2000/svg}"
TRACK = "#f1f1ee"  # where nothing runs


def two_replicas() -> Schedule:
    rows = ("0F0 0EVICT0 1F1@1 1B1@1 1SYNC@1 0LOAD0 0B0", "0F1@1 1F0 1B0 0B1@1")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule("both ways", Placement(2, ((0, 1), (1, 0))), 2, actions)


# The timeline of tests/schedules/test_memory.py: half a slot leaves from 1 to 1.75 and comes back from 2 to 2.75.
HALF_MOVES = Costs(forward=1.0, backward=2.0, transfer=0.5, slot_messages=3.0)


def one_moves(*, share: Fraction) -> Schedule:
    """Device 0 evicts its first microbatch and loads it again."""
    rows = ("0F0 0EVICT0 0F1 0LOAD0 0B0 0B1", "1F0 1B0 1F1 1B1")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule("by hand", linear(2), 2, actions, (share, Fraction(1)))


def test_halves_of_backwards_have_colours_and_names_of_their_own():
    rows = ("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1B1 1W0")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    schedule = Schedule("halves", linear(2), 2, actions)
    shown = styles(schedule)
    assert [style.label for style in shown] == ["forward", "backward", "input gradient", "weight gradient"]
    assert len({style.fill for style in shown}) == 4
    timeline = simulate(schedule)  # a backward of two cells, its halves of one
    assert text(timeline) == ("0  0F0 0F1 ... 0I0 0W0 ... 0B1 0B1\n1  ... 1F0 1I0 1F1 1B1 1B1 1W0 ...\n")
    assert all(f">{style.label}</text>" in svg(timeline) for style in shown)


def test_text_is_drawn_to_scale():
    schedule = build("gpipe", num_devices=2, num_microbatches=1)
    # transfer 0.5 and F 0.5 are one cell, B 1.5 is three
    assert text(simulate(schedule, Costs(forward=0.5, backward=1.5, transfer=0.5))) == (
        "0  0F0 ... ... ... ... ... ... 0B0 0B0 0B0\n"
        "1  ... ... 1F0 1B0 1B0 1B0 ... ... ... ...\n"
    )  # fmt: skip


@pytest.mark.parametrize("costs", [Costs(transfer=0.3), Costs(backward=2.5), Costs(forward=1, backward=20)])
def test_text_that_cannot_be_to_scale_has_one_cell_an_action(costs):
    schedule = build("gpipe", num_devices=2, num_microbatches=2)
    assert text(simulate(schedule, costs)) == (
        "0  0F0 0F1 ... ... 0B0 0B1\n"
        "1  ... 1F0 1F1 1B0 1B1 ...\n"
        "(not to scale: one cell an action, transfers take no time)\n"
    )  # fmt: skip


def test_a_split_head_that_is_not_to_scale_has_one_cell_an_action_too():
    schedule = vocabulary(build("1f1b", num_devices=2, num_microbatches=3))
    grid, note = text(simulate(schedule, Costs(head_statistics=0.087, head_gradients=0.174))).split("(")
    assert note.startswith("not to scale")
    cells = [cell for line in grid.splitlines() for cell in line.split()[1:]]
    actions = [str(action) for row in schedule.rows for action in row]
    assert sorted(cell for cell in cells if cell != "...") == sorted(actions)


def test_text_labels_of_any_width_stand_in_columns():
    schedule = build("gpipe", num_devices=11, num_microbatches=11)
    lines = text(simulate(schedule)).splitlines()
    assert lines[0].startswith(" 0  0F0   0F1 ")
    assert lines[10].index("10F10") == lines[0].index("0F0") + 6 * 20  # it starts in cell 20


def test_text_shows_transfers_below_their_device():
    schedule = one_moves(share=Fraction(1, 2))
    # half a slot takes 0.5, from 1 and from 2 on; a message takes 1
    assert text(simulate(schedule, Costs(transfer=1.0, slot_messages=1.0))) == (
        "0  0F0 0F1 ... ... ... ... 0B0 0B0 ... 0B1 0B1\n"
        "       0>0 0<0\n"
        "1  ... ... 1F0 1B0 1B0 1F1 1B1 1B1 ... ... ...\n"
        "(0>4: microbatch 4 of stage 0 leaves for the paired device; 0<4: it comes back)\n"
    )  # fmt: skip


def test_text_of_transfers_that_share_a_cell():
    schedule = one_moves(share=Fraction(1))
    # 0EVICT0 from 1 to 3.5, 0LOAD0 from 3.5 to 6
    assert text(simulate(schedule, Costs(transfer=1.0, slot_messages=2.5))) == (
        "0  0F0 0F1 ... ... ... ... 0B0 0B0 ... 0B1 0B1\n"
        "       0>0 0>0 0>0\n"
        "               0<0 0<0 0<0\n"
        "1  ... ... 1F0 1B0 1B0 1F1 1B1 1B1 ... ... ...\n"
        "(0>4: microbatch 4 of stage 0 leaves for the paired device; 0<4: it comes back)\n"
    )  # fmt: skip


def boxes(picture: str) -> dict[str, list[tuple[float, float, float]]]:
    """Fill -> x, y, width of every box of the axes; x and y are those of its upper left corner."""
    found = {}
    (axes,) = (group for group in ElementTree.fromstring(picture).iter(f"{SVG}g") if group.get("id") == "axes_1")
    for path in axes.iter(f"{SVG}path"):
        fill = re.search(r"fill: (#\w+)", path.get("style", ""))
        for corners in path.attrib["d"].split("z")[:-1] if fill else []:
            x, y = np.array(re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", corners), dtype=float).T
            assert (len(x), len({*x}), len({*y})) == (4, 2, 2)
            found.setdefault(fill[1], []).append((x.min(), y.min(), np.ptp(x)))
    return found


def words_of(picture: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_svg_has_a_box_for_every_action_at_its_time():
    schedule = build("1f1b", num_devices=3, num_microbatches=5)
    timeline = simulate(schedule)
    found = boxes(svg(timeline))
    forward, backward = styles(schedule)
    assert set(found) == {forward.fill, backward.fill, TRACK}
    tracks = sorted({y for _, y, _ in found[TRACK]})
    for style in (forward, backward):
        drawn = np.array(found[style.fill])
        scale = drawn[0, 2] / (timeline.end - timeline.start)[style.actions[0]]
        left = drawn[:, 0] - timeline.start[style.actions] * scale
        assert np.ptp(left) < 1e-2  # one and the same origin
        assert np.allclose(drawn[:, 2], (timeline.end - timeline.start)[style.actions] * scale)
        assert [tracks.index(y) for y in drawn[:, 1]] == schedule.columns.device[style.actions].tolist()
    words = words_of(svg(timeline))
    assert {"forward", "backward", "device 0", "device 2"} <= set(words)
    assert any("bubble ratio 28.57%" in word for word in words if word)  # (D-1)/(N+D-1) = 2/7
    # every box has its microbatch's number; an axis may show the same digits
    assert all(words.count(str(m)) >= 6 for m in range(5))


def test_replicas_and_chunks_have_shades_and_a_legend():
    schedule = two_replicas()
    shown = styles(schedule)
    assert sorted(np.concatenate([style.actions for style in shown])) == list(range(11))
    assert len({style.fill for style in shown}) == len(shown)
    picture = svg(simulate(schedule))
    ElementTree.fromstring(picture)
    for label in ("forward, replica 0", "forward, replica 1", "EVICT to partner, replica 0", "SYNC, replica 1"):
        assert f">{label}</text>" in picture
    chunks = Schedule("chunks", Placement(1, ((0, 0),)), 1, (tuple(map(parse_action, ["0F0", "1F0", "1B0", "0B0"])),))
    assert [style.label for style in styles(chunks)] == [
        "forward, chunk 0",
        "forward, chunk 1",
        "backward, chunk 0",
        "backward, chunk 1",
    ]


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_replicas_stay_apart_however_many_chunks_there_are(num_chunks):
    shown = styles(build("bitpipe", num_devices=4, num_microbatches=4, num_chunks=num_chunks))
    inks = {replica: {s.ink for s in shown if f"forward, replica {replica}" in s.label} for replica in (0, 1)}
    assert inks == {0: {"#ffffff"}, 1: {"#1a1a1a"}}  # numbers are white on dark, black on light


def test_sync_is_in_the_lane_of_transfers_and_not_in_the_text():
    schedule = build("chimera", num_devices=2, num_microbatches=2)
    timeline = simulate(schedule, Costs(transfer=1.0, gradient_messages=2.0))
    tracks, columns = Tracks(schedule), schedule.columns
    is_sync = columns.is_kind(Kind.SYNC)
    assert (tracks.action_top[is_sync] == tracks.device_top[columns.device[is_sync]] + 1).all()
    assert np.isnan(place_boxes(timeline, tracks, mark=0.1, label=np.full(len(columns.kind), 0.1)).label[is_sync]).all()
    # messages travel from 1 to 2 and from 5 to 6
    assert text(timeline) == (
        "0  0F0   ...   1F1@1 1B1@1 1B1@1 ...   0B0   0B0\n"
        "1  0F1@1 ...   1F0   1B0   1B0   ...   0B1@1 0B1@1\n"
    )  # fmt: skip


def test_svg_draws_transfers_in_a_thin_lane_of_their_own():
    schedule = build("bpipe", num_devices=4, num_microbatches=8)
    timeline = simulate(schedule, Costs(transfer=0.05))  # half a slot takes 0.05 x 17 / 2
    picture = svg(timeline)
    found = boxes(picture)
    shown = {style.label: style for style in styles(schedule)}
    forwards = np.array(found[shown["forward"].fill])
    scale = forwards[0, 2]  # a forward takes 1
    for label, first in (("EVICT to partner", 1.0), ("LOAD from partner", 3 + 0.425)):
        drawn = np.array(found[shown[label].fill])
        assert np.allclose(drawn[:, 2], 0.425 * scale, rtol=1e-3)
        assert drawn[0, 0] - forwards[0, 0] == pytest.approx(first * scale, rel=1e-3)
        assert len(set(drawn[:, 1])) == 1  # device 0 alone
        assert sorted(set(forwards[:, 1]))[0] < drawn[0, 1] < sorted(set(forwards[:, 1]))[1]
    words = words_of(picture)
    assert words.count("with device 3") == 1
    # a number for each F, B, EVICT and LOAD of 0 to 4; the axis may show the same digits
    assert all(words.count(str(m)) >= 4 + 4 + 1 + 1 for m in range(5))


def test_svg_sets_transfers_that_take_no_time_side_by_side():
    schedule = build("bpipe", num_devices=4, num_microbatches=8)
    timeline = simulate(schedule)
    found = boxes(svg(timeline))
    marks = [mark for style in styles(schedule) if style.is_thin for mark in found[style.fill]]
    assert len(marks) == len({x for x, _, _ in marks}) == 16
    # 0EVICT2 and 0LOAD0 start both at 3
    columns = schedule.columns
    together = timeline.start[columns.is_kind(Kind.EVICT)][2], timeline.start[columns.is_kind(Kind.LOAD)][0]
    assert together == (3.0, 3.0)


@pytest.mark.parametrize(
    ("width", "evict", "load"),
    [
        (0.5, (1.375, False), (2.375, False)),  # within 1 to 1.75, and 2 to 2.75
        (1.0, (0.5, True), (3.25, True)),  # 0.25 to the right of the first is too little
        (1.5, None, (3.5, True)),  # and 1 to its left
    ],
)
def test_labels_of_transfers_stand_where_there_is_room(width, evict, load):
    schedule = one_moves(share=Fraction(1, 2))
    places = place_boxes(simulate(schedule, HALF_MOVES), Tracks(schedule), mark=0.01, label=np.full(10, width))
    for index, expected in ((1, evict), (3, load)):
        if expected is None:
            assert np.isnan(places.label[index])
        else:
            assert (places.label[index], places.is_beside[index]) == expected


def test_png_shows_each_kind_in_proportion_to_its_time():
    from matplotlib.image import imread

    schedule = build("gpipe", num_devices=2, num_microbatches=2)
    content = png(simulate(schedule, Costs(forward=1.0, backward=3.0)))
    assert content.startswith(b"\x89PNG\r\n")
    pixels = np.rint(imread(io.BytesIO(content))[..., :3] * 255).astype(int)
    area = {}
    for style in styles(schedule):
        colour = [int(style.fill[i : i + 2], 16) for i in (1, 3, 5)]
        area[style.label] = int((pixels == colour).all(axis=-1).sum())
    assert area["backward"] / area["forward"] == pytest.approx(3.0, rel=0.1)


def test_png_of_replicas_and_moments():
    schedule = two_replicas()
    assert png(simulate(schedule)).startswith(b"\x89PNG\r\n")


def test_chrome_trace_has_an_event_for_every_action():
    schedule = two_replicas()
    timeline = simulate(schedule)
    events = json.loads(json.dumps(chrome_trace(timeline)))
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in complete] == [str(action) for row in schedule.rows for action in row]
    # device 0 evicts, sums gradients and loads in a thread of its own
    assert [event["tid"] for event in complete] == [0, 2, 0, 0, 2, 2, 0, 1, 1, 1, 1]
    assert np.allclose([event["ts"] / 1000 for event in complete], timeline.start)
    assert np.allclose([(event["ts"] + event["dur"]) / 1000 for event in complete], timeline.end)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "device 0", 2: "device 0 with device 1", 1: "device 1"}
    places = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert places == {0: 0, 2: 1, 1: 2}


SLOT_TIMES = [
    [1.0 + 1.5 * 1.75 + 2.0 * 4.25 + 1.0 * 3.0, 0.0, 2 * 0.5 * 0.75],  # device 0: own, parked, in transit
    [1.0 * 6.0, 0.5 * 0.25, 2 * 0.5 * 0.75],
]


def test_memory_draws_areas_of_what_is_stored():
    timeline = simulate(one_moves(share=Fraction(1, 2)), HALF_MOVES)
    picture = ElementTree.fromstring(memory([timeline], bound=2.0, slot_bytes=3 * 2.0**30, file_format="svg"))
    shapes = [points for name, points in polygons(picture) if name.startswith("FillBetween")]
    areas = np.array([area(points) for points in shapes]).reshape(2, 3)
    assert np.allclose(areas / areas[0, 0], np.array(SLOT_TIMES) / SLOT_TIMES[0][0], atol=1e-4)
    # One upon the other: on device 1 what is parked, and what is in transit, reaches from 0 to 1.5.
    reach = np.array([np.ptp(points[:, 1]) for points in shapes]).reshape(2, 3)
    assert np.allclose(reach[1] / reach[1, 0], [1.0, 1.5, 1.5], atol=1e-4)
    words = ["".join(element.itertext()).strip() for element in picture.iter(f"{SVG}text")]
    assert "bound, 2 slots" in words
    assert words.count("6 GiB") == 2  # the bound, beside the lane of each device


def test_memory_draws_peaks_as_bars():
    timeline = simulate(one_moves(share=Fraction(1, 2)), HALF_MOVES)
    picture = ElementTree.fromstring(memory([timeline], slot_bytes=3 * 2.0**30, file_format="svg"))
    words = ["".join(element.itertext()).strip() for element in picture.iter(f"{SVG}text")]
    assert "2 (6 GiB) by hand" in words
    assert "1.5 (4.5 GiB) by hand" in words
    # Both devices store most while half of microbatch 0 leaves, at 1 and at 1.5.
    patches = [points for name, points in polygons(picture) if name.startswith("patch")]
    bars = [np.ptp(points[:, 0]) for points in patches[-9:-3]]  # before the legend's three
    assert np.allclose(np.array(bars) / bars[0], np.array([1.5, 1.0, 0.0, 0.0, 0.5, 0.5]) / 1.5, atol=1e-4)


def polygons(picture: ElementTree.Element) -> list[tuple[str, np.ndarray]]:
    """Name of the group, and corners, of every shape of straight lines that is alone in its group."""
    found = []
    for group in picture.iter(f"{SVG}g"):
        paths = [*group.findall(f"{SVG}path"), *group.findall(f"{SVG}defs/{SVG}path")]
        if len(paths) == 1 and "id" in group.attrib:
            corners = re.findall(r"[ML] ([-\d.e]+) ([-\d.e]+)", paths[0].attrib["d"])
            found.append((group.attrib["id"], np.array(corners, dtype=float)))
    return found


def area(corners: np.ndarray) -> float:
    x, y = corners.T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def test_memory_shows_schedules_side_by_side():
    timelines = [simulate(build(name, num_devices=4, num_microbatches=8)) for name in ("1f1b", "bpipe")]
    assert memory(timelines, bound=3.0).startswith(b"\x89PNG\r\n")
    words = memory(timelines, file_format="svg").decode()
    for word in ("4 1f1b", "3 bpipe", "1f1b, makespan 33", "bpipe, makespan 33", "device 3"):
        assert f">{word}</text>" in words
    assert "bound" not in words
    assert memory(timelines, file_format="svg").decode() == words  # no dates, no random names


def test_memory_of_a_schedule_with_other_stages_is_in_slots_of_the_last():
    """ZB-V stores as much as 1F1B, in stages of half the size, whose slots are half as large."""
    timelines = [simulate(build(name, num_devices=4, num_microbatches=8)) for name in ("zb_v", "1f1b")]
    words = memory(timelines, slot_bytes=2.0**30, file_format="svg").decode()
    for word in ("4 (4 GiB) zb_v", "4 (4 GiB) 1f1b"):
        assert f">{word}</text>" in words
    assert "(slots of 1f1b)" in words


def test_a_name_with_dollars_is_no_formula():
    schedule = replace(build("1f1b", num_devices=2, num_microbatches=2), name=r"a$\x$")
    assert r"a$\x$" in svg(simulate(schedule))
    assert r"a$\x$" in memory([simulate(schedule)], file_format="svg").decode()
