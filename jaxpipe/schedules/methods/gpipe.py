"""GPipe: all forwards, then all backwards."""

from jaxpipe.schedules.methods.method import TABLE_2, Formula, Method
from jaxpipe.schedules.placement import linear
from jaxpipe.schedules.schedule import Action, Kind, Schedule


def gpipe(*, num_devices: int, num_microbatches: int) -> Schedule:
    """Returns GPipe's schedule.

    D=2, N=3, backward twice the forward:

        0  0F0 0F1 0F2 ...     0B0 0B0 0B1 0B1 0B2 0B2
        1  ... 1F0 1F1 1F2 1B0 1B0 1B1 1B1 1B2 1B2 ...

    Bubble ratio (D-1)/(N+D-1) for any costs that are equal on all stages; peak activations N Ma on
    every device. Any D >= 1, any N >= 1.

    Source: Huang et al., GPipe, NeurIPS 2019, section 2.3; formulas as in BitPipe, arXiv 2410.19367,
    Table 2. Backwards run in the order of the forwards.
    """
    microbatches = range(num_microbatches)
    rows = tuple(
        tuple(Action(Kind.F, stage, m) for m in microbatches) + tuple(Action(Kind.B, stage, m) for m in microbatches)
        for stage in range(num_devices)
    )
    return Schedule("gpipe", linear(num_devices), num_microbatches, rows)


METHOD = Method(
    name="gpipe",
    generator=gpipe,
    summary="all forwards, then all backwards",
    paper="Huang et al., GPipe, NeurIPS 2019",
    period=lambda num_devices, options: num_devices,
    is_baseline=True,
    bubble=(Formula("(D-1)/(N+D-1)", lambda d, n, o: (d - 1) / (n + d - 1), source=TABLE_2),),
    peak=(Formula("N", lambda d, n, o: (n, n), source=TABLE_2),),
)
