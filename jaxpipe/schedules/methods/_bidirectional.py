"""The closed form that Chimera and BitPipe share: microbatches in both directions, with a time slot for each action.

A microbatch is a chain of passes, each D steps from one end of the devices to the other: forwards of one
chunk, or backwards of one chunk. Goes in: a placement of two mirrored replicas and the passes of a chain. Comes
out: rows of F and B. The generators say which passes a chain has, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from jaxpipe.schedules.ordering.whole_backwards import (
    JobOrder,
    Preference,
    best_job_order,
    job_order,
    machines_of,
    num_jobs_of,
    rows_of_jobs,
)
from jaxpipe.schedules.passes.rows import drop_padding
from jaxpipe.schedules.placement import Placement, bidirectional, zig_zag
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
        passes: the passes of one chain, in order; microbatches of a chain are numbered 0, 1, ...
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


# Early forwarding: forwards of later microbatches run where concatenated units would have bubbles


_SEARCHED_UNITS = 4  # units of D microbatches on which preferences are compared; the best is then used for all
_CAPS = 32  # that are tried, from one D Ma to the next, at most


def early_forwarding(*, num_devices: int, num_chunks: int, num_microbatches: int) -> Rows:
    """Returns the rows of BitPipe with early forwarding, without SYNC.

    D=4, v=1, N=8 (the rows of devices 2 and 3 mirror these):

        0  0F0 0F1   0F4 3F2@1 3B2@1 3F3@1 3B3@1 0F5   0B0   3F6@1 3B6@1 0B1   3F7@1 3B7@1 0B4   0B5
        1  1F0 2F2@1 1F1 2F3@1 1F4   2B2@1 1B0   2F6@1 2B3@1 1F5   1B1   2F7@1 2B6@1 1B4   2B7@1 1B5

    Bubble at a backward of two forwards and N >= 2D: 3(D-2)/2 forwards of a stage, a ratio of (D-2)/(2vN+D-2), the
    paper's (D-2)/(4N+D-2) for v=2. No order of two replicas in opposite directions has less: the devices in the middle
    can start D/2-1 forwards after those at the ends, from where all microbatches come, and must end D/2-1 backwards
    before them. Up to N=D it is the one unit of `bitpipe`, with 2(D-2) at N=D.

    Peak activations for v=2 and N >= 2D: (5D-2)/4 Ma for even D from 4 to 16, which is the paper's (3D-3)/2 at D=4 and
    less from D=6 on; (3D-2)/2 for v=1; up to about 1.7 D for v=4. These describe what the search finds; none is proved.

    After about D microbatches of either direction and before the last D, the pattern repeats: for v=2 and D=4, 8, 12,
    16 with every microbatch of a direction, 12 forwards of a stage apart; in other cases with every few of them.

    How it is found: a free device takes, of the steps that are ready, the one that would start first if microbatches
    of a direction started s forwards apart and never waited, with backwards shifted by a constant. It starts one of the
    first p forwards of a microbatch only while it stores fewer than c stages' activations. Of several s, p, c and
    constants the one with the least bubble is taken, and of equal ones that with the least peak. The search is
    deterministic.

    Args:
        num_devices: D, even.
        num_chunks: v, stages of each replica on each device; replicas are V-shaped.
        num_microbatches: any number.

    Returns:
        [device][position] -> F or B; device D-1-d does for one replica what d does for the other, at the same time.

    Source: the idea, the bubble and the paper's peak: Wu, Chen and Yu, BitPipe, arXiv 2410.19367, appendix B. Their
    order is in a figure that was not at hand; this order and its peaks are ours.
    """
    placement = bidirectional(zig_zag(num_devices, num_chunks))
    if num_microbatches <= num_devices:
        unit = bidirectional_rows(placement, round_trip(num_chunks), num_units=1)
        return drop_padding(unit, num_microbatches=num_microbatches)
    machine_of, num_jobs = machines_of(placement), num_jobs_of(placement, num_microbatches)
    searched = min(num_jobs, _SEARCHED_UNITS * num_devices // 2)
    order = _best_order(machine_of, searched, num_chunks)
    if order and searched < num_jobs:
        order = job_order(machine_of, num_jobs, order.preference, most_idle=order.idle)
        order = order or _best_order(machine_of, num_jobs, num_chunks)
    # A cap on the first D/2 operations stops nothing: where the earliest job that has not ended has such an operation
    # before it, no later job has started, so that nothing is held.
    assert order
    return rows_of_jobs(order.rows, placement, num_microbatches=num_microbatches)


@lru_cache(maxsize=64)  # the same for any larger number of microbatches
def _best_order(machine_of: tuple[int, ...], num_jobs: int, num_chunks: int) -> JobOrder | None:
    """The best order of so many jobs, of all preferences."""
    num_devices = len(machine_of) // num_chunks
    preferences = _preferences(num_devices, num_chunks)
    return best_job_order(machine_of, num_jobs, preferences, least_idle=3 * (num_devices - 2) // 2)


def _preferences(num_devices: int, num_chunks: int) -> list[Preference]:
    """Returns the preferences that are tried, lower caps first."""
    num_stages = num_chunks * num_devices
    caps = range(4 * num_stages // 5, 3 * num_stages // 2 + 3, max(num_stages // _CAPS, 1))
    nums_capped = sorted({num_devices // 2, num_devices, num_stages // 2, num_stages})
    return [
        Preference(spacing, 2, delay, cap, num_capped)
        for cap, spacing, delay, num_capped in product(caps, (3, 2, 4), (-2, 0), nums_capped)
    ]
