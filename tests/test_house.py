"""Counts of the package's texts that may fall and not rise: what is named in many files is dear to change."""

import ast
import functools
import io
import json
import re
import tokenize
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "jaxpipe").rglob("*.py"))}
parsed = functools.cache(ast.parse)  # most files are read by several tests
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

    walk(parsed(text), range(0))
    return bare


def traps_without_reason_in(folder: str) -> Callable[[], list[str]]:
    files = {name: text for name, text in FILES.items() if name.startswith(folder)}
    return lambda: [f"{name}:{line}" for name, text in files.items() for line in traps_without_reason(text)]


# Optional mechanisms of schedules; a file that names three is hard to change without knowing all of them.
MECHANISMS = {
    "split backward": r"\bKind\.[IW]\b|split_vjp|input_gradient|weight_gradient",
    "parked pages": r"EVICT|LOAD\b|parked|parking",
    "replicas": r"SYNC|replica|exchange",
    "split head": r"Kind\.[ST]\b|over_pipe|woven|vocab_over_pipe|split_head",
    "no flush": r"UPDATE|delayed|without_flush|2bw|wpipe|shared_sums",
    "blocking permutes": r"blocking|blocked",
}


def files_of_three_mechanisms() -> list[str]:
    return [
        name
        for name, text in FILES.items()
        if sum(bool(re.search(pattern, text)) for pattern in MECHANISMS.values()) >= 3
    ]


def assignments_at_once() -> list[str]:
    """`a, b = x, y` where nothing is swapped: two statements in one line."""
    listed = []
    for name, text in FILES.items():
        for node in ast.walk(parsed(text)):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Tuple)
                and isinstance(node.value, ast.Tuple)
            ):
                targets = {ast.dump(target).replace("Store()", "Load()") for target in node.targets[0].elts}
                if targets.isdisjoint(map(ast.dump, node.value.elts)):
                    listed.append(f"{name}:{node.lineno}")
    return listed


def nouns_left_out() -> list[str]:
    """Names that say that something is chosen, and not what."""
    return [
        f"{name}:{node.lineno}"
        for name, text in FILES.items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in ("found", "each", "one")
    ]


def long_files() -> list[str]:
    return [name for name, text in FILES.items() if text.count("\n") > 350]


def modules_in_circles() -> list[str]:
    """Modules that import each other, whatever stands between, those for types alone included."""
    modules = {
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): text for name, text in FILES.items()
    }
    imports = {module: _imported(text, modules.keys()) - {module} for module, text in modules.items()}
    reached = {module: set(direct) for module, direct in imports.items()}
    for between in modules:  # Warshall's closure
        for direct in reached.values():
            if between in direct:
                direct |= reached[between]
    return [module for module, all_of in reached.items() if module in all_of]


def _imported(text: str, modules: Collection[str]) -> set[str]:
    imported = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            of_module = [f"{node.module}.{alias.name}" for alias in node.names]
            imported |= {name if name in modules else node.module for name in of_module}
    return imported & set(modules)


