"""The schedules that are compared, each with what is published of it and what we have worked out.

Goes in: nothing. Comes out: `ROWS`. D devices, N microbatches, a backward of two forwards, N a multiple of D; Ma is the
activations of one microbatch on one device, x a bubble in forwards of a stage. The figures beside the formulas are
`tables`' to find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SOURCES = {
    "a": "BitPipe, arXiv 2410.19367, Table 2",
    "b": "the same paper's text",
    "c": "BPipe's bound as Obscura, USENIX ATC 2025, section 9.3, gives it",
    "d": "PipeOffload, arXiv 2503.01328",
    "e": "BitPipe, Table 6",
    "f": "zero bubble, arXiv 2401.10241, and github.com/sail-sg/zero-bubble; 0 is of a device from its first action on",
    "g": "controllable memory, arXiv 2405.15362, and the same repository; its bubbles are approximate",
    "h": "github.com/deepseek-ai/DualPipe, where F and B at once take as long as one after the other; N >= 2D",
}


@dataclass(frozen=True)
class Formula:
    """One formula; of activations it gives the least and the most of any device.

    Attributes:
        text: as printed.
        of: (D, N) -> its values; None for one that it does not say, and no values where it says nothing.
        source: a key of `SOURCES`; empty for one of ours.
    """

    text: str
    of: Callable[[int, int], tuple[float | None, ...]]
    source: str = ""

    def __str__(self) -> str:
        return f"{self.text} [{self.source}]" if self.source else f"*{self.text}*"


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes:
        label: as printed.
        name: of the schedule, as `build` takes it.
        options: as `pipeline.options` takes them.
        bubble: bubble ratio: published, ours, or both where they differ.
        activations: in Ma, likewise.
        messages: of a step, as published.
    """

    label: str
    name: str
    options: str
    bubble: tuple[Formula, ...]
    activations: tuple[Formula, ...]
    messages: tuple[Formula, ...] = ()


def _from_two_units(least: float | None, most: float | None, d: int, n: int) -> tuple[float | None, ...]:
    return (least, most) if n >= 2 * d else ()


def _bubble(text: str, x: Callable[[int, int], float], work: int) -> Formula:
    """Ours: x / (work N + x), with `work` forwards of a stage for each microbatch."""
    return Formula(f"x/({work}N+x), x={text}", lambda d, n: (x(d, n) / (work * n + x(d, n)),))


_TWO_CHUNKS = "(D-1)/(2N+D-1)"
_WAITS = "(D-1)/(N+D-1)"
_UNITS = "(D-2)/(3N+D-2)"
_one_chunk_bubble = Formula(_WAITS, lambda d, n: ((d - 1) / (n + d - 1),), "a")
_unit_bubble = Formula(_UNITS, lambda d, n: ((d - 2) / (3 * n + d - 2),), "a")
_concatenated = _bubble("(D-2)(N/D+1)", lambda d, n: (d - 2) * (n / d + 1), 6)
_unit_peak = Formula("(D+3)/2..D", lambda d, n: ((d + 3) / 2, d), "a")
_own_unit_peak = Formula("(3D+2)/4..D", lambda d, n: ((3 * d + 2) / 4, d))
_dapple_messages = Formula("2N+2(D-1)", lambda d, n: (2 * n + 2 * (d - 1),), "e")
_interleaved_messages = Formula("4N+4(D-1)", lambda d, n: (4 * n + 4 * (d - 1),), "e")
_chimera_messages = Formula("2N+2(D-1), and M_grad", _dapple_messages.of, "e")
_bitpipe_messages = Formula("4N+4(D-1), and M_grad", _interleaved_messages.of, "e")
_no_gap = Formula("0", lambda d, n: (0.0,) if n >= 2 * d else (), "f")
_start_alone = Formula("(D-1)/(3N+D-1)", lambda d, n: ((d - 1) / (3 * n + d - 1),))
_start_of_v = Formula("(D-1)/(6N+D-1)", lambda d, n: ((d - 1) / (6 * n + d - 1),))

