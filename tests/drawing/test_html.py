"""The HTML page, in a browser where that is needed: what it draws where, what it tells, what mouse and keys do."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from browser import CHROMIUM, Seen, see

from jaxpipe.drawing.pictures import HUES, ink, styles
from jaxpipe.schedules import Costs, Kind, build
from jaxpipe.show import Page, main, to_html

without_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


def needs_chromium(test):
    return pytest.mark.ci(without_chromium(test))


# 1F1B, D=4, N=8, a backward of two forwards: the F of microbatch m on device d starts at d + m while the pipeline fills
# (m < D - d); the last device alternates from 3 on; the B of microbatch 0 comes back to device d at 4 + 2 (3 - d).
ONE_F_ONE_B = ["1f1b", "--num_devices=4", "--num_microbatches=8"]
TRACK_LIGHT, TRACK_DARK = (0xF1, 0xF1, 0xEE), (0x2A, 0x2A, 0x28)


def rgb(colour: str) -> tuple[int, int, int]:
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))  # pyright: ignore


def written(folder: Path, *arguments: str) -> Path:
    path = folder / "page.html"
    assert main([*arguments, f"--html={path}"]) == 0
    return path


def canvases(seen: Seen, clock: str = "asynchronous") -> list[dict[str, str]]:
    """The attributes of the canvases on `clock`, one for each schedule."""
    canvas = seen.every("canvas", data_layer="tracks")
    sections = seen.every("section", class_="panel")
    assert len(canvas) == len(sections)
    return [
        each.attributes
        for each, section in zip(canvas, sections, strict=True)
        if section.attributes["data-clock"] == clock
    ]


def colour_at(seen: Seen, canvas: dict[str, str], device: int, time: float, part: str = "top", below: float = 2):
    """The colour of the pixel at `time`, so many pixels below the upper edge of the device's track."""
    left, width = json.loads(canvas["data-plot"])
    start, end = float(canvas["data-from"]), float(canvas["data-to"])
    x = float(canvas["data-left"]) + left + (time - start) / (end - start) * width
    y = float(canvas["data-top"]) + json.loads(canvas["data-tracks"])[device][part] + below
    return tuple(seen.pixels[int(y), int(x)].tolist())


def detail(seen: Seen) -> list[str]:
    return seen.only("div", id="detail").text


def is_sound(seen: Seen) -> bool:
    return (
        seen.only("html").attributes.get("data-state") == "drawn"
        and not seen.console
        and not seen.every("p", id="error")
    )


@needs_chromium
def test_actions_stand_at_their_times_in_their_colours(tmp_path):
    seen = see(written(tmp_path, *ONE_F_ONE_B))
    assert is_sound(seen)
    (canvas,) = canvases(seen)
    assert (float(canvas["data-from"]), float(canvas["data-to"])) == (0, (8 + 4 - 1) * 3)
    forward, backward = rgb(HUES[Kind.F]), rgb(HUES[Kind.B])
    for device in range(4):
        for microbatch in range(4 - device):
            assert colour_at(seen, canvas, device, device + microbatch + 0.5) == forward
        first_backward = 4 + 2 * (3 - device)
        assert colour_at(seen, canvas, device, first_backward + 0.3) == backward
        assert colour_at(seen, canvas, device, first_backward + 1.7) == backward
        for time in [device - 0.5] * (device > 0) + [first_backward - 0.5] * (device < 3):
            assert colour_at(seen, canvas, device, time) == TRACK_LIGHT
    assert [cell.text for cell in seen.every("td", data_summary="makespan")] == [["33"]]
    assert [cell.text for cell in seen.every("td", data_summary="bubble ratio")] == [[f"{3 / 11:.4f}"]]
    assert [cell.text for cell in seen.every("td", data_summary="peak activations, Ma")] == [["1 to 4"]]
    assert detail(seen) == []


