"""GEMS: two replicas in opposite directions, one microbatch at a time on each device."""

from jaxpipe.schedules.methods.method import BITPIPE_TEXT, Formula, Method
from jaxpipe.schedules.methods.option import Option, check_truth
from jaxpipe.schedules.passes.rows import with_sync
from jaxpipe.schedules.placement import bidirectional, linear
from jaxpipe.schedules.schedule import Action, Kind, Schedule


def gems(*, num_devices: int, num_microbatches: int, eager_sync: bool = True) -> Schedule:
    """Returns GEMS: microbatches go down and up in turn, each close behind the backward of the one before.

    D=2, N=2, backward twice the forward:

        0  0F0   ...   ...   ...   0B0   0B0   1F1@1 1B1@1 1B1@1 ...   ...
        1  ...   1F0   1B0   1B0   0F1@1 ...   ...   ...   ...   0B1@1 0B1@1

    Two microbatches take 4D+2 forwards of a stage at a backward of two, of which each device computes six: bubble
    ratio (D-1)/(D+1/2), up to fill and drain, which are negligible for large N; it does not shrink with N. Peak
    activations 1 Ma on every device, two replicas of the weights. Needs even D, any N >= 1.

    Args:
        eager_sync: each SYNC directly behind the last backward of its stage and replica, not at the end of the row.

    Source: Jain et al., GEMS: GPU-Enabled Memory-Aware Model-Parallelism System for Distributed DNN Training, SC
    2020, as described in BitPipe, arXiv 2410.19367, section 2; the period is ours.
    """
    placement = bidirectional(linear(num_devices))
    rows = tuple(
        tuple(
            Action(kind, placement.partner_of(device) if m % 2 else device, m, m % 2)
            for m in range(num_microbatches)
            for kind in (Kind.F, Kind.B)
        )
        for device in range(num_devices)
    )
    return Schedule("gems", placement, num_microbatches, with_sync(rows, placement, eager=eager_sync))


METHOD = Method(
    name="gems",
    generator=gems,
    summary="two replicas, down and up the devices in turn: one microbatch is stored",
    paper="Jain et al., GEMS, SC 2020",
    options=(Option("eager_sync", check_truth),),
    even_devices=True,
    period=lambda num_devices, options: num_devices,
    num_replicas=2,
    bubble=(
        Formula(
            "(D-1)(2N+1)/((2D+1)N+D-1)",
            lambda d, n, o: (d - 1) * (2 * n + 1) / ((2 * d + 1) * n + d - 1) if n % 2 == 0 else None,
            where="even N",
        ),
    ),
    peak=(Formula("1", lambda d, n, o: (1, 1), source=BITPIPE_TEXT),),
)
