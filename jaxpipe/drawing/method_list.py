"""The table of methods as text: for `show --list`, and as the Markdown table of docs/schedules.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from jaxpipe.schedules import Formula, Method, Option, peak_activations, simulate
from jaxpipe.schedules.methods.option import written_value

# sizes in the Markdown table
NUM_DEVICES = 8
NUM_MICROBATCHES = 32
_WIDTH = 110


def method_table(methods: Iterable[Method]) -> str:
    """A Markdown table of methods: summary, options, and the simulated bubble and peak at D=8, N=32."""
    heads = ["schedule", "what it does", "bubble", "peak, Ma", "options and their defaults"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in methods:
        schedule = method.build(num_devices=NUM_DEVICES, num_microbatches=NUM_MICROBATCHES)
        bubble = simulate(schedule).bubble_ratio
        peak = peak_activations(schedule).max()
        options = [f"`{_default(method, option)}`{_note(option)}" for option in method.options if not option.is_time]
        # Three options that many methods share would fill the table.
        options += ["times"] if method.takes_times else []
        cells = [f"`{method.name}`", method.summary, f"{100 * bubble:.1f} %", f"{peak:g}", "; ".join(options)]
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def method_list(methods: Iterable[Method]) -> str:
    """A paragraph for each of `methods`; D is the number of devices, N that of microbatches.

    Example:
        >>> from jaxpipe.schedules import find_method
        >>> print(method_list([find_method("gpipe")]), end="")
        gpipe
            all forwards, then all backwards
            devices: any D
            bubble ratio: (D-1)/(N+D-1)
            peak activations, Ma: N
            paper: Huang et al., GPipe, NeurIPS 2019
    """
    return "\n".join(map(_paragraph, methods))


def _paragraph(method: Method) -> str:
    lines = [
        method.summary,
        f"devices: {_devices(method)}",
        *_named("options", [_default(method, option) + _note(option).replace("`", "") for option in method.options]),
        *_named("bubble ratio", [_formula(bubble) for bubble in method.bubble if bubble.holds]),
        *_named("peak activations, Ma", [_formula(peak) for peak in method.peak if peak.holds]),
        *_named("paper", [method.paper] if method.paper else []),
    ]
    # A line that goes on is indented further, so that the next property stands out.
    wrapped = (textwrap.wrap(line, _WIDTH, initial_indent="    ", subsequent_indent="        ") for line in lines)
    return "\n".join([method.name, *(line for part in wrapped for line in part)]) + "\n"


def _named(name: str, values: list[str]) -> list[str]:
    return [f"{name}: {'; '.join(values)}"] if values else []


def _devices(method: Method) -> str:
    least = f"D >= {method.least_devices}" if method.least_devices > 1 else "any D"
    replicas = "; two replicas of the weights" if method.num_replicas == 2 else ""
    return ("even D" if method.even_devices else least) + replicas


def _default(method: Method, option: Option) -> str:
    return f"{option.name}={option.default_text or written_value(method.defaults[option.name])}"


def _note(option: Option) -> str:
    return f", {option.note}" if option.note else ""


def _formula(formula: Formula) -> str:
    return formula.text + (f" for {formula.where}" if formula.where else "")