def scripts_of_experiments() -> dict[str, str]:
    """The texts of scripts, and the code of notebooks."""
    folder = ROOT / "experiments"
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(folder.rglob("*.py"))}
    for path in sorted(folder.rglob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        texts[str(path.relative_to(ROOT))] = re.sub(r"^[%!].*$", "", code, flags=re.MULTILINE)  # commands of IPython
    return texts


@cache
def exported_names() -> dict[str, set[str]]:
    """The public API: what packages directly under jaxpipe export, the errors, and the commands' modules."""
    exported = {}
    for name, text in FILES.items():
        module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        if name.count("/") == 1 and (name == "jaxpipe/errors.py" or "__main__" in text):
            exported[module] = {node.name for node in ast.parse(text).body if hasattr(node, "name")}
        for node in ast.parse(text).body if name.count("/") == 2 and name.endswith("__init__.py") else []:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                exported[module] = set(ast.literal_eval(node.value))
    return exported


def inner_modules(text: str) -> set[str]:
    """Modules of jaxpipe that a text takes names from, or names in a string, that are not of the public API."""
    modules = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in FILES} - {"jaxpipe"}
    exported, inner = exported_names(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            inner |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if alias.name not in exported.get(node.module, ()):
                    inner |= {full if full in modules else node.module} & modules
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # As of `patch("jaxpipe.program.start.empty")`; commands are started by name.
            inner |= {name for name in modules if name.count(".") > 1 and f"{node.value}.".startswith(f"{name}.")}
    return inner


def inner_modules_of_experiments() -> list[str]:
    """What an experiment names of the package's inside cannot be changed without it."""
    return sorted({module for text in scripts_of_experiments().values() for module in inner_modules(text)})


def comments_of(text: str) -> list[tokenize.TokenInfo]:
    return [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]


def repeating_comments() -> list[str]:
    """Comments of three words or more, all of which stand in the statement's line."""
    listed = []
    for name, text in FILES.items():
        lines = text.splitlines()
        for token in comments_of(text):
            number = token.start[0]
            code = lines[number - 1][: token.start[1]] or lines[min(number, len(lines) - 1)]
            code = code if code.strip() else lines[min(number, len(lines) - 1)]
            words = re.findall(r"[a-z]{2,}", token.string.lower())
            if len(words) > 2 and set(words) <= set(re.findall(r"[a-z]{2,}", code.lower())):
                listed.append(f"{name}:{number}")
    return listed


def test_comments_stand_where_code_needs_them():
    """Comments per 100 lines of code, docstrings and empty lines left out."""
    num_comments = num_lines = 0
    for text in FILES.values():
        documented = {
            line
            for node in ast.walk(parsed(text))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
            for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
        }
        num_comments += len(comments_of(text))
        lines = enumerate(text.splitlines(), 1)
        num_lines += sum(
            bool(line.strip()) and line.strip()[0] != "#" and number not in documented for number, line in lines
        )
    assert 100 * num_comments / num_lines >= 8


# What is counted: a function that lists it, and the most that there may be.
COUNTS: dict[str, tuple[Callable[[], list[str]], int]] = {
    "files that name expert": (files_that_name(r"\bexpert\b", outside=USERS_OF_AXES), 2),
    "files that name tensor": (files_that_name(r"[\"']tensor[\"']|\.tensor\b", outside=USERS_OF_AXES), 4),
    "files that name three mechanisms": (files_of_three_mechanisms, 11),
    # Who makes, checks or reads a user's config: fields, checks, command line, presets, run folder, `fit`, `resolve`,
    # and the text of a planned one.
    "files that name ConfigDict": (files_that_name(r"ConfigDict"), 8),
    "assignments of several names at once": (assignments_at_once, 0),
    "names without a noun": (nouns_left_out, 0),
    "files of more than 350 lines": (long_files, 0),
    "modules in circles of imports": (modules_in_circles, 0),
    "comments that repeat their line": (repeating_comments, 0),
    "inner modules that experiments name": (inner_modules_of_experiments, 13),
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
    assert "jaxpipe/mesh/sharing.py" in COUNTS["files that name tensor"][0]()
    assert "jaxpipe/config/base.py" in COUNTS["files that name ConfigDict"][0]()


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("x = lax.optimization_barrier(x)\n", [1]),
        ("# so that it stays\n\nx = lax.optimization_barrier(x)\n", []),
        ("# too far away\n\n\nx = cond_in_place(f, x)\n", [4]),
        ("x = [\n    guarded_index(i, n),  # stays in its guard\n]\n", []),
        ("def f():\n    # of another statement\n    y = 1\n    z = 2\n    return cond_in_place(y, g, z)\n", [5]),
    ],
)
def test_a_guard_without_a_reason_would_be_seen(text, bare):
    assert traps_without_reason(text) == bare


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("from jaxpipe.schedules import build\nfrom jaxpipe.estimate import memory\n", set()),
        ("from jaxpipe.plan import plan\nfrom jaxpipe.errors import ConfigError\nimport jaxpipe\n", set()),
        ("from jaxpipe.schedules.csv_format import to_csv\n", {"jaxpipe.schedules.csv_format"}),
        ("from jaxpipe.program import pipeline\n", {"jaxpipe.program.pipeline"}),
        ("from jaxpipe.files import write_whole\n", {"jaxpipe.files"}),
        ("from jaxpipe.estimate import no_such_name\n", {"jaxpipe.estimate"}),
        ("import jaxpipe.program.start\n", {"jaxpipe.program.start"}),
        ("command = ['-m', 'jaxpipe.measure']\npatch('jaxpipe.program.start.empty')\n", {"jaxpipe.program.start"}),
    ],
)
def test_an_inner_module_would_be_seen(text, inner):
    assert inner_modules(text) == inner