@needs_chromium
@pytest.mark.parametrize("font", ["DejaVuSans", pytest.param("STIXGeneral", marks=pytest.mark.slow)])  # wide and narrow
def test_the_address_zooms_selects_and_shows_the_program(tmp_path, font):
    address = "from=4&to=8&clock=program&path=1&select=0:2B0"
    # What is told stands over the tracks, wherever there is room for it.
    aside = 'document.getElementById("detail").style.visibility = "hidden";'
    seen = see(written(tmp_path, *ONE_F_ONE_B), address=address, is_dark=True, font=font, script=aside)
    assert is_sound(seen)
    (canvas,) = canvases(seen, "program")
    assert (float(canvas["data-from"]), float(canvas["data-to"])) == (4, 8)
    for time in (4.1, 5, 5.9):  # below the outline of what 2B0 waited for
        assert colour_at(seen, canvas, 3, time, below=6) == rgb(HUES[Kind.B])
    assert colour_at(seen, canvas, 3, 6.5) == rgb(HUES[Kind.F])
    assert colour_at(seen, canvas, 2, 5) == TRACK_DARK  # from 4 to 6 it waits for 3B0
    assert tuple(seen.pixels[2, 2]) == (0x19, 0x19, 0x18)
    told = detail(seen)
    assert told[:3] == ["2B0", "backward: stage 2, microbatch 0, device 2", "from 6 to 8: takes 2"]
    assert "reads the message of 3B0 of device 3, which ended at 6" in told
    assert "its device waited 2 for 3B0 of device 3, which ended at 6" in told
    assert "device 2 stores 2 Ma at 6" in told  # D - d microbatches


@needs_chromium
def test_memory_stands_below_with_what_is_parked_and_the_bound(tmp_path):
    arguments = ["bpipe", "--num_devices=8", "--num_microbatches=16", "--transfer=0.005", "--compare=1f1b"]
    seen = see(written(tmp_path, *arguments), address="select=0:0EVICT4")
    assert is_sound(seen)
    balanced, plain = canvases(seen)
    own, parked = (0x66, 0x75, 0x8C), (0x9C, 0xCB, 0xEA)
    track = json.loads(balanced["data-tracks"])[7]
    # In the middle of the step device 7 stores one of its own and half of the seven of device 0.
    for below, colour in ((track["memory"] - 2, own), (track["memory"] - 8, parked)):
        assert colour_at(seen, balanced, 7, 30, "memoryTop", below) == colour
    assert colour_at(seen, plain, 7, 30, "memoryTop", track["memory"] - 2) == own
    assert colour_at(seen, plain, 7, 30, "memoryTop", track["memory"] - 8) not in (own, parked)
    legends = [text for legend in seen.every("p", class_="keys") for text in legend.text]
    assert legends.count("bound, 5 Ma") == 4  # ceil((D + 2) / 2), of both schedules on both clocks
    told = detail(seen)
    assert told[:2] == ["0EVICT4", "leaves for the paired device: stage 0, microbatch 4, device 0 with device 7"]


ACTS = """
const section = document.querySelector("section.panel"), stack = section.querySelector(".stack");
const canvas = stack.querySelector("canvas"), box = canvas.getBoundingClientRect();
const [left, width] = JSON.parse(canvas.dataset.plot), tracks = JSON.parse(canvas.dataset.tracks);
const at = (time, device) => ({
  clientX: box.left + left + ((time - view.from) / (view.to - view.from)) * width,
  clientY: box.top + tracks[device].top + 4, bubbles: true, cancelable: true, pointerId: 1,
});
stack.setPointerCapture = () => {};
const keep = async (name) => {
  await wait();
  results[name] = [Number(canvas.dataset.from), Number(canvas.dataset.to)];
};
const key = (name) => section.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
const told = () => [...document.getElementById("detail").children].map((line) => line.textContent);
stack.dispatchEvent(new PointerEvent("pointermove", at(5, 3)));
results.hover = told();
stack.dispatchEvent(new PointerEvent("pointermove", at(5, 2)));
results.idle = told();
stack.dispatchEvent(new WheelEvent("wheel", { ...at(11, 0), deltaY: -100 }));
await keep("wheel");
stack.dispatchEvent(new PointerEvent("pointerdown", at(11, 0)));
stack.dispatchEvent(new PointerEvent("pointermove", at(9, 0)));
stack.dispatchEvent(new PointerEvent("pointerup", at(9, 0)));
await keep("drag");
document.getElementById("fit").click();
await keep("fit");
document.getElementById("zoom-in").click();
await keep("button");
for (let press = 0; press < 40; press++) key("+");
await keep("deep");
for (let press = 0; press < 80; press++) key("-");
await keep("out");
for (const name of ["n", "n", "ArrowDown"]) key(name);
await wait();
results.walked = told()[0];
results.address = location.hash;
key("Escape");
await wait();
results.hidden = document.getElementById("detail").hidden;
"""


