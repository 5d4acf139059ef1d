"""A copy of the package with the change that a page of docs/ shows as a diff."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


def section_of(page: str, heading: str) -> str:
    """The text of a page under a heading of the second level, or of the whole page."""
    text = (ROOT / page).read_text()
    return text if not heading else next(part for part in text.split("\n## ") if part.startswith(heading))


def patched_package(page: str, folder: Path, *, heading: str = "") -> Path:
    """Copies jaxpipe to `folder`, with the changes of the page's blocks of diff, and returns `folder`.

    A hunk is found by its lines, whatever line number it names: those above may have come or gone.
    """
    # With its bytecode, which Python takes for the files whose times stay as they were: all but the changed ones.
    shutil.copytree(ROOT / "jaxpipe", folder / "jaxpipe")
    blocks = re.findall(r"^```diff\n(.*?)^```$", section_of(page, heading), re.MULTILINE | re.DOTALL)
    assert blocks, f"{page} has no block of diff"
    for block in blocks:
        for old, new, hunks in re.findall(r"^--- (\S+)\n\+\+\+ b/(\S+)\n((?:(?!--- ).*\n)*)", block, re.MULTILINE):
            file = folder / new
            text = "" if old == "/dev/null" else file.read_text()
            for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
                lines = hunk.splitlines(keepends=True)
                before = "".join(line[1:] for line in lines if line[0] in " -")
                after = "".join(line[1:] for line in lines if line[0] in " +")
                assert not text or text.count(before) == 1, f"{page} is behind {new}:\n{before}"
                text = text.replace(before, after) if before else text + after
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


def num_changed(page: str, *, heading: str = "") -> dict[str, int]:
    """The number of hunks by file, of files that were there before."""
    files = re.findall(r"^--- a/(\S+)\n\+\+\+ .*\n((?:(?!--- |```).*\n)*)", section_of(page, heading), re.MULTILINE)
    return {name: len(re.findall(r"^@@", hunks, re.MULTILINE)) for name, hunks in files}
