"""The closed form that Chimera and BitPipe share: microbatches in both directions, with a time slot for each action.

A microbatch is a chain of passes, each D steps from one end of the devices to the other: forwards of one
chunk, or backwards of one chunk. Goes in: a placement of two mirrored replicas and the passes of a chain. Comes
out: rows of F and B. The generators say which passes a chain has, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Action, Kind, Rows


class Pass(NamedTuple):
    """One traversal of all devices by a microbatch.

    Attributes:
        kind: F, with stages rising, or B, with stages falling.
        chunk: index of a stage among those of a device and replica, in forward order.
        members: microbatches of the chain that run it, one directly after the other.
    """

    kind: Kind
    chunk: int
    members: tuple[int, ...] = (0,)


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
        passes: of one chain, in order; microbatches of a chain are numbered 0, 1, ...
        num_units: groups of D chains; of the microbatches of each group the first half go down (replica 0).
        early_starts: in every unit but the first, the first half of chain i's first pass comes i slots earlier:
            two starts, not one, in each gap that the end of the unit before leaves on the outer devices. Where
            actions then share a slot, forwards and lower chains go first.

    Returns:
        [device][position] -> F or B.

    Source: ours, for the order that BitPipe (Wu et al., arXiv 2410.19367) and Chimera (Li and Hoefler, SC 2021)
    give by figures; equal to the lists of BitPipe's published code for D=4 and D=8.
    """
    num_devices = placement.num_devices
    half = num_devices // 2
    runs = [(index, *one[:2], member) for index, one in enumerate(passes) for member in one.members]
    index_of, kind_of, chunk_of, member_of = np.array(runs).T  # [run] a pass of one microbatch of a chain
    unit, replica, chain, run, step = np.indices((num_units, 2, half, len(runs), num_devices)).reshape(5, -1)

    kind = kind_of[run]
    stage = num_devices * chunk_of[run] + np.where(kind == Kind.F, step, num_devices - 1 - step)
    chain_length = 1 + member_of.max()
    microbatch = chain_length * (num_devices * unit + half * replica + chain) + member_of[run]
    slot = num_devices * (len(passes) * unit + index_of[run]) + 2 * chain + step
    if early_starts:
        slot -= chain * ((unit > 0) & (index_of[run] == 0) & (step < half))

    device = np.array(placement.devices)[replica, stage]
    order = np.lexsort((microbatch, chain, kind, slot, device))
    kinds = map(list(Kind).__getitem__, kind[order].tolist())
    actions = tuple(map(Action, kinds, *(field[order].tolist() for field in (stage, microbatch, replica))))
    row_length = len(actions) // num_devices
    return tuple(actions[first : first + row_length] for first in range(0, len(actions), row_length))