@needs_chromium
def test_mouse_keys_and_buttons(tmp_path):
    seen = see(written(tmp_path, *ONE_F_ONE_B), script=ACTS)
    assert is_sound(seen)
    results = seen.results
    assert results["hover"][0] == "3B0"
    assert "did not wait: 3F0 ended" in results["hover"]
    assert results["hover"][-1].startswith("device 3 stores 1 Ma at ")
    idle, stored = results["idle"]
    assert idle == "idle from 4 to 6: 2B0 comes next, after 3B0 of device 3"
    assert stored.startswith("device 2 stores 2 Ma at ")
    # The moment under the mouse stays where it is.
    start, end = results["wheel"]
    assert end - start == pytest.approx(33 / 1.3)
    assert start == pytest.approx(11 - 11 / 1.3, abs=0.1)
    assert results["drag"] == pytest.approx([start + 2, end + 2], abs=0.1)
    assert results["fit"] == results["out"] == [0, 33]
    assert results["button"] == pytest.approx([16.5 - 16.5 / 1.3, 16.5 + 16.5 / 1.3])
    assert 0 < results["deep"][1] - results["deep"][0] < 0.01
    # 0F0, 0F1, then what device 1 does when 0F1 starts, at 1.
    assert results["walked"] == "1F0"
    assert "select=0:1F0" in results["address"]
    assert results["hidden"]


# Relative luminance and contrast by WCAG 2.2. Of a pattern the colour that is nearest counts.
CONTRASTS = """
const light = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
const luminance = ([red, green, blue]) =>
  0.2126 * light(red / 255) + 0.7152 * light(green / 255) + 0.0722 * light(blue / 255);
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const coloursIn = (text) => [...text.matchAll(/rgba?\\(([^)]*)\\)/g)].map((found) => found[1].split(",").map(Number));
const groundOf = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const { backgroundColor, backgroundImage } = getComputedStyle(at);
    const seen = coloursIn(`${backgroundColor} ${backgroundImage}`).filter((parts) => parts[3] !== 0);
    if (seen.length) return seen;
  }
  return [[255, 255, 255]];
};
const least = (pairs) => Math.min(...pairs.map(([one, other]) => contrast(one, other)));
const textOf = (element) => [...element.childNodes].filter((child) => child.nodeType === 3 && child.data.trim());
const inks = [...document.body.querySelectorAll("*")]
  .filter((element) => textOf(element).length && element.checkVisibility() && element.tagName !== "OPTION");
results.texts = inks.map((element) => {
  const ink = coloursIn(getComputedStyle(element).color)[0];
  return [`${textOf(element)[0].data.trim()}`, least(groundOf(element).map((ground) => [ink, ground]))];
});
const boxes = [...document.querySelectorAll(".bar > span, .keys i:not(.line)")];
results.boxes = boxes.map((element) => {
  const [own, ground] = [groundOf(element), groundOf(element.parentElement)];
  const { left, top, width, height } = element.getBoundingClientRect();
  return {
    name: element.dataset.part ?? element.parentElement.textContent, value: Number(element.dataset.value ?? 0),
    contrast: Math.max(...own.map((colour) => least(ground.map((other) => [colour, other])))),
    place: [left + scrollX, top + scrollY, width, height],
  };
});
"""
PAPER = {False: (0xFF, 0xFF, 0xFF), True: (0x19, 0x19, 0x18)}


