"""Methods of the table with options that cover each pair of values, and where they exist: for tests over all of them.

A method that is registered is swept without another line: its values are those of its `Option`s.
"""

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest

from jaxpipe.schedules import REGISTRY, Method

_TIMES = {"input_gradient": 1.2, "weight_gradient": 0.8}
_MOST_CHUNKS = 4  # more of the same take long


def options_of(method: Method) -> list[dict[str, Any]]:
    """Options of `method`, the defaults first, such that each legal pair of values of two options occurs."""
    values = {
        option.name: list(dict.fromkeys((method.defaults[option.name], *option.swept)))
        for option in method.options
        if option.swept
    }
    if "num_chunks" in values:
        values["num_chunks"] = [num_chunks for num_chunks in values["num_chunks"] if num_chunks <= _MOST_CHUNKS]
    times = [{}, _TIMES] if method.takes_times else [{}]
    combined = [
        (*zip(values, chosen, strict=True), ("times", bool(given)))
        for *chosen, given in product(*values.values(), times)
        if any(method.takes(d, **dict(zip(values, chosen, strict=True))) for d in (4, 5))
    ]
    found, missing = [combined[0]], set().union(*map(_covered, combined)) - _covered(combined[0])
    while missing:
        found.append(max(combined, key=lambda each: len(missing & _covered(each))))
        missing -= _covered(found[-1])
    return [_without_defaults(method, dict(each)) for each in found]


def _covered(chosen: tuple[tuple[str, Any], ...]) -> set[tuple[tuple[str, Any], ...]]:
    """The values, and the pairs of values, that occur."""
    return {(each,) for each in chosen} | set(combinations(chosen, 2))


def _without_defaults(method: Method, options: dict[str, Any]) -> dict[str, Any]:
    times = _TIMES if options.pop("times") else {}
    return {**{name: value for name, value in options.items() if value != method.defaults[name]}, **times}


def takes(name: str, num_devices: int, options: Mapping[str, Any] | None = None) -> bool:
    """Whether the schedule `name` with `options` is one of `num_devices` devices."""
    return REGISTRY[name].takes(num_devices, **(options or {}))


OPTIONS = [(name, options) for name, method in sorted(REGISTRY.items()) for options in options_of(method) if options]
TWO_REPLICAS = tuple(sorted(name for name, method in REGISTRY.items() if method.num_replicas == 2))


def variants(*num_devices: int) -> list[tuple[str, dict[str, Any], int]]:
    """(name, options, number of devices) of all methods, plain and with `OPTIONS`, where they exist."""
    every = [*((name, {}) for name in sorted(REGISTRY)), *OPTIONS]
    return [(name, options, d) for name, options in every for d in num_devices if takes(name, d, options)]


def tiered(*num_devices: int) -> list[Any]:
    """`variants` as parameters: by default all methods on two and four devices.

    All methods on other numbers are in the second tier, and every second option on one; the others in the third.
    """
    found, seen = [], set()
    for name, options, d in variants(*sorted(num_devices, key=lambda d: (d != 4, d))):
        is_second = bool(options) or d not in (2, 4)
        is_third = bool(options) and ((name, str(options)) in seen or len(seen) % 2 == 1)
        seen.add((name, str(options)))
        marks = [pytest.mark.slow] if is_third else [pytest.mark.ci] if is_second else []
        found.append(pytest.param(name, options, d, marks=marks, id=f"{name}-{options}-{d}"))
    return found
