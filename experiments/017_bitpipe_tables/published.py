"""Tables 2 and 6 of the BitPipe paper, as published: Wu, Chen and Yu, arXiv 2410.19367.

D devices, N microbatches, a backward of two forwards. An Ma is the activations of one microbatch on one device, an
M_theta the weights of one replica there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A method's row of both tables; formulas are functions of (D, N).

    Attributes:
        schedule, options: ours.
        formula: of the bubble ratio, in words.
        bubble_ratio: Table 2.
        weights: Table 2, in M_theta.
        activations: Table 2, in Ma: of the device that has least, and of the one that has most.
        messages: Table 6, one after the other in a step; None where the table has no row.
        exchanges: Table 6, whether it has M_grad / W_intra besides.
    """

    schedule: str
    options: tuple[tuple[str, object], ...]
    formula: str
    bubble_ratio: Callable[[int, int], float]
    weights: int
    activations: Callable[[int, int], tuple[float, float]]
    messages: Callable[[int, int], int] | None
    exchanges: bool = False


def _once(devices: int, microbatches: int) -> int:
    return 2 * microbatches + 2 * (devices - 1)


def _twice(devices: int, microbatches: int) -> int:
    return 4 * microbatches + 4 * (devices - 1)


ROWS: dict[str, Row] = {
    "GPipe": Row("gpipe", (), "(D-1)/(N+D-1)", lambda d, n: (d - 1) / (n + d - 1), 1, lambda d, n: (n, n), None),
    "DAPPLE": Row("1f1b", (), "(D-1)/(N+D-1)", lambda d, n: (d - 1) / (n + d - 1), 1, lambda d, n: (1, d), _once),
    "1F1B-Int": Row(
        "interleaved_1f1b",
        (),
        "(D-1)/(2N+D-1)",
        lambda d, n: (d - 1) / (2 * n + d - 1),
        1,
        lambda d, n: ((d + 1) / 2, d),
        _twice,
    ),
    "Chimera": Row(
        "chimera",
        (),
        "(D-2)/(3N/2+D-2)",
        lambda d, n: (d - 2) / (1.5 * n + d - 2),
        2,
        lambda d, n: ((d + 2) / 2, d),
        _once,
        exchanges=True,
    ),
    "BitPipe": Row(
        "bitpipe",
        (),
        "(D-2)/(3N+D-2)",
        lambda d, n: (d - 2) / (3 * n + d - 2),
        2,
        lambda d, n: ((d + 3) / 2, d),
        _twice,
        exchanges=True,
    ),
    "BitPipe, early forwarding": Row(
        "bitpipe",
        (("scaling", "early_forwarding"),),
        "(D-2)/(4N+D-2)",
        lambda d, n: (d - 2) / (4 * n + d - 2),
        2,
        lambda d, n: ((d + 3) / 2, (3 * d - 3) / 2),
        None,
        exchanges=True,
    ),
}
