"""Every error that jaxpipe raises has its five parts: the class lays them out."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import jaxpipe
from jaxpipe import errors
from jaxpipe.errors import ConfigError, JaxpipeError, check_choice, closest, explain

PACKAGE = Path(jaxpipe.__file__).parent
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, JaxpipeError)}
# These carry the text of other errors, which is laid out already.
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


def rule_of(call):
    """The expression of the error's rule, if it has one."""
    return next((keyword.value for keyword in call.keywords if keyword.arg == "rule"), None)


def test_every_error_has_a_rule_and_a_repair():
    others = [file for file, call in calls() if rule_of(call) is None]
    assert {file: others.count(file) for file in others} == OF_OTHERS
    with_repair = [{keyword.arg for keyword in call.keywords} >= {"rule", "repair"} for _, call in calls()]
    assert with_repair.count(True) == len(with_repair) - len(others) > 150


def test_every_rule_has_a_name():
    """A literal rule begins with it; one that is made elsewhere is a variable."""
    for file, call in calls():
        rule = rule_of(call)
        text = rule.values[0] if isinstance(rule, ast.JoinedStr) else rule
        if isinstance(text, ast.Constant):
            assert re.match(r"[a-z0-9-]+(: |$)", str(text.value)), (file, call.lineno, text.value)


def test_an_error_lays_out_its_text_and_is_copied_between_processes():
    error = ConfigError("a", rule="r: always", picture="p", repair="do it")
    assert str(error) == explain("a", rule="r: always", picture="p", repair="do it")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ConfigError(str(error))) == str(error)


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
