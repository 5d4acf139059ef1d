"""Every public name is documented and can be imported, and no file is a heap of leftovers."""

import ast
import importlib
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "jaxpipe"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAPS = {"utils", "util", "helpers", "helper", "common", "misc"}

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(file) for file in FILES]


def undocumented(source: str) -> list[str]:
    """The public classes, functions and methods without a docstring, and "module" for the module's own.

    Read from the source: a dataclass gives itself a `__doc__` at run time.
    """

    def walk(node: ast.Module | ast.ClassDef, prefix: str) -> list[str]:
        found = []
        for child in node.body:
            if isinstance(child, Documented) and not child.name.startswith("_"):
                if ast.get_docstring(child) is None:
                    found.append(prefix + child.name)
                if isinstance(child, ast.ClassDef):
                    found += walk(child, f"{prefix}{child.name}.")
        return found

    tree = ast.parse(source)
    return (["module"] if ast.get_docstring(tree) is None else []) + walk(tree, "")


def test_public_names_have_docstrings():
    found = {module: undocumented(file.read_text()) for module, file in zip(MODULES, FILES, strict=True)}
    assert {module: names for module, names in found.items() if names} == {}


def test_an_undocumented_name_would_be_seen():
    source = (
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Bare:\n    x: int\n    def method(self): ...\n"
        "class Full:\n    'Doc.'\n    async def method(self): ...\n    def _private(self): ...\n"
        "def function():\n    'Doc.'\n    def inner(): ...\n"
    )
    assert undocumented(source) == ["module", "Bare", "Bare.method", "Full.method"]


def test_exported_names_exist():
    for module in MODULES:
        imported = importlib.import_module(module)
        exported = getattr(imported, "__all__", [])
        assert len(set(exported)) == len(exported), module
        assert [name for name in exported if not hasattr(imported, name)] == [], module
        assert [name for name in exported if name.startswith("_")] == [], module


def test_packages_say_what_they_export():
    """A package whose `__init__` imports names of its own modules lists them in `__all__`."""
    packages = [file for file in FILES if file.name == "__init__.py" and "from jaxpipe." in file.read_text()]
    assert packages
    assert [module_name(file) for file in packages if "__all__ = " not in file.read_text()] == []


def test_no_file_is_a_heap():
    assert [module for module in MODULES if HEAPS & set(module.split("."))] == []
