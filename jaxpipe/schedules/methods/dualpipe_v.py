"""DualPipeV: the two directions of DualPipe are the two chunks of one V-shaped replica.

The published method overlaps a forward and a backward: with `overlap` they are pairs, else one runs after the other.
"""

from jaxpipe.schedules.analysis.costs import split_costs
from jaxpipe.schedules.methods.dualpipe import OWN, SOURCE, check_overlap, dualpipe_steps
from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.option import TIMES, Option, check_truth
from jaxpipe.schedules.passes.rows import drop_padding
from jaxpipe.schedules.passes.split_backward import best_weight_gradients
from jaxpipe.schedules.placement import zig_zag
from jaxpipe.schedules.schedule import Action, Schedule


def dualpipe_v(
    *,
    num_devices: int,
    num_microbatches: int,
    backward_first: bool = False,
    overlap: bool = False,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Schedule:
    """Returns DualPipeV: DualPipe's steps on one replica, whose first chunks go down the devices and second ones up.

    D=2, N=4, backward twice the forward, I and W as long as it:

        0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3 ... 0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
        1  ... 1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 1I3 2W3 1W3

    Bubble at F=I=W and N >= D: (D-1) F, a ratio of (D-1)/(6N+D-1); also where I <= F <= W, by simulation. No order of
    this placement has less, since the last device can start D-1 forwards after the first. The formula of the source,
    (D-1)(F&B + B - 3W), is twice that at F=I=W where F&B, a forward and a backward at the same time, takes as long as
    both one after the other, as here. Peak activations D+1/2 Ma on every device for N > D; at most N Ma. One replica of
    the weights. Any D >= 1, any N >= 1.

    The published steps need N >= 2D. For fewer microbatches the schedule of 2D is built and the last ones are dropped.
    A forward and a backward that the published steps overlap run one after the other here, F first. With
    `backward_first` B is first, and the peak is D Ma; the bubble is the same at F=I=W, and at F=1, I=1.2, W=0.8 it is
    F longer for D=8. W stand where they are published, so that most backwards stay whole. Where it makes the step
    shorter at the times given, every backward is split instead and W fill the gaps (`split_backward`), with no more
    stored at once than published.

    Args:
        backward_first: whether, of an F and B that overlap in the published steps, B runs first.
        overlap: whether these are pairs, as published; then W stand where they are published.
        forward, input_gradient, weight_gradient: times of one stage's F, I and W; B takes as long as I and W.

    Source: github.com/deepseek-ai/DualPipe, `dualpipev.py`, which names "Cut-in-half" of Sea AI Lab as its origin;
    steps and published formula as there. Fewer microbatches, `backward_first`, W by times, and the bubble are ours.
    """
    costs = split_costs(forward, input_gradient, weight_gradient)
    placement = zig_zag(num_devices, 2)
    # The published steps need two microbatches for each device of the V; surplus ones are dropped below.
    num_each = max(num_microbatches, 2 * num_devices)
    rows = [
        [
            # Way down the device is stage d; way up, the opposite direction, it is stage 2D-1-d.
            Action(kind, device if direction == OWN else 2 * num_devices - 1 - device, number, joined=is_joined)
            for kind, direction, number, is_joined in dualpipe_steps(
                depth=device, num_depths=num_devices, num_each=num_each, backward_first=backward_first, overlap=overlap
            )
        ]
        for device in range(num_devices)
    ]
    rows = drop_padding(rows, num_microbatches=num_microbatches)
    schedule = Schedule("dualpipe_v", placement, num_microbatches, rows)
    return schedule if overlap else best_weight_gradients(schedule, costs)


METHOD = Method(
    name="dualpipe_v",
    generator=dualpipe_v,
    summary="DualPipe on one replica, whose stages go down and up in a V; forwards and backwards one after the other, "
    "or pairs with `overlap`",
    paper="github.com/deepseek-ai/DualPipe, dualpipev.py",
    options=(
        Option("backward_first", check_truth, values=(False, True)),
        Option("overlap", check_truth, note="pairs, as published"),
        *TIMES,
    ),
    check=check_overlap,
    period=lambda num_devices, options: num_devices,
    has_split_backward=True,
    has_fixed_order=True,
    bubble=(
        Formula(
            "(D-1)/(3N+D-1)",
            lambda d, n, o: (d - 1) / (3 * n + d - 1) if n >= 2 * d and not o["overlap"] else None,
            where="N >= 2D",
            source=SOURCE,
            holds=False,
        ),
        Formula(
            "(D-1)/(3N+D-1)",
            lambda d, n, o: (d - 1) / (3 * n + d - 1) if n >= 2 * d and o["overlap"] else None,
            where="overlap, N >= 2D",
            source=SOURCE,
        ),
        Formula(
            "(D-1)/(6N+D-1)",
            lambda d, n, o: (d - 1) / (6 * n + d - 1) if n >= d and not o["overlap"] else None,
            where="N >= D",
        ),
    ),
    peak=(
        Formula(
            "D+1/2",
            lambda d, n, o: (d + 1 / 2, d + 1 / 2) if n >= 2 * d and not o["backward_first"] else None,
            where="N >= 2D, F first",
            source=SOURCE,
        ),
        Formula("at N=D N", lambda d, n, o: (n, n) if n == d and not o["overlap"] else None, where="N = D"),
    ),
)
