"""1F1B with more forwards before the first backward: it stores more, and waits less for slow messages."""

from jaxpipe.schedules import Action, Formula, Kind, Method, Option, Schedule, linear
from jaxpipe.schedules.methods.option import at_least


def eager_1f1b(*, num_devices: int, num_microbatches: int, num_ahead: int = 2) -> Schedule:
    """Returns 1F1B with min(num_ahead (D-1-s), N) forwards on device s before its first backward.

    D=2, N=3, num_ahead=2, backward twice the forward:

        0  0F0 0F1 0F2 ... 0B0 0B0 ... 0B1 0B1 ... 0B2 0B2
        1  ... 1F0 1B0 1B0 1F1 1B1 1B1 1F2 1B2 1B2 ... ...

    Bubble ratio (D-1)/(N+D-1) where messages take no time, as 1F1B; peak activations min(num_ahead (D-1-s) + 1, N) Ma
    on device s. Any D >= 1, any N >= 1.

    Args:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        num_ahead: forwards before the first backward, for each device that follows; 1 is 1F1B.

    Source: ours, for this page.
    """

    def row(stage: int) -> tuple[Action, ...]:
        ahead = min(num_ahead * (num_devices - 1 - stage), num_microbatches)
        forwards = [Action(Kind.F, stage, microbatch) for microbatch in range(num_microbatches)]
        backwards = [Action(Kind.B, stage, microbatch) for microbatch in range(num_microbatches)]
        in_turn = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
        return (*forwards[:ahead], *in_turn, *backwards[num_microbatches - ahead :])

    return Schedule("eager_1f1b", linear(num_devices), num_microbatches, tuple(map(row, range(num_devices))))


METHOD = Method(
    name="eager_1f1b",
    generator=eager_1f1b,
    summary="1F1B with more forwards ahead: messages may take longer",
    paper="ours",
    options=(Option("num_ahead", at_least(1), values=(2, 3), others=(1,), note="a"),),
    period=lambda num_devices, options: num_devices,
    bubble=(Formula("(D-1)/(N+D-1)", lambda d, n, o: (d - 1) / (n + d - 1)),),
    peak=(Formula("1..min(a(D-1)+1, N)", lambda d, n, o: (1, min(o["num_ahead"] * (d - 1) + 1, n))),),
)
