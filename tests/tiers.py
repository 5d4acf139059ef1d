"""Cases of one test in the suite's three tiers."""

from collections.abc import Iterable
from typing import Any

import pytest


def tiers(few: Iterable[Any], *, ci: Iterable[Any] = (), slow: Iterable[Any] = ()) -> list[Any]:
    """Cases for `parametrize`: `few` run always, the others with `-m ci` and with `-m slow`."""
    return [
        *few,
        *(pytest.param(case, marks=pytest.mark.ci) for case in ci),
        *(pytest.param(case, marks=pytest.mark.slow) for case in slow),
    ]
