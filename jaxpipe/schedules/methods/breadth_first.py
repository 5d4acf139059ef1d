"""Breadth-first: looped chunks, of which each runs all microbatches before the next one starts."""

from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.option import Option, at_least
from jaxpipe.schedules.placement import looped
from jaxpipe.schedules.schedule import Action, Kind, Schedule


def breadth_first(*, num_devices: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Returns the breadth-first schedule: on looped chunks, all microbatches of a chunk, then the next chunk.

    D=2, v=2, N=3, backward twice the forward:

        0  0F0 0F1 0F2 2F0 2F1 2F2 ... ... ... 2B0 2B0 2B1 2B1 2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
        1  ... 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B0 3B1 3B1 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2 ... ...

    Bubble ratio (D-1)/(vN+D-1) for N >= D and any costs that are equal on all stages; with fewer microbatches each
    chunk waits until the first one has come round: 1 - vN/(vD+N-1). Peak activations N Ma on every device. With v=1
    it is GPipe. The order is for sharded weights: those of a stage are gathered once for all forwards and once for all
    backwards of a step. Any D >= 1, N >= 1, v >= 1.

    Args:
        num_chunks: v, stages on each device.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, section 3.
    """
    chunks = range(num_chunks)
    microbatches = range(num_microbatches)
    rows = tuple(
        tuple(
            Action(kind, num_devices * chunk + device, m)
            for kind, order in ((Kind.F, chunks), (Kind.B, reversed(chunks)))
            for chunk in order
            for m in microbatches
        )
        for device in range(num_devices)
    )
    return Schedule("breadth_first", looped(num_devices, num_chunks), num_microbatches, rows)


METHOD = Method(
    name="breadth_first",
    generator=breadth_first,
    summary="v stages on each device, all microbatches of one before the next",
    paper="Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023",
    options=(Option("num_chunks", at_least(1), values=(2, 4), others=(1,), multiplies=True, note="v"),),
    period=lambda num_devices, options: num_devices,
    bubble=(
        Formula(
            "(D-1)/(vN+D-1)",
            lambda d, n, o: (d - 1) / (o["num_chunks"] * n + d - 1) if n >= d else None,
            where="N >= D",
        ),
        Formula(
            "1-vN/(vD+N-1)",
            lambda d, n, o: 1 - o["num_chunks"] * n / (o["num_chunks"] * d + n - 1) if n < d else None,
            where="N < D",
        ),
    ),
    peak=(Formula("N", lambda d, n, o: (n, n)),),
)