ROWS = (
    Row("gpipe", "gpipe", "", (_one_chunk_bubble,), (Formula("N", lambda d, n: (n, n), "a"),)),
    Row(
        "1f1b",
        "1f1b",
        "",
        (_one_chunk_bubble,),
        (Formula("1..D", lambda d, n: (1, d), "a"),),
        (_dapple_messages,),
    ),
    Row(
        "bpipe",
        "bpipe",
        "",
        (Formula(_WAITS, _one_chunk_bubble.of),),
        (Formula("at most ceil((D+2)/2)", lambda d, n: (None, (d + 3) // 2), "c"),),
    ),
    Row(
        "interleaved_1f1b, v=2",
        "interleaved_1f1b",
        "num_chunks=2",
        (Formula(_TWO_CHUNKS, lambda d, n: ((d - 1) / (2 * n + d - 1),), "a"),),
        (
            Formula("(D+1)/2..D", lambda d, n: ((d + 1) / 2, d), "a"),
            Formula("from N=2D at most (3D-1)/2", lambda d, n: _from_two_units(None, (3 * d - 1) / 2, d, n), "d"),
        ),
        (_interleaved_messages,),
    ),
    Row(
        "breadth_first, v=2",
        "breadth_first",
        "num_chunks=2",
        (Formula(_TWO_CHUNKS, lambda d, n: ((d - 1) / (2 * n + d - 1),)),),
        (Formula("N", lambda d, n: (n, n)),),
    ),
    Row(
        "gems",
        "gems",
        "",
        (Formula("(D-1)(2N+1)/((2D+1)N+D-1)", lambda d, n: ((d - 1) * (2 * n + 1) / ((2 * d + 1) * n + d - 1),)),),
        (Formula("1", lambda d, n: (1, 1), "b"),),
    ),
    Row(
        "chimera",
        "chimera",
        "",
        (
            Formula("(D-2)/(3N/2+D-2)", lambda d, n: ((d - 2) / (1.5 * n + d - 2),), "a"),
            _bubble("(D-2)(N/D+1)", lambda d, n: (d - 2) * (n / d + 1), 3),
        ),
        (Formula("(D+2)/2..D", lambda d, n: ((d + 2) / 2, d), "a"),),
        (_chimera_messages,),
    ),
    Row(
        "chimera, forward doubling",
        "chimera",
        "forward_doubling=true",
        (Formula("(D-2)/(2N+D-2)", lambda d, n: ((d - 2) / (2 * n + d - 2),) if n % (2 * d) == 0 else (), "b"),),
        (
            Formula("at most 2D", lambda d, n: _from_two_units(None, 2 * d, d, n), "b"),
            Formula("(3D+2)/2..2D", lambda d, n: _from_two_units((3 * d + 2) / 2, 2 * d, d, n)),
        ),
    ),
    Row(
        "mixpipe, K=max",
        "mixpipe",
        "injected=max",
        (
            Formula(
                "(D-2)/(2N+D-2); at N=D (D-2)/(3N/2+D-2)",
                lambda d, n: ((d - 2) / ((2 if n >= 2 * d else 1.5) * n + d - 2),),
            ),
        ),
        (Formula("from N=2D at most (3D-2)/2", lambda d, n: _from_two_units(None, (3 * d - 2) / 2, d, n), "b"),),
    ),
    Row(
        "hanayo, one wave",
        "hanayo",
        "waves=1",
        (_bubble("2(D-1)", lambda d, n: 2 * (d - 1), 3),),
        (Formula("at most D", lambda d, n: (None, d)),),
    ),
    Row(
        "bitpipe, v=2",
        "bitpipe",
        "scaling=concatenate",
        (_unit_bubble, _concatenated),
        (_unit_peak, _own_unit_peak),
        (_bitpipe_messages,),
    ),
    Row(
        "bitpipe, the figure's order",
        "bitpipe",
        "scaling=figure",
        (_unit_bubble, _bubble("2(D-2)+(D-3)(N/D-1)", lambda d, n: 2 * (d - 2) + (d - 3) * (n / d - 1), 6)),
        (_unit_peak, _own_unit_peak),
        (_bitpipe_messages,),
    ),
    Row(
        "bitpipe, early forwarding",
        "bitpipe",
        "scaling=early_forwarding",
        (
            Formula("(D-2)/(4N+D-2)", lambda d, n: ((d - 2) / (4 * n + d - 2),), "a"),
            Formula(f"at N=D {_UNITS}", lambda d, n: () if n >= 2 * d else _unit_bubble.of(d, n)),
        ),
        (
            Formula("at most (3D-3)/2", lambda d, n: (None, (3 * d - 3) / 2), "a"),
            Formula("from N=2D at most (5D-2)/4", lambda d, n: (None, (5 * d - 2) / 4 if n >= 2 * d else d)),
        ),
        (_bitpipe_messages,),
    ),
    Row("bitpipe, without V", "bitpipe", "v_shape=false", (_concatenated,), (_own_unit_peak,)),
    Row(
        "zb_h1",
        "zb_h1",
        "",
        (Formula("(D-1)/(3N+D-1)", _start_alone.of, "f"),),
        (Formula("D", lambda d, n: (d, d), "f"),),
    ),
    Row(
        "zb_h2",
        "zb_h2",
        "",
        (_no_gap, _start_alone),
        (
            Formula("about 2D-1", lambda d, n: _from_two_units(2 * d - 1, 2 * d - 1, d, n), "f"),
            Formula("at N=D N", lambda d, n: () if n >= 2 * d else (n, n)),
        ),
    ),
    Row("zb_v", "zb_v", "", (_no_gap, _start_of_v), (Formula("at most D", lambda d, n: (None, d), "f"),)),
    Row(
        "v_half",
        "v_half",
        "",
        (
            Formula("about D/(2N)", lambda d, n: (d / (2 * n),), "g"),
            _bubble("3D-7 for even D", lambda d, n: 3 * d - 7, 6),
        ),
        (Formula("floor((D+2)/2)", lambda d, n: ((d + 2) // 2,), "g"),),
    ),
    Row(
        "v_min",
        "v_min",
        "",
        (
            Formula("about 2D/(3N)", lambda d, n: (2 * d / (3 * n),), "g"),
            _bubble("4D-7, 4D-5, 4D-9 for D mod 3 = 0, 1, 2", lambda d, n: 4 * d - (7, 5, 9)[d % 3], 6),
        ),
        (Formula("floor((D+4)/3)", lambda d, n: ((d + 4) // 3,), "g"),),
    ),
    Row(
        "dualpipe",
        "dualpipe",
        "",
        (
            Formula("(D-2)/(3N+D-2)", lambda d, n: _unit_bubble.of(d, n) if n >= 2 * d else (), "h"),
            Formula("(D-2)/(6N+D-2)", lambda d, n: ((d - 2) / (6 * n + d - 2),)),
        ),
        (
            Formula("D+1", lambda d, n: _from_two_units(d + 1, d + 1, d, n), "h"),
            Formula("at N=D N", lambda d, n: () if n >= 2 * d else (n, n)),
        ),
    ),
    Row(
        "dualpipe_v",
        "dualpipe_v",
        "",
        (
            Formula("(D-1)/(3N+D-1)", lambda d, n: _start_alone.of(d, n) if n >= 2 * d else (), "h"),
            _start_of_v,
        ),
        (
            Formula("D+1/2", lambda d, n: _from_two_units(d + 1 / 2, d + 1 / 2, d, n), "h"),
            Formula("at N=D N", lambda d, n: () if n >= 2 * d else (n, n)),
        ),
    ),
)
