"""ZB-H1: 1F1B with split backwards, whose weight gradients fill the end of the step, at the memory of 1F1B."""

from jaxpipe.schedules.ordering.memory_bounded import capped
from jaxpipe.schedules.placement import linear
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.times import checked_times


def zb_h1(
    *,
    num_devices: int,
    num_microbatches: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Schedule:
    """Returns ZB-H1: F, I and W of a linear pipeline with at most D Ma stored on any device.

    D=3, N=4, I and W as long as F:

        0  0F0 0F1 0F2 ... ... 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1  ... 1F0 1F1 1F2 1I0 1W0 1I1 1W1 1F3 1I2 1W2 1I3 1W3 ...
        2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Bubble at F=I=W: (D-1) F for N >= D, a ratio of (D-1)/(3N+D-1), a third of 1F1B's; (2D-1-N) F for fewer. No order
    has less: the last device starts D-1 forwards after the first. Published for other times: (D-1)(F+I-W), as of their
    greedy order. Peak activations min(D, N) Ma on every device: they are kept until W, so that what 1F1B's last devices
    would have free is spent on W that wait. One replica of the weights. Any D >= 1, any N >= 1.

    How it is found: a free device takes an F or I that is ready, by what it prefers, and W where none is, without ever
    storing more than D Ma. Then all actions move as late as they can, and as early as they can, while the step gets
    shorter. Of four patterns the best result is taken, the shortest at the times given (`capped_search`).

    On the SPMD clock rounds go by the expected costs: as long as on the asynchronous one at times of 1, 1, 1, of
    1, 1.2, 0.8 and of 1, 0.9, 1.3 (D in 2, 4, 5, 8, N to 4D); with messages of 0.02 or 0.1 forward up to 1.010 or
    1.054 times.

    Args:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        forward, input_gradient, weight_gradient: times of one stage's F, I and W, in any one unit.

    Raises:
        ScheduleError: a time that is no finite number above 0.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), which writes B for our I;
    published formulas as in github.com/sail-sg/zero-bubble. The order is ours.
    """
    times = checked_times("zb_h1", forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)
    cap = num_devices
    return capped("zb_h1", linear(num_devices), num_microbatches, times, cap)
