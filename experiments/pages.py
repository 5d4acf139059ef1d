"""What the scripts of experiments write alike: Markdown tables, and texts between two comments of a page.

Goes in: cells, texts and pages. Comes out: Markdown; what is shown, and where, is the experiments' own. A run.py is
started as a script, so it puts the folder above this one on `sys.path` before it imports from here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

BEGIN = "<!-- begin of what run.py --write writes -->\n"
END = "<!-- end of what run.py --write writes -->\n"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A Markdown table; every line ends.

    Example:
        >>> markdown(["D", "slots"], [["4", "3"]])
        '| D | slots |\n| --- | --- |\n| 4 | 3 |\n'
    """
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


def put_between(text: str, page: str, begin: str = BEGIN, end: str = END) -> str:
    r"""`page` with `text` between two of its comments, a blank line on either side; what stood there is gone.

    Raises:
        ValueError: `page` does not have `begin` and, after it, `end`, each once.

    Example:
        >>> put_between("new\n", "above\n<!-- a -->\nold\n<!-- b -->\n", "<!-- a -->\n", "<!-- b -->\n")
        'above\n<!-- a -->\n\nnew\n\n<!-- b -->\n'
    """
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end) or (page.count(begin), page.count(end)) != (1, 1):
        raise ValueError(f"the page has not {begin.strip()!r} and, after it, {end.strip()!r}, each once")
    return f"{before}{begin}\n{text}\n{end}{after}"


def put_sections(texts: Mapping[str, str], page: str) -> str:
    """`page` with each text between the two comments of its name: <!-- name --> and <!-- end of name -->."""
    for name, text in texts.items():
        page = put_between(text, page, f"<!-- {name} -->\n", f"<!-- end of {name} -->\n")
    return page


def page_parser(description: str, *, quick: str) -> argparse.ArgumentParser:
    """A parser of `--quick`, of which `quick` says what it leaves out, and `--write`; more flags may follow."""
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument(
        "--write",
        action="store_true",
        help="put it into README.md, and draw the picture",
    )
    return made


def write_whole(path: Path, text: str) -> None:
    """Writes `text`, so that whoever is killed meanwhile leaves the old text or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def write_files(contents: Mapping[Path, str | bytes]) -> None:
    """Writes pages and pictures, and says on the standard error output which."""
    for path, content in contents.items():
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    print(f"wrote {' and '.join(path.name for path in contents)}", file=sys.stderr)
