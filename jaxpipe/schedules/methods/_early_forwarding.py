"""BitPipe's early forwarding: forwards of later microbatches run where concatenated units would have bubbles."""

from __future__ import annotations

from itertools import product

from jaxpipe.schedules.methods._bidirectional import bidirectional_rows, round_trip
from jaxpipe.schedules.ordering.whole_backwards import (
    Preference,
    best_job_order,
    job_order,
    machines_of,
    num_jobs_of,
    rows_of_jobs,
)
from jaxpipe.schedules.passes.rows import drop_padding
from jaxpipe.schedules.placement import bidirectional, zig_zag
from jaxpipe.schedules.schedule import Rows

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
    least_idle = 3 * (num_devices - 2) // 2
    searched = min(num_jobs, _SEARCHED_UNITS * num_devices // 2)
    preferences = _preferences(num_devices, num_chunks)
    order = best_job_order(machine_of, searched, preferences, least_idle=least_idle)
    if order and searched < num_jobs:
        order = job_order(machine_of, num_jobs, order.preference, most_idle=order.idle)
        order = order or best_job_order(machine_of, num_jobs, preferences, least_idle=least_idle)
    # A cap on the first D/2 operations stops nothing: where the earliest job that has not ended has such an operation
    # before it, no later job has started, so that nothing is held.
    assert order
    return rows_of_jobs(order.rows, placement, num_microbatches=num_microbatches)


def _preferences(num_devices: int, num_chunks: int) -> list[Preference]:
    """Returns the preferences that are tried, lower caps first."""
    num_stages = num_chunks * num_devices
    caps = range(4 * num_stages // 5, 3 * num_stages // 2 + 3, max(num_stages // _CAPS, 1))
    nums_capped = sorted({num_devices // 2, num_devices, num_stages // 2, num_stages})
    return [
        Preference(spacing, 2, delay, cap, num_capped)
        for cap, spacing, delay, num_capped in product(caps, (3, 2, 4), (-2, 0), nums_capped)
    ]
