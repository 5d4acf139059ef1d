"""BPipe: 1F1B whose early stages keep part of their activations with the late ones, or on their hosts."""

from dataclasses import replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.one_f_one_b import one_f_one_b
from jaxpipe.schedules.methods.option import Option, Options, at_least, check_truth, left_to_the_method
from jaxpipe.schedules.passes.balance import PLACES, balance, check_options, least_bound, row_peaks
from jaxpipe.schedules.schedule import HOST, PARTNER, Schedule

LEAST_DEVICES = 4
# Slots: device D-3 has three microbatches before its first backward, and each of them is needed soon.
LEAST_WITH_HOST = 3


def bpipe(
    *,
    num_devices: int,
    num_microbatches: int,
    bound: int | None = None,
    unit: str = "page",
    policy: str = "latest",
    overlapped: bool = True,
    to: str = PARTNER,
) -> Schedule:
    """Returns 1F1B with EVICT and LOAD such that no device stores more than `bound` slots.

    D=4, N=4, bound 3:

        0  0F0 0EVICT0 0F1 0EVICT1 0F2 0EVICT2 0LOAD0 0F3 0EVICT3 0LOAD1 0B0 0LOAD2 0B1 0LOAD3 0B2 0B3
        1  1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3
        2  2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3
        3  3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3

    where each EVICT sends half of a microbatch's pages to device 3, which stores only one. The order of
    computation is that of 1F1B, and so is its bubble ratio (D-1)/(N+D-1), as long as transfers fit behind
    computation. Peak activations at most ceil((D+2)/2) Ma on every device, parked and in transit included
    (`balance` has the proof); where N is so small that 1F1B keeps that bound by itself, the schedule is 1F1B. Needs
    D >= 4, any N >= 1.

    Args:
        bound: slots that a device may hold, below `num_devices`; if not given the least: ceil((D+2)/2), with a host 3.
        unit, policy, overlapped, to: options of `balance`. With to="host" all stages but the last three park, each on
            the host of its own device, as in PipeOffload.

    Source: Kim et al., BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language Models, ICML
    2023; the bound as Huang et al. (Obscura, USENIX ATC 2025, section 9.3) give it. Wan et al., PipeOffload, ICML 2025
    (arXiv 2503.01328), for the host.
    """
    plain = one_f_one_b(num_devices=num_devices, num_microbatches=num_microbatches)
    peaks = row_peaks(plain)
    # With few microbatches 1F1B keeps the bound by itself, and `balance` would refuse it.
    least = least_bound(peaks) if to == PARTNER else LEAST_WITH_HOST
    if max(peaks) > (least if bound is None else bound):
        plain = balance(plain, bound=bound, unit=unit, policy=policy, overlapped=overlapped, to=to)
    return replace(plain, name="bpipe")


def _check(num_devices: int, options: Options) -> None:
    check_options("bpipe", **{name: options[name] for name in ("unit", "policy", "overlapped", "to")})
    if num_devices < LEAST_DEVICES:
        raise ScheduleError(
            f"num_devices={num_devices} for schedule 'bpipe'.",
            rule="bpipe-pays: what is in transit takes a slot on either device of a pair; with fewer than "
            f"{LEAST_DEVICES} devices that is all that could be saved",
            repair=f"set num_devices={LEAST_DEVICES} or more, or use 1f1b",
        )
    if options["bound"] is not None and options["bound"] >= num_devices:
        raise ScheduleError(
            f"bound={options['bound']} for schedule 'bpipe' with num_devices={num_devices}.",
            rule="bound-binds: 1F1B stores at most num_devices slots, so that a bound from there on has no effect",
            repair=f"set bound={num_devices - 1} or less, leave it out, or use 1f1b",
        )


METHOD = Method(
    name="bpipe",
    generator=bpipe,
    summary="1F1B whose early stages store part of their activations on late ones: at most ceil((D+2)/2) on a device, "
    "in the same time, with bitwise equal results; D >= 4",
    paper="Kim et al., BPipe, ICML 2023; the bound as in Obscura, USENIX ATC 2025",
    options=(
        Option("bound", at_least(0), default_text="ceil((D+2)/2)"),
        Option("unit", left_to_the_method, note="or `microbatch`"),
        Option("policy", left_to_the_method, note="or `oldest`, with `unit=microbatch`"),
        Option("overlapped", check_truth, note="with `unit=microbatch`"),
        Option("to", left_to_the_method, planned=PLACES, others=(HOST,), note="or `host`, whose memory has the pages"),
    ),
    least_devices=LEAST_DEVICES,
    check=_check,
    period=lambda num_devices, options: num_devices,
    parks_pages=True,
    bubble=(Formula("(D-1)/(N+D-1)", lambda d, n, o: (d - 1) / (n + d - 1)),),
    peak=(
        Formula(
            "at most ceil((D+2)/2)",
            lambda d, n, o: (None, (d + 3) // 2) if n >= d and o["bound"] is None and o["to"] == PARTNER else None,
            where="N >= D, bound not given",
            source="BPipe's bound as Obscura, USENIX ATC 2025, section 9.3, gives it",
        ),
        Formula(
            "at most 3",
            lambda d, n, o: (None, LEAST_WITH_HOST) if n >= d and o["bound"] is None and o["to"] == HOST else None,
            where="N >= D, bound not given, to=host",
        ),
    ),
)
