"""1F1B (DAPPLE, PipeDream-Flush): as few microbatches in flight as keep every stage busy."""

from jaxpipe.schedules.placement import linear
from jaxpipe.schedules.schedule import Action, Kind, Schedule


def one_f_one_b(*, num_devices: int, num_microbatches: int) -> Schedule:
    """Returns the 1F1B schedule: min(D-1-s, N) warm-up forwards, then F and B in turn, then the rest.

    D=2, N=3, backward twice the forward:

        0  0F0 0F1 ... 0B0 0B0 0F2 0B1 0B1 ... 0B2 0B2
        1  ... 1F0 1B0 1B0 1F1 1B1 1B1 1F2 1B2 1B2 ...

    Bubble ratio (D-1)/(N+D-1) for any costs that are equal on all stages; peak activations
    min(D-s, N) Ma on device s. Any D >= 1, any N >= 1.

    On the SPMD clock: as long as on the asynchronous one whatever a backward costs; with messages of 0.1 forward up to
    1.02 times from D=4 on.

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
