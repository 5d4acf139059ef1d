"""PipeDream-2BW: 1F1B without flush, whose batches use weights that are one update old."""

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.one_f_one_b import one_f_one_b
from jaxpipe.schedules.methods.option import Option, at_least
from jaxpipe.schedules.schedule import Action, Kind, Schedule


def pipedream_2bw(*, num_devices: int, num_microbatches: int, num_batches: int = 3) -> Schedule:
    """Returns the rows of `num_batches` batches of N microbatches, from the fill of the pipeline to its drain.

    The forwards and backwards are those of 1F1B with num_batches x N microbatches, so that the pipeline is filled once,
    at the start of a run. After its last backward of batch k a stage updates its weights: W(k+1) = W(k) - lr grad
    f_k(W(k-1)), where W(-1) = W(0). Batch k uses W(k-1) on all stages: at most two versions are alive.

    D=2, N=2, two batches, backward twice the forward:

        0  0F0 0F1 ... 0B0 0B0 0F2 0B1 0B1 0U0 0F3 0B2 0B2 ... 0B3 0B3 0U1
        1  ... 1F0 1B0 1B0 1F1 1B1 1B1 1U0 1F2 1B2 1B2 1F3 1B3 1B3 1U1 ...

    Bubble 0 in the steady state, for costs that are equal on all stages; activations as 1F1B's, at most D-s Ma on
    device s. Any D >= 2, any N >= D: with fewer microbatches, the first forwards of a batch would need weights whose
    gradient is not complete yet.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section 3.1.
    """
    if num_microbatches < num_devices:
        raise ScheduleError(
            f"num_microbatches={num_microbatches} for schedule 'pipedream_2bw' on num_devices={num_devices}.",
            rule="batch-fills: a batch has as many microbatches as the pipeline has stages, or more; the first "
            "stage begins batch k+1 while the last backwards of batch k are still on their way, and needs W(k), "
            "for which the gradient of batch k-1 must be complete",
            repair=f"set num_microbatches={num_devices} or more, or use fewer stages",
        )
    whole = one_f_one_b(num_devices=num_devices, num_microbatches=num_batches * num_microbatches)
    rows = tuple(with_updates(row, num_microbatches) for row in whole.rows)
    return Schedule(
        "pipedream_2bw",
        whole.placement,
        whole.num_microbatches,
        rows,
        delays=(1,) * num_devices,
        num_batches=num_batches,
    )


def with_updates(row: tuple[Action, ...], batch_size: int) -> tuple[Action, ...]:
    """Returns `row` with an UPDATE of its stage after the last backward of each batch."""
    result = []
    for action in row:
        result.append(action)
        # The last backward of a batch on this stage: its microbatches run in order.
        if action.kind is Kind.B and (action.microbatch + 1) % batch_size == 0:
            result.append(Action(Kind.UPDATE, action.stage, action.microbatch // batch_size))
    return tuple(result)


METHOD = Method(
    name="pipedream_2bw",
    generator=pipedream_2bw,
    summary="1F1B that never drains: weights one update old, two versions of them",
    paper="Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021",
    options=(Option("num_batches", at_least(2), values=(3,), planned=(), multiplies=True, note="in pictures"),),
    least_devices=2,
    least_microbatches=lambda num_devices: num_devices,
    period=lambda num_devices, options: num_devices,
    peak=(Formula("1..D", lambda d, n, o: (1, d)),),
)
