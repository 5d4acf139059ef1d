"""BitPipe: interleaved pipelines in a V, in opposite directions, whose bubbles fill each other."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.methods.chimera import bidirectional_rows, round_trip
from jaxpipe.schedules.methods.method import TABLE_2, TABLE_6, Formula, Method, idle_ratio
from jaxpipe.schedules.methods.option import Option, Options, at_least, check_truth, one_of
from jaxpipe.schedules.ordering.whole_backwards import (
    JobOrder,
    Preference,
    best_job_order,
    job_order,
    machines_of,
    num_jobs_of,
    rows_of_jobs,
)
from jaxpipe.schedules.passes.rows import drop_padding, next_multiple, with_sync
from jaxpipe.schedules.placement import bidirectional, looped, zig_zag
from jaxpipe.schedules.schedule import Rows, Schedule

SCALINGS = ("concatenate", "figure", "early_forwarding")


def bitpipe(
    *,
    num_devices: int,
    num_microbatches: int,
    num_chunks: int = 2,
    v_shape: bool = True,
    eager_sync: bool = True,
    scaling: str = "concatenate",
) -> Schedule:
    """Returns BitPipe: Chimera whose replicas run up and down the devices, a chunk each way.

    D=4, v=2, N=4, without the SYNCs:

        0  0F0 0F1 3F2@1 4F2@1 3F3@1 4F3@1 7F0 7B0 7F1 7B1 4B2@1 3B2@1 4B3@1 3B3@1 0B0 0B1
        1  1F0 2F2@1 1F1 2F3@1 5F2@1 6F0 5F3@1 6F1 6B0 5B2@1 6B1 5B3@1 2B2@1 1B0 2B3@1 1B1
        2  1F2@1 2F0 1F3@1 2F1 5F0 6F2@1 5F1 6F3@1 6B2@1 5B0 6B3@1 5B1 2B0 1B2@1 2B1 1B3@1
        3  0F2@1 0F3@1 3F0 4F0 3F1 4F1 7F2@1 7B2@1 7F3@1 7B3@1 4B0 3B0 4B1 3B1 0B2@1 0B3@1

    Bubble ratio at N=D: (D-2)/(1.5vN+D-2) at a backward of two forwards, which is Table 2's (D-2)/(3N+D-2) for v=2,
    and (D-2)/(2vN+D-2) at one of one forward. Peak activations D Ma on the two devices in the middle, D - (D-2)/(2v) Ma
    on those at the ends; Table 2's (D+3)/2 for the ends is that of v=2 at D=4 only. Two replicas of the weights. With
    v=1 it is Chimera.

    For N=KD there are three orders. x is the bubble in forwards of a stage, at a backward of two forwards: the bubble
    ratio is x/(3vN+x).

    - `concatenate`: unit after unit, as in the paper's published code: x = (D-2)(K+1). At a backward of one
      forward still (D-2)/(2vN+D-2).
    - `figure`: the outer devices start the microbatches of the next unit sooner, as the paper's figure for D=4, N=8
      does: x = 2(D-2) + (D-3)(K-1) from D=4 on, with the same peaks. Never worse at a backward of two forwards or more;
      worse at one of one forward, where `concatenate` leaves no bubble between units.
    - `early_forwarding`: as `early_forwarding` below says; higher peaks.

    The paper's formula for all N counts x = 2(D-2) once. Concatenated units do not reach it.

    Needs even D, any N >= 1, any v >= 1. Where N is not a multiple of D, the last unit is built whole, and its surplus
    microbatches are dropped from both directions in turn.

    Args:
        num_chunks: v, stages of each replica on each device.
        v_shape: chunks run up and down the devices in turn, so that the last stage of one and the first of the next
            are on one device; False starts each chunk on the replica's first device again (the paper's ablation): the
            same time slots, but a message where the V has none.
        eager_sync: each SYNC directly behind the last backward of its stage and replica, not at the end of the row.
        scaling: the order of more than D microbatches: `concatenate`, `figure` or `early_forwarding`.

    Source: Wu, Chen and Yu, BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
    Training, arXiv 2410.19367, sections 3.1 to 3.3, appendices A and B; formulas of the peaks and of N=KD ours.
    """
    placement = bidirectional((zig_zag if v_shape else looped)(num_devices, num_chunks))
    if scaling == "early_forwarding":
        rows = early_forwarding(num_devices=num_devices, num_chunks=num_chunks, num_microbatches=num_microbatches)
    else:
        num_units = next_multiple(num_microbatches, num_devices) // num_devices
        passes = round_trip(num_chunks)
        rows = bidirectional_rows(placement, passes, num_units=num_units, early_starts=scaling == "figure")
        rows = drop_padding(rows, num_microbatches=num_microbatches)
    return Schedule("bitpipe", placement, num_microbatches, with_sync(rows, placement, eager=eager_sync))


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
    less from D=6 on; (3D-2)/2 for v=1; up to about 1.7 D for v=4. These peaks describe what the search finds; none is
    proved.

    After about D microbatches of either direction and before the last D, the pattern repeats: for v=2 and D=4, 8, 12,
    16 with every microbatch of a direction, 12 forwards of a stage apart; in other cases with every few of them.

    How it is found: a free device takes, of the steps that are ready, the one that would start first if microbatches of
    a direction started s forwards apart and never waited, with backwards shifted by a constant. A device starts one of
    the first p forwards of a microbatch only while it stores fewer than c stages' activations. Of several s, p, c and
    constants the one with the least bubble is taken, and of equal ones that with the least peak. The search is
    deterministic.

    Args:
        num_devices: D, even.
        num_chunks: v, stages of each replica on each device; replicas are V-shaped.

    Returns:
        [device][position] -> F or B; device D-1-d does for one replica what d does for the other, at the same time.

    Source: the idea, the bubble and the paper's peak: Wu, Chen and Yu, BitPipe, arXiv 2410.19367, appendix B. Their
    order is in a figure that was not at hand; this order and its peaks are ours.
    """
    placement = bidirectional(zig_zag(num_devices, num_chunks))
    # In a single unit nothing comes later that could be pulled forward.
    if num_microbatches <= num_devices:
        unit = bidirectional_rows(placement, round_trip(num_chunks), num_units=1)
        return drop_padding(unit, num_microbatches=num_microbatches)
    machine_of = machines_of(placement)
    num_jobs = num_jobs_of(placement, num_microbatches)
    searched = min(num_jobs, _SEARCHED_UNITS * num_devices // 2)
    order = _best_order(machine_of, searched, num_chunks)
    # The pattern repeats, so the preference that is best for a few units is used for all of them.
    if order and searched < num_jobs:
        order = job_order(machine_of, num_jobs, order.preference, most_idle=order.idle)
        # A preference that is best for a few units may leave more idle time on many; then all are compared.
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
    # From 0.8 D Ma to 1.5 D Ma and a little, in stages' activations; whole units store D Ma.
    caps = range(4 * num_stages // 5, 3 * num_stages // 2 + 3, max(num_stages // _CAPS, 1))
    nums_capped = sorted({num_devices // 2, num_devices, num_stages // 2, num_stages})
    return [
        Preference(spacing, 2, delay, cap, num_capped)
        for cap, spacing, delay, num_capped in product(caps, (3, 2, 4), (-2, 0), nums_capped)
    ]


def _check(num_devices: int, options: Options) -> None:
    if options["v_shape"]:
        return
    if options["num_chunks"] == 1:
        raise ScheduleError(
            "v_shape=False for schedule 'bitpipe' with num_chunks=1.",
            rule="shape-binds: one chunk on each device has no V to do without",
            repair="leave v_shape out, or set num_chunks=2 or more",
        )
    if options["scaling"] == "early_forwarding":
        raise ScheduleError(
            "v_shape=False for schedule 'bitpipe' with scaling='early_forwarding'.",
            rule="early-forwarding-v: forwards are pulled ahead on chunks that run up and down the devices in turn",
            repair="leave v_shape out, or set scaling=concatenate",
        )


def _published(d: int, n: int, o: Options) -> float | None:
    if o["scaling"] == "early_forwarding" or not o["v_shape"]:
        return None
    # Table 2 has 3N for v=2; 1.5vN is the same for any v.
    return (d - 2) / (1.5 * o["num_chunks"] * n + d - 2)


def _bubble(d: int, n: int, o: Options) -> float | None:
    """The bubble of whole units: 2(D-2) forwards of a stage, and for each further unit D-2 more, D-3 by the figure."""
    per_unit = d - 3 if o["scaling"] == "figure" and d >= 4 else d - 2
    return idle_ratio(2 * (d - 2) + per_unit * (n / d - 1), n, o["num_chunks"]) if n % d == 0 else None


def _published_early(d: int, n: int, o: Options) -> float | None:
    return (d - 2) / (2 * o["num_chunks"] * n + d - 2) if o["scaling"] == "early_forwarding" else None


def _early_bubble(d: int, n: int, o: Options) -> float | None:
    """The bubble of early forwarding; in a single unit there is nothing to pull forward."""
    if o["scaling"] != "early_forwarding" or n % d or (n > d and d > 8):
        return None
    return _bubble(d, n, o) if n == d else _published_early(d, n, o)


def _peak_of_units(d: int, n: int, o: Options) -> tuple[float | None, float] | None:
    if n % d or (n > d and o["scaling"] == "early_forwarding"):
        return None
    # With one chunk early starts raise the peak of the outer devices above the formula.
    more_at_ends = o["scaling"] == "figure" and o["num_chunks"] == 1  # on many devices
    return None if more_at_ends else d - (d - 2) / (2 * o["num_chunks"]), d


def _two_chunks(of):
    """Limits a formula to v=2, as the paper's tables are."""
    # Table 2 is of two chunks alone.
    return lambda d, n, o: of(d, n, o) if o["num_chunks"] == 2 else None


METHOD = Method(
    name="bitpipe",
    generator=bitpipe,
    summary="Chimera with v stages of each replica on each device, in a V",
    paper="Wu, Chen and Yu, BitPipe, arXiv 2410.19367",
    options=(
        Option("num_chunks", at_least(1), values=(1, 2, 3, 4), multiplies=True, note="v"),
        Option("v_shape", check_truth),
        Option("eager_sync", check_truth),
        # The planner leaves early forwarding, which takes a search of seconds, and the figure's order, whose rounds do
        # not repeat unit by unit, so that permutes are three times as many.
        Option(
            "scaling", one_of(SCALINGS), values=SCALINGS, planned=SCALINGS[:1], note="or `figure`, `early_forwarding`"
        ),
    ),
    even_devices=True,
    check=_check,
    period=lambda num_devices, options: num_devices,
    num_replicas=2,
    bubble=(
        Formula(
            "(D-2)/(1.5vN+D-2)", _published, where="published for all N, true for N = D", source=TABLE_2, holds=False
        ),
        Formula(
            "x/(3vN+x), x=(D-2)(N/D+1)",
            lambda d, n, o: _bubble(d, n, o) if o["scaling"] == "concatenate" else None,
            where="scaling=concatenate, N a multiple of D",
        ),
        Formula(
            "x/(3vN+x), x=2(D-2)+(D-3)(N/D-1)",
            lambda d, n, o: _bubble(d, n, o) if o["scaling"] == "figure" else None,
            where="scaling=figure, N a multiple of D",
        ),
        Formula("(D-2)/(2vN+D-2)", _published_early, where="scaling=early_forwarding", source=TABLE_2, holds=False),
        Formula(
            "at N=D (D-2)/(1.5vN+D-2)",
            _early_bubble,
            where="scaling=early_forwarding, N a multiple of D; the published one from N = 2D on, for D to 8",
        ),
    ),
    peak=(
        Formula(
            "(D+3)/2..D",
            _two_chunks(
                lambda d, n, o: ((d + 3) / 2, d) if o["v_shape"] and o["scaling"] != "early_forwarding" else None
            ),
            where="v=2; true for D = 4",
            source=TABLE_2,
            holds=False,
        ),
        Formula(
            "at most (3D-3)/2",
            _two_chunks(lambda d, n, o: (None, (3 * d - 3) / 2) if o["scaling"] == "early_forwarding" else None),
            where="v=2, scaling=early_forwarding; true for D = 4",
            source=TABLE_2,
            holds=False,
        ),
        Formula("D-(D-2)/(2v)..D", _peak_of_units, where="N a multiple of D; with early_forwarding N = D"),
        Formula(
            "from N=2D at most (5D-2)/4",
            _two_chunks(
                lambda d, n, o: (None, (5 * d - 2) / 4) if o["scaling"] == "early_forwarding" and n >= 2 * d else None
            ),
            where="v=2, scaling=early_forwarding, N >= 2D, D from 4 to 16",
        ),
    ),
    messages=(
        Formula(
            "4N+4(D-1), and M_grad",
            _two_chunks(lambda d, n, o: 4 * n + 4 * (d - 1) if o["v_shape"] else None),
            where="v=2",
            source=TABLE_6,
        ),
    ),
)
