"""The pictures show every action, at its time, on its device."""

import io
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxpipe.schedules import Costs, Placement, Schedule, build, parse_action, simulate
from jaxpipe.schedules.render import chrome_trace, png, svg, text
from jaxpipe.schedules.render.palette import styles

SVG = "{http://www.w3.org/2000/svg}"


def two_replicas() -> Schedule:
    rows = ("0F0 0EVICT0 1F1@1 1B1@1 1SYNC@1 0LOAD0 0B0", "0F1@1 1F0 1B0 0B1@1")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule("both ways", Placement(2, ((0, 1), (1, 0))), 2, actions)


def test_text_is_drawn_to_scale():
    schedule = build("gpipe", num_devices=2, num_microbatches=1)
    # transfer 0.5 and F 0.5 are one cell, B 1.5 is three
    assert text(schedule, simulate(schedule, Costs(forward=0.5, backward=1.5, transfer=0.5))) == (
        "0  0F0 ... ... ... ... ... ... 0B0 0B0 0B0\n"
        "1  ... ... 1F0 1B0 1B0 1B0 ... ... ... ...\n"
    )  # fmt: skip


@pytest.mark.parametrize("costs", [Costs(transfer=0.3), Costs(backward=2.5), Costs(forward=1, backward=20)])
def test_text_that_cannot_be_to_scale_has_one_cell_an_action(costs):
    schedule = build("gpipe", num_devices=2, num_microbatches=2)
    assert text(schedule, simulate(schedule, costs)) == (
        "0  0F0 0F1 ... ... 0B0 0B1\n"
        "1  ... 1F0 1F1 1B0 1B1 ...\n"
        "(not to scale: one cell an action, transfers take no time)\n"
    )  # fmt: skip


def test_text_labels_of_any_width_stand_in_columns():
    schedule = build("gpipe", num_devices=11, num_microbatches=11)
    lines = text(schedule, simulate(schedule)).splitlines()
    assert lines[0].startswith(" 0  0F0   0F1 ")
    assert lines[10].index("10F10") == lines[0].index("0F0") + 6 * 20  # it starts in cell 20


def boxes(picture: ElementTree.Element) -> dict[str, list[tuple[float, float, float]]]:
    """Fill -> x, y, width of every box."""
    found = {}
    for path in picture.iter(f"{SVG}path"):
        numbers = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v[\d.]+h-[\d.]+z", path.attrib["d"])
        assert "".join(path.attrib["d"].split("z")).count("M") == len(numbers)
        found[path.attrib["fill"]] = [tuple(map(float, box)) for box in numbers]
    return found


def test_svg_has_a_box_for_every_action_at_its_time():
    schedule = build("1f1b", num_devices=3, num_microbatches=5)
    timeline = simulate(schedule)
    picture = ElementTree.fromstring(svg(schedule, timeline))
    found = boxes(picture)
    forward, backward = styles(schedule)
    assert set(found) == {forward.fill, backward.fill}
    lanes = sorted({y for drawn in found.values() for _, y, _ in drawn})
    for style in (forward, backward):
        drawn = np.array(found[style.fill])
        scale = drawn[0, 2] / (timeline.end - timeline.start)[style.actions[0]]
        left = drawn[:, 0] - timeline.start[style.actions] * scale
        assert np.ptp(left) < 1e-2  # one and the same origin
        assert np.allclose(drawn[:, 2], (timeline.end - timeline.start)[style.actions] * scale)
        assert [lanes.index(y) for y in drawn[:, 1]] == schedule.columns.device[style.actions].tolist()
    words = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"forward", "backward", "device 0", "device 2"} <= set(words)
    assert any("bubble ratio 28.57%" in word for word in words if word)  # (D-1)/(N+D-1) = 2/7
    # every box has its microbatch's number; an axis may show the same digits
    assert all(words.count(str(m)) >= 6 for m in range(5))


def test_replicas_and_chunks_have_shades_and_a_legend():
    schedule = two_replicas()
    shown = styles(schedule)
    assert sorted(np.concatenate([style.actions for style in shown])) == list(range(11))
    assert len({style.fill for style in shown}) == len(shown)
    picture = svg(schedule, simulate(schedule))
    ElementTree.fromstring(picture)
    for label in ("forward, replica 0", "forward, replica 1", "EVICT, replica 0", "SYNC, replica 1"):
        assert f">{label}</text>" in picture
    chunks = Schedule("chunks", Placement(1, ((0, 0),)), 1, (tuple(map(parse_action, ["0F0", "1F0", "1B0", "0B0"])),))
    assert [style.label for style in styles(chunks)] == [
        "forward, chunk 0",
        "forward, chunk 1",
        "backward, chunk 0",
        "backward, chunk 1",
    ]


def test_png_shows_each_kind_in_proportion_to_its_time():
    from matplotlib.image import imread

    schedule = build("gpipe", num_devices=2, num_microbatches=2)
    content = png(schedule, simulate(schedule, Costs(forward=1.0, backward=3.0)))
    assert content.startswith(b"\x89PNG\r\n")
    pixels = np.rint(imread(io.BytesIO(content))[..., :3] * 255).astype(int)
    area = {}
    for style in styles(schedule):
        colour = [int(style.fill[i : i + 2], 16) for i in (1, 3, 5)]
        area[style.label] = int((pixels == colour).all(axis=-1).sum())
    assert area["backward"] / area["forward"] == pytest.approx(3.0, rel=0.1)


def test_png_of_replicas_and_moments():
    schedule = two_replicas()
    assert png(schedule, simulate(schedule)).startswith(b"\x89PNG\r\n")


def test_chrome_trace_has_an_event_for_every_action():
    schedule = two_replicas()
    timeline = simulate(schedule)
    events = json.loads(json.dumps(chrome_trace(schedule, timeline)))
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in complete] == [str(action) for row in schedule.rows for action in row]
    assert [event["tid"] for event in complete] == schedule.columns.device.tolist()
    assert np.allclose([event["ts"] / 1000 for event in complete], timeline.start)
    assert np.allclose([(event["ts"] + event["dur"]) / 1000 for event in complete], timeline.end)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "device 0", 1: "device 1"}
