"""The modules of an experiment's folder, as Python finds them when a script of that folder runs."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@contextmanager
def modules_of(folder: str) -> Iterator[dict[str, ModuleType]]:
    """Each by its name, which several folders may have; gone from `sys.modules` afterwards."""
    names = sorted(path.stem for path in (EXPERIMENTS / folder).glob("*.py"))
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS / folder)
        yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]
    sys.modules.update(others)
