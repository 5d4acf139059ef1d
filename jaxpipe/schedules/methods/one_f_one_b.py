"""1F1B (DAPPLE, PipeDream-Flush): as few microbatches in flight as keep every stage busy."""

from jaxpipe.schedules.methods.method import TABLE_2, TABLE_6, Formula, Method
from jaxpipe.schedules.placement import linear
from jaxpipe.schedules.schedule import Action, Kind, Schedule


def one_f_one_b(*, num_devices: int, num_microbatches: int) -> Schedule:
    """Returns the 1F1B schedule: min(D-1-s, N) warm-up forwards, then F and B in turn, then the rest.

    D=2, N=3, backward twice the forward:

        0  0F0 0F1 ... 0B0 0B0 0F2 0B1 0B1 ... 0B2 0B2
        1  ... 1F0 1B0 1B0 1F1 1B1 1B1 1F2 1B2 1B2 ...

    Bubble ratio (D-1)/(N+D-1) for any costs that are equal on all stages; peak activations
    min(D-s, N) Ma on device s. Any D >= 1, any N >= 1.

    Source: Fan et al., DAPPLE, PPoPP 2021, section 3; Narayanan et al., Memory-Efficient
    Pipeline-Parallel DNN Training (PipeDream-Flush), ICML 2021; warm-up count as in Megatron-LM.
    """
    rows = tuple(_row(stage, num_devices, num_microbatches) for stage in range(num_devices))
    return Schedule("1f1b", linear(num_devices), num_microbatches, rows)


def _row(stage: int, num_devices: int, num_microbatches: int) -> tuple[Action, ...]:
    num_warm_up = min(num_devices - 1 - stage, num_microbatches)
    row = [Action(Kind.F, stage, m) for m in range(num_warm_up)]
    for m in range(num_microbatches - num_warm_up):
        row.append(Action(Kind.F, stage, num_warm_up + m))
        row.append(Action(Kind.B, stage, m))
    row += [Action(Kind.B, stage, m) for m in range(num_microbatches - num_warm_up, num_microbatches)]
    return tuple(row)


METHOD = Method(
    name="1f1b",
    generator=one_f_one_b,
    summary="one forward, one backward in turn: at most D microbatches are stored",
    paper="Fan et al., DAPPLE, PPoPP 2021; Narayanan et al., PipeDream-Flush, ICML 2021",
    period=lambda num_devices, options: num_devices,
    is_baseline=True,
    bubble=(Formula("(D-1)/(N+D-1)", lambda d, n, o: (d - 1) / (n + d - 1), source=TABLE_2),),
    peak=(Formula("1..min(D, N)", lambda d, n, o: (1, min(d, n)), source=TABLE_2),),
    messages=(Formula("2N+2(D-1)", lambda d, n, o: 2 * n + 2 * (d - 1), source=TABLE_6),),
)
