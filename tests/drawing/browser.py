"""A page in headless Chromium: what it becomes, and what it looks like."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--dump-dom",
    "--disable-background-networking", "--no-first-run", "--virtual-time-budget=8000",
)  # fmt: skip
FONTS = Path(matplotlib.get_data_path(), "fonts", "ttf")  # the same on every machine
FONTCONFIG = "<fontconfig><dir>{folder}</dir><cachedir>{folder}/cache</cachedir></fontconfig>"
# A page's timelines are drawn when data-state says so. Its frames do not pass while virtual time does.
SCRIPT = """
<script>
window.requestAnimationFrame = (act) => setTimeout(act, 5);
const wait = () => new Promise((done) => setTimeout(done, 50));
const results = {};
const acts = async () => {
  while (document.documentElement.dataset.state !== "drawn") await wait();
  %s
  document.body.append(element("pre", { id: "results" }, JSON.stringify(results)));
};
acts().catch((error) => console.error(error));
</script>
</body>
"""


@dataclass(frozen=True)
class Seen:
    """A page as a browser has drawn it.

    Attributes:
        elements: of its document, in order.
        console: lines that it wrote there, errors among them.
        pixels: [height, width, 3] 0 to 255.
    """

    elements: Sequence[Element]
    console: Sequence[str]
    pixels: np.ndarray

    def only(self, name: str, **attributes: str) -> Element:
        """The one element of this name and these attributes."""
        (found,) = self.every(name, **attributes)
        return found

    @property
    def results(self) -> dict:
        """What the script of `see` wrote into `results`."""
        return json.loads(unescape(self.only("pre", id="results").text[0]))

    def every(self, name: str, **attributes: str) -> list[Element]:
        """All elements of this name and these attributes."""
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        return [each for each in self.elements if each.name == name and wanted.items() <= each.attributes.items()]


@dataclass
class Element:
    """One element; `text` is all that stands in it, each element's text apart."""

    name: str
    attributes: dict[str, str]
    text: list[str]


def see(
    page: Path,
    *,
    address: str = "",
    size: tuple[int, int] = (1200, 1900),
    is_dark: bool = False,
    font: str = "DejaVuSans",
    script: str = "",
) -> Seen:
    """`page` drawn in a window of `size`, in one font: what else the machine has makes no difference.

    Args:
        page: file.
        address: what stands behind the `#`.
        size: width and height, pixels.
        is_dark: whether the reader prefers a dark page.
        font: one of those that matplotlib brings.
        script: JavaScript to run once the page is drawn; it writes into `results`.
    """
    folder = page.parent / font
    folder.mkdir(exist_ok=True)
    shutil.copy(FONTS / f"{font}.ttf", folder)
    (folder / "fonts.conf").write_text(FONTCONFIG.format(folder=folder))
    if script:
        page.write_text(page.read_text().replace("</body>", SCRIPT % script))
    picture = page.with_suffix(".png")
    picture.unlink(missing_ok=True)
    scheme = [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"]
    place = [f"--screenshot={picture}", f"--window-size={size[0]},{size[1]}", f"--user-data-dir={folder}/profile"]
    command = [CHROMIUM, *FLAGS, *scheme, *place, f"{page.as_uri()}#{address}"]
    environment = os.environ | {"FONTCONFIG_FILE": str(folder / "fonts.conf")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    parser = _Parser()
    parser.feed(done.stdout)
    pixels = np.rint(255 * matplotlib.image.imread(io.BytesIO(picture.read_bytes()))[..., :3]).astype(int)
    return Seen(parser.elements, re.findall(r".*CONSOLE.*", done.stderr), pixels)


class _Parser(HTMLParser):
    void = frozenset({"meta", "link", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.open: list[Element] = []

    def handle_starttag(self, tag, attrs):
        element = Element(tag, {key: value or "" for key, value in attrs}, [])
        self.elements.append(element)
        if tag not in self.void:
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop().name != tag:
            pass

    def handle_data(self, data):
        if data.strip():
            for element in self.open:
                element.text.append(data.strip())
