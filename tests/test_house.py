"""Counts of the package's texts that may fall and not rise: what is named in many files is dear to change."""

import ast
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "jaxpipe").rglob("*.py"))}
USERS_OF_AXES = ("jaxpipe/models/", "jaxpipe/huggingface/")  # the layers that use axes, and the kernels that they split


def files_that_name(pattern: str, *, outside: tuple[str, ...] = ()) -> Callable[[], list[str]]:
    return lambda: [name for name, text in FILES.items() if not name.startswith(outside) and re.search(pattern, text)]


# Calls that look needless and are not: without the reason beside it, the next reader takes one away.
TRAPS = {"cond_in_place", "guarded_index", "once", "optimization_barrier"}


def traps_without_reason(text: str) -> list[int]:
    """Lines of calls of `TRAPS` without a comment in the lines of their statement, or in the two above it."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    bare = []

    def walk(node: ast.AST, lines: range) -> None:
        if isinstance(node, ast.stmt):
            lines = range(node.lineno - 2, node.end_lineno + 1)
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if name in TRAPS and commented.isdisjoint(lines):
            bare.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            walk(child, lines)

    walk(ast.parse(text), range(0))
    return bare


def traps_without_reason_in(folder: str) -> Callable[[], list[str]]:
    files = {name: text for name, text in FILES.items() if name.startswith(folder)}
    return lambda: [f"{name}:{line}" for name, text in files.items() for line in traps_without_reason(text)]


# What is counted: a function that lists it, and the most that there may be.
COUNTS: dict[str, tuple[Callable[[], list[str]], int]] = {
    "files that name expert": (files_that_name(r"\bexpert\b", outside=USERS_OF_AXES), 2),
    "files that name tensor": (files_that_name(r"[\"']tensor[\"']|\.tensor\b", outside=USERS_OF_AXES), 4),
    "guards and barriers without a reason": (traps_without_reason_in("jaxpipe/program/"), 0),
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


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("x = lax.optimization_barrier(x)\n", [1]),
        ("# so that it stays\n\nx = lax.optimization_barrier(x)\n", []),
        ("# too far away\n\n\nx = once(f, x)\n", [4]),
        ("x = [\n    guarded_index(i, n),  # stays in its guard\n]\n", []),
        ("def f():\n    # of another statement\n    y = 1\n    z = 2\n    return cond_in_place(y, g, z)\n", [5]),
    ],
)
def test_a_guard_without_a_reason_would_be_seen(text, bare):
    assert traps_without_reason(text) == bare
