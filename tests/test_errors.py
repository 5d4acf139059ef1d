"""Every error that jaxpipe raises has its five parts: the one function that lays them out is called for it."""

import ast
import re
from pathlib import Path

import pytest

import jaxpipe
from jaxpipe import errors
from jaxpipe.errors import ConfigError, JaxpipeError, check_choice, closest, explain

PACKAGE = Path(jaxpipe.__file__).parent
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, JaxpipeError)}
# These carry the text of other errors, which `explain` has laid out.
OF_OTHERS = {
    "checkpoints/checkpoints.py": 1,  # raised again in the thread that waits
    "config/checks.py": 1,  # all errors of a config
    "schedules/files.py": 2,  # with the file, and with the place in it
    "schedules/rules/__init__.py": 1,  # all violations of a schedule
}


def calls():
    """(file, call) of each call of an error class."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                yield path.relative_to(PACKAGE).as_posix(), node


def explained(call):
    """The call of `explain` that makes the text of an error, if one does."""
    text = call.args[0] if call.args else None
    is_explained = isinstance(text, ast.Call) and isinstance(text.func, ast.Name) and text.func.id == "explain"
    return text if is_explained else None


def test_every_error_is_laid_out_by_explain():
    others = [file for file, call in calls() if explained(call) is None]
    assert {file: others.count(file) for file in others} == OF_OTHERS
    assert sum(1 for _ in calls()) > 150


def test_every_rule_has_a_name():
    """A literal rule begins with it; one that is made elsewhere is a variable."""
    for file, call in calls():
        found = explained(call)
        if found is None:
            continue
        (rule,) = (keyword.value for keyword in found.keywords if keyword.arg == "rule")
        text = rule.values[0] if isinstance(rule, ast.JoinedStr) else rule
        if isinstance(text, ast.Constant):
            assert re.match(r"[a-z0-9-]+(: |$)", str(text.value)), (file, call.lineno, text.value)


def test_the_layout():
    assert explain("a\nb", rule="r: always", picture="1\n  2", repair="do it") == (
        "a\n  b\n  rule r: always\n      1\n        2\n  repair: do it"
    )
    assert explain("a", rule="r: always", repair="do it") == "a\n  rule r: always\n  repair: do it"


def test_a_choice_names_the_closest():
    check_choice("mesh.order", "auto", ("auto", "contiguous"))
    with pytest.raises(ConfigError, match=r"mesh.order='contigous' is not known. Did you mean 'contiguous'\?\n  rule"):
        check_choice("mesh.order", "contigous", ("auto", "contiguous"))
    assert closest("xyz", ["contiguous"]) == ""
