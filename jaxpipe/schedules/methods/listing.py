"""The table of methods as text: for `show --list`, and as the Markdown tables of README.md and docs/schedules.md."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedules.analysis.activations import peak_activations
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.option import Option, written_value
from jaxpipe.schedules.methods.registry import REGISTRY

NUM_DEVICES, NUM_MICROBATCHES = 8, 32
_WIDTH = 12


def list_methods() -> str:
    """All methods, each with its options, closed forms and paper."""
    return "\n".join(_paragraph(name, method) for name, method in REGISTRY.items())


def methods_table() -> str:
    """README's table: what each does, and its bubble and peak at D=8, N=32, simulated."""
    rows = []
    for name, method in REGISTRY.items():
        schedule = method.build(num_devices=NUM_DEVICES, num_microbatches=NUM_MICROBATCHES)
        bubble, peak = simulate(schedule).bubble_ratio, peak_activations(schedule).max()
        rows.append([f"`{name}`", method.summary, f"{100 * bubble:.1f} %", f"{peak:g}"])
    return _markdown(["schedule", "what it does", "bubble", "stored, Ma"], rows)


def options_table() -> str:
    """The table of docs/schedules.md: what each does, and its options with their defaults."""
    rows = [[f"`{name}`", method.summary, _options(method)] for name, method in REGISTRY.items()]
    return _markdown(["schedule", "what it does", "options, as they are if not given"], rows)


def _paragraph(name: str, method: Method) -> str:
    devices = f"D >= {method.least_devices}" if method.least_devices > 1 else "any D"
    lines = [
        ("options", _options(method).replace("`", "") or "none"),
        ("devices", "even D" if method.even_devices else devices),
        ("replicas", str(method.num_replicas) if method.num_replicas > 1 else ""),
        *(("bubble", _formula(each)) for each in method.bubble if each.holds),
        *(("peak, Ma", _formula(each)) for each in method.peak if each.holds),
        ("paper", method.paper),
    ]
    shown = [f"  {head:{_WIDTH}}{text}" for head, text in lines if text]
    return "\n".join([f"{name}: {method.summary}", *shown, ""])


def _formula(formula: Formula) -> str:
    return formula.text + (f"   ({formula.where})" if formula.where else "")


def _options(method: Method) -> str:
    options = [_option(method, option) for option in method.options if not option.is_time]
    times = [_option(method, option) for option in method.options if option.is_time]
    return "; ".join([*options, *([f"times: {', '.join(times)}"] if times else [])])


def _option(method: Method, option: Option) -> str:
    default = option.default_text or written_value(method.defaults[option.name])
    return f"`{option.name}={default}`" + (f", {option.note}" if option.note else "")


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([head, "|---" * len(heads) + "|", *lines, ""]).replace(" |  |", " | |")
