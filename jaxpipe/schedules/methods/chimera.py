"""Chimera: two replicas in opposite directions, whose bubbles fill each other; and the closed form that BitPipe shares.

In the closed form every action has a time slot. A microbatch is a chain of passes, each D steps from one end of the
devices to the other: forwards of one chunk, or backwards of one chunk. Goes in: a placement of two mirrored replicas
and the passes of a chain. Comes out: rows of F and B. The generators say which passes a chain has, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.schedules.methods.method import BITPIPE_TEXT, TABLE_2, TABLE_6, Formula, Method, idle_ratio
from jaxpipe.schedules.methods.option import Option, check_truth
from jaxpipe.schedules.passes.rows import drop_padding, next_multiple, with_sync
from jaxpipe.schedules.placement import Placement, bidirectional, linear
from jaxpipe.schedules.schedule import Action, Kind, Rows, Schedule


class Pass(NamedTuple):
    """One traversal of all devices by a microbatch."""

    kind: Kind  # F, with stages rising, or B, with stages falling
    chunk: int  # index of a stage among those of a device and replica, in forward order
    members: tuple[int, ...] = (0,)  # microbatches of the chain that run it, one directly after the other


def round_trip(num_chunks: int) -> tuple[Pass, ...]:
    """Returns the passes of one microbatch: forwards of all chunks, then backwards of all chunks."""
    chunks = range(num_chunks)
    return (*(Pass(Kind.F, chunk) for chunk in chunks), *(Pass(Kind.B, chunk) for chunk in reversed(chunks)))


def bidirectional_rows(
    placement: Placement, passes: Sequence[Pass], *, num_units: int, early_starts: bool = False
) -> Rows:
    """Returns rows in which each unit starts D/2 chains in either direction, and closely follows the unit before.

    Step q of pass k of chain i of a unit has slot 2i + kD + q, in both directions, and each unit starts
    `len(passes)` D slots after the one before. A device's row is its actions by slot.

    No two passes share a slot on a device. At step q a pass is on device q or D-1-q. Two passes that are on a
    device at different steps, q and D-1-q, have slots that differ by an odd number, for D is even. Two that are
    there at the same step have a slot in common only if 2(i-j) is a multiple of D, so that i = j and k are the same;
    then they are one pass in both directions, and at any step those are on different devices.

    Args:
        placement: two mirrored replicas on an even number D of devices, whose chunks are each D stages long.
        passes: the passes of one chain, in order; microbatches of a chain are numbered 0, 1, ...
        num_units: groups of D chains; of the microbatches of each group the first half go down (replica 0).
        early_starts: in every unit but the first, the first half of chain i's first pass comes i slots earlier:
            two starts, not one, in each gap that the end of the unit before leaves on the outer devices. Where
            actions then share a slot, forwards and lower chains go first.

    Source: ours, for the order that BitPipe (Wu et al., arXiv 2410.19367) and Chimera (Li and Hoefler, SC 2021)
    give by figures; equal to the lists of BitPipe's published code for D=4 and D=8.
    """
    num_devices = placement.num_devices
    half = num_devices // 2
    runs = [
        (index, traversal.kind, traversal.chunk, member)
        for index, traversal in enumerate(passes)
        for member in traversal.members
    ]
    index_of, kind_of, chunk_of, member_of = np.array(runs).T  # [run] a pass of one microbatch of a chain
    # All actions at once, one entry each: a unit's chains in both directions, the runs of a chain, and their D steps.
    unit, replica, chain, run, step = np.indices((num_units, 2, half, len(runs), num_devices)).reshape(5, -1)

    # F goes from the first device of its direction to the last, B back.
    kind = kind_of[run]
    stage = num_devices * chunk_of[run] + np.where(kind == Kind.F, step, num_devices - 1 - step)
    chain_length = 1 + member_of.max()
    # Of each unit the first half of the chains goes down, so its microbatches have the lower numbers.
    microbatch = chain_length * (num_devices * unit + half * replica + chain) + member_of[run]
    slot = num_devices * (len(passes) * unit + index_of[run]) + 2 * chain + step
    if early_starts:
        slot -= chain * ((unit > 0) & (index_of[run] == 0) & (step < half))

    device = np.array(placement.devices)[replica, stage]
    # The last key counts first. Slots are unique but for doubled forwards and early starts, which the others order.
    order = np.lexsort((microbatch, chain, kind, slot, device))
    kinds = map(list(Kind).__getitem__, kind[order].tolist())
    actions = tuple(map(Action, kinds, *(field[order].tolist() for field in (stage, microbatch, replica))))
    # Every device has equally many actions, as every device holds equally many chunks.
    row_length = len(actions) // num_devices
    return tuple(actions[first : first + row_length] for first in range(0, len(actions), row_length))


# Two forwards side by side take as long as the backward that they stand beside.
_DOUBLED = (Pass(Kind.F, 0, (0, 1)), Pass(Kind.B, 0, (0,)), Pass(Kind.B, 0, (1,)))


def chimera(
    *, num_devices: int, num_microbatches: int, forward_doubling: bool = False, eager_sync: bool = True
) -> Schedule:
    """Returns Chimera: units of D microbatches, half of them down and half up, concatenated directly.

    D=4, N=4, backward twice the forward:

        0  0F0   0F1   ...   3F2@1 3B2@1 3B2@1 3F3@1 3B3@1 3B3@1 ...   0B0   0B0   ...   ...   0B1   0B1
        1  ...   1F0   2F2@1 1F1   2F3@1 ...   2B2@1 2B2@1 1B0   1B0   2B3@1 2B3@1 1B1   1B1   ...   ...
        2  ...   1F2@1 2F0   1F3@1 2F1   ...   2B0   2B0   1B2@1 1B2@1 2B1   2B1   1B3@1 1B3@1 ...   ...
        3  0F2@1 0F3@1 ...   3F0   3B0   3B0   3F1   3B1   3B1   ...   0B2@1 0B2@1 ...   ...   0B3@1 0B3@1

    Bubble ratio at N=D: (D-2)/(3N/2+D-2) at a backward of two forwards, (D-2)/(2N+D-2) at one of one forward. At
    N=KD the second holds as it is. The first becomes x/(3N+x) with x = (D-2)(K+1), because each unit keeps the bubble
    in its middle. Peak activations at every N=KD: D Ma on the two devices in the middle, (D+2)/2 Ma on those at the
    ends. Two replicas of the weights.

    With `forward_doubling` a unit has 2D microbatches, and those of a direction run their forwards in adjacent pairs.
    Two forwards take as long as the backward beside them, so the bubble in the middle disappears. Bubble ratio
    (D-2)/(2N+D-2) at a backward of two forwards and N a multiple of 2D; peak activations 2D Ma in the middle,
    (3D+2)/2 Ma at the ends.

    Needs even D, any N >= 1. Where N is not a whole number of units, the last unit is built whole, and its surplus
    microbatches are dropped from both directions in turn.

    Args:
        forward_doubling: run forwards in pairs.
        eager_sync: each SYNC directly behind the last backward of its stage and replica, not at the end of the row.

    Source: Li and Hoefler, Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines, SC
    2021, sections 3.1 and 3.5; formulas at N=D as in BitPipe, arXiv 2410.19367, Table 2, those at N=KD and of forward
    doubling ours.
    """
    placement = bidirectional(linear(num_devices))
    passes = _DOUBLED if forward_doubling else round_trip(1)
    unit = num_devices * (2 if forward_doubling else 1)
    rows = bidirectional_rows(placement, passes, num_units=next_multiple(num_microbatches, unit) // unit)
    rows = drop_padding(rows, num_microbatches=num_microbatches)
    return Schedule("chimera", placement, num_microbatches, with_sync(rows, placement, eager=eager_sync))


METHOD = Method(
    name="chimera",
    generator=chimera,
    summary="two replicas, down and up at the same time: one fills the other's bubbles",
    paper="Li and Hoefler, Chimera, SC 2021",
    options=(Option("forward_doubling", check_truth, values=(False, True)), Option("eager_sync", check_truth)),
    even_devices=True,
    period=lambda num_devices, options: (2 if options["forward_doubling"] else 1) * num_devices,
    num_replicas=2,
    bubble=(
        Formula(
            "(D-2)/(3N/2+D-2)",
            lambda d, n, o: None if o["forward_doubling"] else (d - 2) / (1.5 * n + d - 2),
            where="published for all N, true for N = D",
            source=TABLE_2,
            holds=False,
        ),
        Formula(
            "x/(3N+x), x=(D-2)(N/D+1)",
            lambda d, n, o: None if o["forward_doubling"] or n % d else idle_ratio((d - 2) * (n / d + 1), n),
            where="N a multiple of D",
        ),
        Formula(
            "(D-2)/(2N+D-2)",
            lambda d, n, o: (d - 2) / (2 * n + d - 2) if o["forward_doubling"] and n % (2 * d) == 0 else None,
            where="forward_doubling, N a multiple of 2D",
            source=BITPIPE_TEXT,
        ),
    ),
    peak=(
        Formula(
            "(D+2)/2..D",
            lambda d, n, o: None if o["forward_doubling"] or n % d else ((d + 2) / 2, d),
            where="N a multiple of D",
            source=TABLE_2,
        ),
        Formula(
            "at most 2D",
            lambda d, n, o: (None, 2 * d) if o["forward_doubling"] and n >= 2 * d else None,
            where="forward_doubling, N a multiple of 2D",
            source=BITPIPE_TEXT,
            holds=False,
        ),
        Formula(
            "(3D+2)/2..2D",
            lambda d, n, o: ((3 * d + 2) / 2, 2 * d) if o["forward_doubling"] and n % (2 * d) == 0 else None,
            where="forward_doubling, N a multiple of 2D",
        ),
    ),
    messages=(
        Formula(
            "2N+2(D-1), and M_grad",
            lambda d, n, o: None if o["forward_doubling"] else 2 * n + 2 * (d - 1),
            source=TABLE_6,
        ),
    ),
)
