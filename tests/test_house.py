"""Counts of the package's texts that may fall and not rise: what is named in many files is dear to change."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "jaxpipe").rglob("*.py"))}
USERS_OF_AXES = ("jaxpipe/models/", "jaxpipe/huggingface/")  # the layers that use axes, and the kernels that they split


def files_that_name(pattern: str, *, outside: tuple[str, ...] = ()) -> Callable[[], list[str]]:
    return lambda: [name for name, text in FILES.items() if not name.startswith(outside) and re.search(pattern, text)]


# What is counted: a function that lists it, and the most that there may be.
COUNTS: dict[str, tuple[Callable[[], list[str]], int]] = {
    "files that name expert": (files_that_name(r"\bexpert\b", outside=USERS_OF_AXES), 2),
    "files that name tensor": (files_that_name(r"[\"']tensor[\"']|\.tensor\b", outside=USERS_OF_AXES), 4),
}


@pytest.mark.parametrize("what", COUNTS)
def test_no_more_than_before(what):
    listed, most = COUNTS[what]
    there = listed()
    assert len(there) <= most, f"{what}: {len(there)}, at most {most}:\n" + "\n".join(there)


def test_what_is_there_is_counted():
    """A pattern that finds nothing counts nothing."""
    assert "jaxpipe/cluster/axes.py" in COUNTS["files that name expert"][0]()
    assert "jaxpipe/mesh/collectives.py" in COUNTS["files that name tensor"][0]()
