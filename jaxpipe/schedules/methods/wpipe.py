"""WPipe: two groups of stages without flush, of which only the first uses weights that are one update old."""

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.methods.interleaved_1f1b import interleaved_row
from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.option import Option, at_least
from jaxpipe.schedules.methods.pipedream_2bw import with_updates
from jaxpipe.schedules.placement import looped
from jaxpipe.schedules.schedule import Schedule


def wpipe(*, num_devices: int, num_microbatches: int, num_batches: int = 3) -> Schedule:
    """Returns the rows of `num_batches` batches of N = D microbatches, from the fill of the pipeline to its drain.

    Device d holds stage d of group 0 and stage D+d of group 1. Forwards run a batch of group 0, the same batch of group
    1, the next batch of group 0; backwards group 1 first. After 2D-1-d forwards a device does forwards and backwards in
    turn: those of group 1 beside each other, then forwards of group 0 for the next batch beside its backwards for this
    one. So group 1 has updated its weights before it sees the next batch, and group 0 is one update late:

        W0(k+1) = W0(k) - lr g0,  W1(k+1) = W1(k) - lr g1,  (g0, g1) = grad f_k(W0(k-1), W1(k)),  W0(-1) = W0(0).

    D=2, N=2, two batches, backward twice the forward:

        0  0F0 0F1 2F0 ... 2F1 2B0 2B0 0F2 2B1 2B1 2U0 0F3 0B0 0B0 2F2 0B1 0B1 0U0 2F3 2B2 2B2 ... 2B3 2B3 2U1 ...
        1  ... 1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 3U0 1F2 1B0 1B0 1F3 1B1 1B1 1U0 3F2 3B2 3B2 3F3 3B3 3B3 3U1 1B2 ...

    Bubble 0 in the steady state, for costs that are equal on all stages; activations as interleaved 1F1B's at N = D or
    less, (2D-d)/2 Ma on device d. Two versions of the weights of group 0, one of group 1. Any D >= 2; N = D, since a
    group hands a batch to the other one when its first microbatch has come round.

    Source: Yang et al., Group-based Interleaved Pipeline Parallelism for Large-scale DNN Training, ICLR 2022; the rule
    of group 1 as their program has it.
    """
    if num_microbatches != num_devices:
        raise ScheduleError(
            f"num_microbatches={num_microbatches} for schedule 'wpipe' on num_devices={num_devices}.",
            rule="batch-of-devices: a batch has as many microbatches as there are devices; a group hands the batch "
            "to the other one when its first microbatch has passed all devices",
            repair=f"set num_microbatches={num_devices}, or use 'pipedream_2bw', which takes more",
        )
    rows = tuple(
        interleaved_row(
            device,
            num_devices,
            num_batches * num_microbatches,
            num_chunks=2,
            group_size=num_devices,
            # D-1-d forwards fewer than in interleaved 1F1B, which runs further ahead than it needs to.
            num_ahead=2 * num_devices - 1 - device,
        )
        for device in range(num_devices)
    )
    return Schedule(
        "wpipe",
        looped(num_devices, 2),
        num_batches * num_microbatches,
        tuple(with_updates(row, num_microbatches) for row in rows),
        delays=(1,) * num_devices + (0,) * num_devices,
        num_batches=num_batches,
    )


METHOD = Method(
    name="wpipe",
    generator=wpipe,
    summary="two groups of stages that never drain: weights of the first one update old, of the second new",
    paper="Yang et al., Group-based Interleaved Pipeline Parallelism for Large-scale DNN Training, ICLR 2022",
    options=(Option("num_batches", at_least(2), values=(3,), planned=(), multiplies=True, note="in pictures"),),
    least_devices=2,
    least_microbatches=lambda num_devices: num_devices,
    most_microbatches=lambda num_devices: num_devices,
    has_ends_apart=True,
    peak=(Formula("(D+1)/2..D", lambda d, n, o: ((d + 1) / 2, d)),),
)
