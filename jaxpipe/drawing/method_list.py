"""The table of methods as text: what each does, its options, its bubble and peak in closed form, who published it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.option import written_value

_WIDTH = 110


def method_list(methods: Iterable[Method]) -> str:
    """A paragraph for each of `methods`; D is the number of devices, N that of microbatches.

    Example:
        >>> from jaxpipe.schedules import find_method
        >>> print(method_list([find_method("gpipe")]), end="")
        gpipe
            all forwards, then all backwards
            bubble ratio: (D-1)/(N+D-1)
            peak activations: N
            paper: Huang et al., GPipe, NeurIPS 2019
    """
    return "\n".join(map(_paragraph, methods))


def _paragraph(method: Method) -> str:
    lines = [
        method.summary,
        *_named("options", [_option(method, option.name) for option in method.options]),
        *_named("bubble ratio", list(map(_formula, method.bubble))),
        *_named("peak activations", list(map(_formula, method.peak))),
        *_named("paper", [method.paper] if method.paper else []),
    ]
    wrapped = (textwrap.wrap(line, _WIDTH, initial_indent="    ", subsequent_indent="        ") for line in lines)
    return "\n".join([method.name, *(line for part in wrapped for line in part)]) + "\n"


def _named(name: str, values: list[str]) -> list[str]:
    return [f"{name}: {'; '.join(values)}"] if values else []


def _option(method: Method, name: str) -> str:
    """An option with its default and its note, as `num_chunks=2 (v)`."""
    option = next(option for option in method.options if option.name == name)
    default = option.default_text or written_value(method.defaults[name])
    return f"{name}={default}" + (f" ({option.note})" if option.note else "")


def _formula(formula: Formula) -> str:
    return formula.text + (f" for {formula.where}" if formula.where else "")
