"""BitPipe: interleaved pipelines in a V, in opposite directions, whose bubbles fill each other."""

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.methods._bidirectional import opposite_chains, there_and_back
from jaxpipe.schedules.methods._early_forwarding import early_forwarding
from jaxpipe.schedules.option_checks import check_choice, check_count, check_even, check_truth
from jaxpipe.schedules.passes.rows import next_multiple, with_sync, without_phantoms
from jaxpipe.schedules.placement import bidirectional, looped, zig_zag
from jaxpipe.schedules.schedule import Schedule

SCALINGS = ("concatenate", "figure", "early_forwarding")


def bitpipe(
    *,
    num_devices: int,
    num_microbatches: int,
    num_chunks: int = 2,
    v_shape: bool = True,
    eager_sync: bool = True,
    scaling: str = "concatenate",
) -> Schedule:
    """Returns BitPipe: Chimera whose replicas run up and down the devices, a chunk each way.

    D=4, v=2, N=4, without the SYNCs:

        0  0F0 0F1 3F2@1 4F2@1 3F3@1 4F3@1 7F0 7B0 7F1 7B1 4B2@1 3B2@1 4B3@1 3B3@1 0B0 0B1
        1  1F0 2F2@1 1F1 2F3@1 5F2@1 6F0 5F3@1 6F1 6B0 5B2@1 6B1 5B3@1 2B2@1 1B0 2B3@1 1B1
        2  1F2@1 2F0 1F3@1 2F1 5F0 6F2@1 5F1 6F3@1 6B2@1 5B0 6B3@1 5B1 2B0 1B2@1 2B1 1B3@1
        3  0F2@1 0F3@1 3F0 4F0 3F1 4F1 7F2@1 7B2@1 7F3@1 7B3@1 4B0 3B0 4B1 3B1 0B2@1 0B3@1

    Bubble ratio at N=D: (D-2)/(1.5vN+D-2) at a backward of two forwards, which is Table 2's (D-2)/(3N+D-2) for v=2,
    and (D-2)/(2vN+D-2) at one of one forward. Peak activations D Ma on the two devices in the middle, D - (D-2)/(2v) Ma
    on those at the ends; Table 2's (D+3)/2 for the ends is that of v=2 at D=4 only. Two replicas of the weights. With
    v=1 it is Chimera.

    For N=KD there are three orders. x is the bubble in forwards of a stage, at a backward of two forwards: the bubble
    ratio is x/(3vN+x).

    - `concatenate`: unit after unit, as in the paper's published code: x = (D-2)(K+1). At a backward of one
      forward still (D-2)/(2vN+D-2).
    - `figure`: the outer devices start the microbatches of the next unit sooner, as the paper's figure for D=4, N=8
      does: x = 2(D-2) + (D-3)(K-1) from D=4 on, with the same peaks. Never worse at a backward of two forwards or more;
      worse at one of one forward, where `concatenate` leaves no bubble between units.
    - `early_forwarding`: as `jaxpipe.schedules.methods._early_forwarding` says; higher peaks.

    The paper's formula for all N, x = 2(D-2) once only, is not what its units give when they are concatenated.

    On the SPMD clock, the exchange of gradients apart: `concatenate` takes as long as on the asynchronous one whatever
    a backward costs; with messages of 0.1 forward up to 1.035 times at D=4, 1.02 at D=8. The rounds of `figure` go by
    the expected costs: as long at a backward of one, two or three forwards, measured up to 1.13, 1.10 or 1.06 times
    with such messages. With the exchange, gradients of a layer taking 0.6 forwards, `concatenate` takes up to 1.06
    times at D=4, 1.03 at D=8.

    Needs even D, any N >= 1, any v >= 1: where N is not whole units of D, the last one is built whole, and
    microbatches of both directions in turn are left out.

    Args:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        num_chunks: v, stages of each replica on each device.
        v_shape: chunks run up and down the devices in turn, so that the last stage of one and the first of the next
            are on one device; False starts each chunk on the replica's first device again (the paper's ablation), which
            has the same slots, with a message where the V has none.
        eager_sync: each SYNC directly behind the last backward of its stage and replica, not at the end of the row.
        scaling: the order of more than D microbatches: `concatenate`, `figure` or `early_forwarding`.

    Raises:
        ScheduleError: odd `num_devices`, an option of the wrong kind, or `v_shape=False` where it has no effect or no
            order is known for it.

    Source: Wu, Chen and Yu, BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models
    Training, arXiv 2410.19367, sections 3.1 to 3.3, appendices A and B; formulas of the peaks and of N=KD ours.
    """
    check_even("bitpipe", num_devices)
    check_count("bitpipe", "num_chunks", num_chunks)
    check_truth("bitpipe", v_shape=v_shape, eager_sync=eager_sync)
    check_choice("bitpipe", "scaling", scaling, SCALINGS)
    if not v_shape:
        _check_looped(num_chunks, scaling)
    placement = bidirectional((zig_zag if v_shape else looped)(num_devices, num_chunks))
    if scaling == "early_forwarding":
        rows = early_forwarding(num_devices=num_devices, num_chunks=num_chunks, num_microbatches=num_microbatches)
    else:
        num_units = next_multiple(num_microbatches, num_devices) // num_devices
        passes = there_and_back(num_chunks)
        rows = opposite_chains(placement, passes, num_units=num_units, early_starts=scaling == "figure")
        rows = without_phantoms(rows, num_microbatches=num_microbatches)
    return Schedule("bitpipe", placement, num_microbatches, with_sync(rows, placement, eager=eager_sync))


def _check_looped(num_chunks: int, scaling: str) -> None:
    if num_chunks == 1:
        raise ScheduleError(
            "v_shape=False for schedule 'bitpipe' with num_chunks=1.\n"
            "  rule shape-binds: one chunk on each device has no V to do without\n"
            "  repair: leave v_shape out, or set num_chunks=2 or more"
        )
    if scaling == "early_forwarding":
        raise ScheduleError(
            "v_shape=False for schedule 'bitpipe' with scaling='early_forwarding'.\n"
            "  rule early-forwarding-v: forwards are pulled ahead on chunks that run up and down the devices in turn\n"
            "  repair: leave v_shape out, or set scaling=concatenate"
        )