@needs_chromium
@pytest.mark.parametrize("is_dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_the_page_shows_differs_from_its_ground(tmp_path, is_dark):
    path = written(tmp_path, "bpipe", *ONE_F_ONE_B[1:], "--transfer=0.1", "--compare=bitpipe", "--compare=zb_v")
    seen = see(path, address="clock=both&select=0:1F0", is_dark=is_dark, script=CONTRASTS)
    assert is_sound(seen)
    texts, boxes = seen.results["texts"], seen.results["boxes"]
    assert {"bpipe", "waits in between", "fit", "1F0"} <= {text for text, _ in texts}
    assert [text for text, contrast in texts if contrast < 3] == []  # of large text, and of what is no text, by WCAG
    assert [box["name"] for box in boxes if box["contrast"] < 1.15] == []
    parts = {box["name"]: box["place"] for box in boxes if box["value"]}
    assert parts.keys() == {"F", "B", "I", "W", "warm_up", "internal", "cool_down"}
    for name, (left, top, width, height) in parts.items():  # as the style sheet says, so it is drawn
        inside = seen.pixels[round(top) + 1 : round(top + height) - 1, round(left) + 1 : round(left + width) - 1]
        assert (inside != PAPER[is_dark]).any(axis=2).mean() > 0.9, name


@needs_chromium
def test_text_as_light_as_its_ground_would_be_seen(tmp_path):
    path = written(tmp_path, *ONE_F_ONE_B)
    path.write_text(re.sub(r"\.(warm_up|cool_down) \{.*?\}", "", path.read_text()).replace("--soft-ink: #", "--no: #"))
    path.write_text(path.read_text().replace("</style>", ":root { --soft-ink: #fefefe; }</style>"))
    results = see(path, script=CONTRASTS).results
    assert {"waits in between", "schedule"} <= {text for text, contrast in results["texts"] if contrast < 3}
    assert {"warm_up", "cool_down", "is done, others are not"} <= {
        box["name"] for box in results["boxes"] if box["contrast"] < 1.15
    }


@needs_chromium
@pytest.mark.parametrize(
    ("num_devices", "num_microbatches"), [pytest.param(16, 512, marks=pytest.mark.slow), (64, 512)]
)
def test_a_large_schedule_is_drawn_with_mean_colours(tmp_path, num_devices, num_microbatches):
    sizes = [f"--num_devices={num_devices}", f"--num_microbatches={num_microbatches}"]
    seen = see(written(tmp_path, "gpipe", *sizes), size=(1200, 2400))
    assert is_sound(seen)
    (canvas,) = canvases(seen)
    forward, backward = rgb(HUES[Kind.F]), rgb(HUES[Kind.B])
    for device in (0, num_devices // 2, num_devices - 1):
        # F of all microbatches, a bubble of 3 (D - 1 - d), then B of all.
        ready = num_devices - 1 + num_microbatches + 2 * (num_devices - 1 - device)
        assert colour_at(seen, canvas, device, device + 0.5 * num_microbatches) == pytest.approx(forward, abs=2)
        assert colour_at(seen, canvas, device, ready + num_microbatches) == pytest.approx(backward, abs=2)


@needs_chromium
def test_a_page_that_breaks_would_be_seen(tmp_path):
    path = written(tmp_path, *ONE_F_ONE_B)
    path.write_text(path.read_text().replace("function paintAxis(", "function paintAxes("))
    assert not is_sound(see(path))


def asset(name: str) -> str:
    return (files("jaxpipe.drawing.html") / "assets" / name).read_text()


class Names(HTMLParser):
    """Classes and ids of a page as it is written, before its scripts run."""

    def __init__(self, page: str):
        super().__init__()
        self.classes: set[str] = set()
        self.ids: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.classes |= set((given.get("class") or "").split())
        self.ids |= {given["id"] or ""} if "id" in given else set()


def test_the_style_sheet_and_the_page_name_the_same_things():
    """Each class has a rule and each rule a class; ids and colours that are named are there."""
    style = asset("page.css")
    scripts = "\n".join(
        asset(path.name) for path in (files("jaxpipe.drawing.html") / "assets").iterdir() if path.name.endswith(".js")
    )
    page = Names(to_html(build("bitpipe", num_devices=4, num_microbatches=8), costs=Costs(transfer=0.1)))
    selectors = " ".join(re.findall(r"(?m)^\s*([^{}@:\n][^{}\n]*?)\s*\{", style))
    ruled, ruled_ids = (set(re.findall(rf"{mark}([a-zA-Z][\w-]*)", selectors)) for mark in (r"\.", "#"))
    made = page.classes | {name for names in re.findall(r'\bclass: "([^"]*)"', scripts) for name in names.split()}
    assert made == ruled
    ids = page.ids | set(re.findall(r'\bid: "([^"]*)"', scripts))
    assert ruled_ids <= ids
    assert set(re.findall(r'getElementById\("([^"]*)"\)', scripts)) <= ids
    assert set(re.findall(r'querySelector\w*\("[^"]*\.([\w-]+)"\)', scripts)) <= made
    light, dark = (set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL))
    used = set(re.findall(r"var\((--[\w-]+)\)", style)) | {
        f"--{name}" for name in re.findall(r'colour\("([^"]*)"\)', scripts)
    }
    assert light == dark == used


def luminance(colour: tuple[int, int, int]) -> float:
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


GROUNDS = [*PAPER.values(), TRACK_LIGHT, TRACK_DARK]


@pytest.mark.parametrize("kind", HUES)
def test_actions_of_every_kind_and_shade_are_seen_on_light_and_dark_pages(kind):
    """Two replicas of two chunks have the lightest shades."""
    schedule = build("bitpipe", num_devices=2, num_microbatches=2)
    rows = tuple(tuple(action._replace(kind=kind) for action in row) for row in schedule.rows)
    fills = {rgb(style.fill) for style in styles(replace(schedule, rows=rows))}
    assert len(fills) == 4
    assert min(contrast(fill, ground) for fill in fills for ground in GROUNDS) > 1.13
    assert min(contrast(fill, rgb(ink(f"#{bytes(fill).hex()}"))) for fill in fills) > 2.5


@pytest.mark.parametrize("name", ["1f1b", "bitpipe", "bpipe", "zb_v"])
def test_a_page_needs_nothing_but_itself(name):
    page = to_html(build(name, num_devices=4, num_microbatches=8))
    for fetched in ("http:", "https:", "//cdn", "@import", "src=", "fetch(", "url("):
        assert fetched not in page
    assert "#TITLE#" not in page


def test_schedules_of_one_model_are_compared(tmp_path):
    """A device of zb_v has two stages of half a stage's time: N (F + B) of work on every device in both."""
    arguments = ["1f1b", "--num_devices=8", "--num_microbatches=24", "--compare=zb_v"]
    text = written(tmp_path, *arguments).read_text()
    plain, split = text.split('<div class="bar" data-schedule=')[1:]
    assert work_of(plain) == work_of(split.split("</div></div>")[0]) == 24 * 3
    assert '<tr data-schedule="zb_v">' in text
    assert len(re.findall(r"\d+ types of rounds, \d+ rounds", text)) == 2


def work_of(bar: str) -> float:
    """The sum of the parts of a bar in which a device computes."""
    pieces = [piece.split('"')[0:3:2] for piece in bar.split('data-part="')[1:]]
    return sum(float(value) for part, value in pieces if part in "FBIW")


def test_costs_for_each_stage_are_cut_like_the_model():
    costs = Costs(forward=(1.0, 3.0, 1.0, 1.0), backward=2.0)
    schedules = [build(name, num_devices=2, num_microbatches=4) for name in ("zb_v", "1f1b")]
    text = to_html(schedules, costs=costs)
    bar = text.split('data-schedule="1f1b">')[2]
    # stages of 4 and 2 for each of 4 microbatches, 3 on the mean of both devices
    assert f'data-part="F" data-value="{4 * 3}"' in bar


def test_a_notebook_shows_the_page_in_a_frame():
    text = to_html(build("1f1b", num_devices=2, num_microbatches=2))
    frame = Page(text, height=300)._repr_html_()
    assert frame.startswith('<iframe style="width:100%;height:300px')
    assert unescape(frame.split('srcdoc="')[1].split('"')[0]) == text


def test_schedules_of_different_devices_are_refused():
    schedules = [build("1f1b", num_devices=d, num_microbatches=4) for d in (2, 4)]
    with pytest.raises(ValueError, match="repair: build both with num_devices=2"):
        to_html(schedules)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html=page.txt"], "the name ends in .html or .htm"),
        (["--html=page.html", "--format=svg"], "--format=svg has no effect: --html writes a page to a file of its own"),
        (["--html=page.html", "--output=page.svg"], "--output=page.svg has no effect"),
        (["--html=page.html", "--placement", "--topology=h200:1x4"], "--placement=True has no effect"),
        (["--html=page.html", "--compare=gpip"], "Did you mean 'gpipe'?"),
        (["--html=/no/such/folder/page.html"], "cannot write '/no/such/folder/page.html'"),
        (["--slot_bytes=1e9"], "has no effect: it needs --html or --format=memory"),
    ],
)
def test_mistakes_with_the_page_are_told(capsys, arguments, message):
    assert main([*ONE_F_ONE_B, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err


def test_the_page_has_words_for_every_kind_of_action():
    script = (files("jaxpipe.drawing.html") / "assets" / "overlay.js").read_text()
    words = re.search(r"const WORDS = \{(.*?)\};", script, re.DOTALL)
    assert words
    assert set(re.findall(r"\b([A-Z]+): ", words[1])) == {kind.name for kind in Kind}
