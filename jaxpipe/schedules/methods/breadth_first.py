"""Breadth-first: looped chunks, of which each runs all microbatches before the next one starts."""

from jaxpipe.schedules.option_checks import check_count
from jaxpipe.schedules.placement import looped
from jaxpipe.schedules.schedule import Action, Kind, Schedule


def breadth_first(*, num_devices: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Returns the breadth-first schedule: on looped chunks, all microbatches of a chunk, then the next chunk.

    D=2, v=2, N=3, backward twice the forward:

        0  0F0 0F1 0F2 2F0 2F1 2F2 ... ... ... 2B0 2B0 2B1 2B1 2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
        1  ... 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B0 3B1 3B1 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2 ... ...

    Bubble ratio (D-1)/(vN+D-1) for N >= D and any costs that are equal on all stages; with fewer microbatches each
    chunk waits until the first one has come round: 1 - vN/(vD+N-1). Peak activations N Ma on every device. With v=1
    it is GPipe. What it is for is sharded weights: each stage's are gathered once for all forwards and once for all
    backwards of a step. Any D >= 1, N >= 1, v >= 1.

    On the SPMD clock: as long as on the asynchronous one whatever a backward costs; with messages of 0.1 forward up to
    1.10, 1.07 or 1.05 times at a backward of one, two or three, for forwards have no other action to hide behind.

    Args:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        num_chunks: v, stages on each device.

    Raises:
        ScheduleError: `num_chunks` is no whole number of 1 or more.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, section 3.
    """
    check_count("breadth_first", "num_chunks", num_chunks)
    chunks, microbatches = range(num_chunks), range(num_microbatches)
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
