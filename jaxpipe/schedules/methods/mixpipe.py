"""MixPipe: two pipelines in opposite directions that start as many microbatches as memory allows."""

from __future__ import annotations

from itertools import product

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.methods.method import BITPIPE_TEXT, Formula, Method
from jaxpipe.schedules.methods.option import Option, Options, check_truth, left_to_the_method
from jaxpipe.schedules.ordering.whole_backwards import (
    Preference,
    best_job_order,
    machines_of,
    num_jobs_of,
    rows_of_jobs,
)
from jaxpipe.schedules.passes.rows import with_sync
from jaxpipe.schedules.placement import bidirectional, linear
from jaxpipe.schedules.schedule import Schedule

LEAST_INJECTED = 2  # one of either direction


def mixpipe(
    *, num_devices: int, num_microbatches: int, injected: int | str = "max", eager_sync: bool = True
) -> Schedule:
    """Returns Chimera's two pipelines, kept running by up to K microbatches on a device.

    D=4, N=6, without the SYNCs:

        0  0F0   0F1   0F4   3F2@1 3B2@1 3F3@1 3B3@1 3F5@1 3B5@1 0B0   0B1   0B4
        1  1F0   2F2@1 1F1   2F3@1 1F4   2B2@1 2F5@1 1B0   2B3@1 1B1   2B5@1 1B4
        2  1F2@1 2F0   1F3@1 2F1   1F5@1 2B0   2F4   1B2@1 2B1   1B3@1 2B4   1B5@1
        3  0F2@1 0F3@1 0F5@1 3F0   3B0   3F1   3B1   3F4   3B4   0B2@1 0B3@1 0B5@1

    Bubble at a backward of two forwards and N >= 2D, in forwards of a stage: 3(D-2)/2 for the most K that there is,
    (3D-2)/2, whatever N, against (D-2)(N/D+1) of Chimera's units; a ratio of (D-2)/(2N+D-2). No order of two replicas
    in opposite directions has less: the devices in the middle can start D/2-1 forwards after those at the ends, from
    where all microbatches come, and must end D/2-1 backwards before them. From K=D on it is 3D-4-K, for all even D to
    16; below, it grows with N, faster for smaller K. At N=D it is Chimera's 2(D-2), and K >= D has no effect. Peak
    activations at most K Ma; for the largest K and N >= 2D they are (3D-2)/2, the peak that BitPipe's authors give for
    MixPipe. Two replicas of the weights. Needs even D, any N >= 1.

    The published abstract says that MixPipe regulates how many microbatches are injected at the beginning, to balance
    how busy devices and pipelines are against memory; the exact rule is not public. Our reading: K is the most
    microbatches, of both directions, that a device may store. A device that could start several actions follows a
    `Preference` of the list scheduler. Of several preferences the one with the least bubble is taken, and of equal ones
    that with the least peak. Both directions do the same at the same time.

    Args:
        injected: K, or "max" for (3D-2)/2.
        eager_sync: each SYNC directly behind the last backward of its stage and replica, not at the end of the row.

    Source: Zhang et al., MixPipe: Efficient Bidirectional Pipeline Parallelism for Training Large-Scale Models, DAC
    2023 (its abstract); the peak as in BitPipe, arXiv 2410.19367; order and formulas ours.
    """
    most_held = injected if isinstance(injected, int) else _most_injected(num_devices)
    placement = bidirectional(linear(num_devices))
    order = best_job_order(
        machines_of(placement),
        num_jobs_of(placement, num_microbatches),
        _preferences(num_devices, most_held),
        least_idle=3 * (num_devices - 2) // 2,
        most_held=most_held,
    )
    assert order  # K/2 jobs in flight, the second cap, keep any K
    rows = rows_of_jobs(order.rows, placement, num_microbatches=num_microbatches)
    return Schedule("mixpipe", placement, num_microbatches, with_sync(rows, placement, eager=eager_sync))


def _preferences(num_devices: int, most_held: int) -> list[Preference]:
    """Returns the preferences that are tried: caps on all forwards, on the first half, or on jobs in flight."""
    # K/2 jobs in flight cannot deadlock, so the list always has an order.
    caps = [(most_held, num_devices), (most_held // 2, 1)]
    # With little memory a cap on the first half of the forwards lets the others drain.
    if most_held < num_devices:
        caps += [(cap, num_devices // 2) for cap in reversed(range((most_held + 1) // 2, most_held))]
    return [
        Preference(spacing, pace, delay, cap, num_capped)
        for (cap, num_capped), spacing, pace, delay in product(caps, (2, 1, 3), (2, 1), (-4, -1, 0))
    ]


def _most_injected(num_devices: int) -> int:
    """The largest useful K: with more a step is no shorter."""
    return (3 * num_devices - 2) // 2


def _for_room(num_devices: int, room: float) -> tuple[int, ...]:
    """Values of K for the search: what fits, and the largest useful one."""
    most = _most_injected(num_devices)
    return tuple(dict.fromkeys((min(max(LEAST_INJECTED, int(room)), most), most)))


def _check(num_devices: int, options: Options) -> None:
    injected = options["injected"]
    most = _most_injected(num_devices)
    if injected == "max" or num_devices % 2:
        return
    whole = injected if isinstance(injected, int) and not isinstance(injected, bool) else None
    nearest = most if whole is None else min(max(whole, LEAST_INJECTED), most)
    if nearest != whole:
        raise ScheduleError(
            f"injected={injected!r} for schedule 'mixpipe'.",
            rule=f"injected-range: injected is a whole number from {LEAST_INJECTED}, one microbatch of either "
            f"direction, to (3D-2)/2, here {most}, or 'max'; with more on a device the step is no shorter",
            repair=f"set injected={nearest}, or leave it out",
        )


def _bubble_of_most(d: int, n: int) -> float | None:
    return (d - 2) / ((2 if n >= 2 * d else 1.5) * n + d - 2) if n == d or (n >= 2 * d and n % 2 == 0) else None


METHOD = Method(
    name="mixpipe",
    generator=mixpipe,
    summary="Chimera's two pipelines, with up to K microbatches on a device (our reading: the paper's rule is not "
    "public)",
    paper="Zhang et al., MixPipe, DAC 2023",
    options=(
        Option("injected", left_to_the_method, for_room=_for_room, others=(2,), note="K"),
        Option("eager_sync", check_truth),
    ),
    even_devices=True,
    check=_check,
    period=lambda num_devices, options: num_devices,
    num_replicas=2,
    bubble=(
        Formula(
            "(D-2)/(2N+D-2); at N=D (D-2)/(3N/2+D-2)",
            lambda d, n, o: _bubble_of_most(d, n) if o["injected"] in ("max", _most_injected(d)) else None,
            where="N = D or even N >= 2D, injected=max",
        ),
    ),
    peak=(
        Formula(
            "at most (3D-2)/2",
            lambda d, n, o: (None, _most_injected(d)) if n >= 2 * d and o["injected"] == "max" else None,
            where="N >= 2D, injected=max",
            source=BITPIPE_TEXT,
        ),
    ),
)
