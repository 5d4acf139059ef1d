"""The tables of the page, as Markdown."""

from __future__ import annotations

from compiled import saved
from counted import (
    activations,
    bubble_ratio,
    gradients_sent,
    most_asked,
    most_sent,
    not_hidden,
    schedule_of,
    table_of,
    waited_for,
)
from published import ROWS

from experiments.pages import markdown

SIZES = tuple((num_devices, factor * num_devices) for num_devices in (4, 8) for factor in (1, 2, 4))
_MESSAGE_BYTES = 2 * 1024 * 3072  # 2 B S H of GPT-96 with one sequence a microbatch
_GIB = 2**30


def bubbles() -> str:
    """Table 2's bubble ratios: formula / simulated, and how much they differ."""
    rows = []
    for name, row in ROWS.items():
        cells = []
        for num_devices, num_microbatches in SIZES:
            published = row.bubble_ratio(num_devices, num_microbatches)
            found = bubble_ratio(schedule_of(name, num_devices, num_microbatches))
            cells.append(_both(f"{100 * published:.1f}", f"{100 * found:.1f}"))
        rows.append([name, row.formula, *cells])
    return markdown(["method", "published, %", *_sizes()], rows)


def memory() -> str:
    """Table 2's activations and weights: formula / counted, of the device that has least and the one that has most."""
    rows = []
    for name, row in ROWS.items():
        cells = []
        for size in SIZES:
            schedule = schedule_of(name, *size)
            cells.append(_both(_range(row.activations(*size)), _range(activations(schedule))))
        replicas = schedule_of(name, *SIZES[0]).num_replicas
        rows.append([name, _both(str(row.weights), str(replicas)), *cells])
    return markdown(["method", "weights, M_theta", *(f"{size}, Ma" for size in _sizes())], rows)


def messages() -> str:
    """Table 6: messages of a step, as published, as simulated two ways, and of the busiest device."""
    rows = []
    for name, row in ROWS.items():
        for size in SIZES if row.messages else ():
            assert row.messages
            schedule, table = schedule_of(name, *size), table_of(name, *size)
            rows.append(
                [
                    name,
                    f"{size[0]}, {size[1]}",
                    str(row.messages(*size)),
                    f"{waited_for(schedule):.0f}",
                    f"{not_hidden(schedule):.0f}",
                    f"{most_asked(table)} / {most_sent(table)}",
                    f"{most_sent(table) * _MESSAGE_BYTES / 1e6:.0f}",
                    f"{gradients_sent(table):.2g}" if row.exchanges else "-",
                ]
            )
    heads = ["method", "D, N", "published", "blocking", "not blocking", "asked / sent", "MB sent, GPT-96"]
    return markdown([*heads, "of its stages, gradients sent"], rows)


def compiled() -> str:
    """GiB of each device of the compiled step, what was predicted, and which permutes an action hides."""
    rows = []
    for name, found in saved().items():
        predicted = found["predicted"]
        kinds = [predicted[kind] for kind in ("state", "weights", "gradients", "pages", "transit", "messages")]
        rows.append(
            [
                name,
                *(f"{num_bytes / _GIB:.2f}" for num_bytes in kinds),
                f"{found['num_slots'] / _slots_of_an_ma(name):g}",
                f"{found['total_bytes'] / _GIB:.2f}",
                f"{found['predicted_bytes'] / _GIB:.2f}",
                f"{found['overlapped_permutes']} of {found['permutes']}",
            ]
        )
    heads = ["schedule", "state", "weights", "gradients", "activations", "transit", "messages", "slots in Ma"]
    return markdown([*heads, "compiled", "predicted", "permutes overlapped"], rows)


def _slots_of_an_ma(name: str) -> int:
    """A slot is the activations of one stage."""
    return schedule_of({row.schedule: key for key, row in reversed(ROWS.items())}[name], 8, 8).placement.num_chunks


def _sizes() -> list[str]:
    return [f"D={num_devices}, N={num_microbatches}" for num_devices, num_microbatches in SIZES]


def _range(least_and_most: tuple[float, float]) -> str:
    return "..".join(f"{ma:g}" for ma in dict.fromkeys(map(float, least_and_most)))


def _both(published: str, found: str) -> str:
    """One where they are equal, both in bold where not."""
    return found if published == found else f"**{published} / {found}**"
