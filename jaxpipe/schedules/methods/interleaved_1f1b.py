"""Interleaved 1F1B: several looped chunks on each device, in Megatron's order."""

from __future__ import annotations

from functools import partial

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.methods.method import TABLE_2, TABLE_6, Formula, Method
from jaxpipe.schedules.methods.option import Option, Options, at_least, check_sizes, check_truth
from jaxpipe.schedules.passes.rows import drop_padding, next_multiple
from jaxpipe.schedules.placement import looped
from jaxpipe.schedules.schedule import Action, Kind, Schedule

# With groups of D - 1 each costs one F and one B more per chunk but the first; with smaller ones the rows deadlock.
_WHY = "a smaller group is through its chunk before its first microbatch has come round to the next one"


def interleaved_1f1b(
    *,
    num_devices: int,
    num_microbatches: int,
    num_chunks: int = 2,
    group_size: int | None = None,
    extra_warm_up: bool = False,
) -> Schedule:
    """Returns interleaved 1F1B: 1F1B over chunks that take turns, a group of microbatches at a time.

    D=2, v=2, N=4, backward twice the forward:

        0  0F0 0F1 2F0 2F1 0F2 ... 2B0 2B0 0F3 2B1 2B1 2F2 0B0 0B0 2F3 0B1 0B1 ... 2B2 2B2 ... 2B3 2B3 0B2 0B2 0B3 0B3
        1  ... 1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1F3 1B1 1B1 3F2 3B2 3B2 3F3 3B3 3B3 1B2 1B2 1B3 1B3 ... ...

    For each group, the forwards of its microbatches run chunk by chunk; backwards likewise, the last chunk first.
    Device d runs 2(D-1-d) + (v-1) group_size forwards ahead, then forwards and backwards in turn. Bubble ratio
    (D-1)/(vN+D-1) for N a multiple of `group_size` and any costs that are equal on all stages. Peak activations, on
    device 0: D Ma at N=D, (vD+D-1)/v Ma from N=2D on, ((v-1) group_size + 2D - 1)/v Ma for other groups.

    With `extra_warm_up`, as Kimi K2 was trained, each device runs one forward more ahead, so that no forward hands its
    output to the backward behind it, and the messages of either can travel while the other computes. The bubble stays;
    peaks from N=2D on are 1/v Ma more, (2(D-1) + (v-1)D + 2)/v on device 0. D=2, v=2, N=4:

        0  0F0 0F1 2F0 2F1 0F2 0F3 ... 2B0 2B0 2F2 2B1 2B1 2F3 0B0 0B0 ... 0B1 0B1 ... 2B2 2B2 2B3 2B3 0B2 0B2 0B3 0B3
        1  ... 1F0 1F1 3F0 3F1 3B0 3B0 1F2 3B1 3B1 1F3 1B0 1B0 3F2 1B1 1B1 3F3 3B2 3B2 3B3 3B3 1B2 1B2 1B3 1B3 ... ...

    With `pipeline.overlap` the two of a pair are one action. Else one runs after the other, so nothing overlaps within
    it, and two more rounds have messages: the program's clock is not shorter, the asynchronous one only where a message
    takes more than a forward.

    Any D >= 1, N >= 1, v >= 1. Where N is not a multiple of `group_size`, the last group is built whole and its surplus
    microbatches are dropped: Megatron's short last group deadlocks, for example for D=8, N=12. With v=1 the order is
    1F1B that runs up to D-1 more forwards ahead than it needs.

    Args:
        num_chunks: v, stages on each device, 1 or more.
        group_size: microbatches that a chunk runs before the next chunk has its turn; `num_devices` or more, which is
            also the default.
        extra_warm_up: whether each device runs one forward more before its first backward.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC
    2021, section 2.2; warm-up count and groups as in Megatron-LM; the peak at D microbatches as in BitPipe, arXiv
    2410.19367, Table 2, the other one as in PipeOffload, arXiv 2503.01328. `extra_warm_up`: Kimi K2, arXiv 2507.20534,
    Figure 7 ("VPP + 1 warmup"); Megatron-LM's count with `overlap_moe_expert_parallel_comm`.
    """
    group_size = group_size or num_devices
    # A short last group deadlocks, so a whole one is built.
    num_built = next_multiple(num_microbatches, group_size)
    rows = tuple(
        interleaved_row(
            device,
            num_devices,
            num_built,
            num_chunks,
            group_size,
            num_ahead=2 * (num_devices - 1 - device) + (num_chunks - 1) * group_size + int(extra_warm_up),
        )
        for device in range(num_devices)
    )
    rows = drop_padding(rows, num_microbatches=num_microbatches)
    return Schedule("interleaved_1f1b", looped(num_devices, num_chunks), num_microbatches, rows)


def interleaved_row(
    device: int, num_devices: int, num_microbatches: int, num_chunks: int, group_size: int, *, num_ahead: int
) -> tuple[Action, ...]:
    """Returns the row of a device that runs `num_ahead` forwards, then forwards and backwards in turn.

    For each group, forwards run chunk by chunk, backwards likewise, the last chunk first.
    """
    forwards = []
    backwards = []
    for first in range(0, num_microbatches, group_size):
        for chunk in range(num_chunks):
            forward_stage = num_devices * chunk + device
            backward_stage = num_devices * (num_chunks - 1 - chunk) + device
            for m in range(first, first + group_size):
                forwards.append(Action(Kind.F, forward_stage, m))
                backwards.append(Action(Kind.B, backward_stage, m))
    # With few microbatches a device may run all its forwards before its first backward.
    num_warm_up = min(num_ahead, len(forwards))
    row = forwards[:num_warm_up]
    # Not strict: the backwards that have no forward beside them are the drain, below.
    for forward, backward in zip(forwards[num_warm_up:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - num_warm_up :])


def _check(num_devices: int, options: Options) -> None:
    group_size = options["group_size"]
    num_chunks = options["num_chunks"]
    if group_size is None:
        return
    at_least(num_devices, why=_WHY)("interleaved_1f1b", "group_size", group_size)
    # A group is built whole, of however few microbatches.
    sizes = {"num_chunks": num_chunks, "group_size": group_size}
    check_sizes("interleaved_1f1b", num_devices=num_devices, num_microbatches=1, **sizes)
    if num_chunks == 1:
        raise ScheduleError(
            f"group_size={group_size} for schedule 'interleaved_1f1b' with num_chunks=1.",
            rule="group-binds: a group is what one chunk runs before the next has its turn; one chunk has none",
            repair="leave group_size out, or set num_chunks=2 or more",
        )


def _peak_of_one_group(d: int, n: int, o: Options) -> tuple[float, float] | None:
    v = o["num_chunks"]
    group = o["group_size"] or d
    # No device stores more than D microbatches, all that there are.
    return (min(((v - 1) * d + 1 + o["extra_warm_up"]) / v, d), d) if n == d == group else None


def _peak_of_groups(d: int, n: int, o: Options, *, extra_warm_up: bool) -> tuple[float, float] | None:
    v = o["num_chunks"]
    group = o["group_size"] or d
    if o["extra_warm_up"] != extra_warm_up or n < 2 * group:
        return None
    of_others = (v - 1) * group + int(extra_warm_up)
    return (of_others + 1) / v, (of_others + 2 * d - 1) / v


METHOD = Method(
    name="interleaved_1f1b",
    generator=interleaved_1f1b,
    summary="1F1B over v stages on each device, in Megatron's order",
    paper="Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021",
    options=(
        # The planner's and search's values: beyond eight chunks a bubble that is small already gets little smaller.
        Option("num_chunks", at_least(1), values=(2, 3, 4, 5, 6, 8), others=(1,), multiplies=True, note="v"),
        Option("group_size", at_least(1), others=(9,), default_text="D"),
        # Not for the planner but with pairs: on the program's clock it is never shorter, and stores more.
        Option(
            "extra_warm_up", check_truth, values=(False, True), planned=(), makes_room=True, note="or `true` as Kimi K2"
        ),
    ),
    check=_check,
    period=lambda num_devices, options: options["group_size"] or num_devices,
    is_baseline=True,
    bubble=(
        Formula(
            "(D-1)/(vN+D-1)",
            lambda d, n, o: (d - 1) / (o["num_chunks"] * n + d - 1) if n % (o["group_size"] or d) == 0 else None,
            where="N a multiple of the group size",
            source=TABLE_2,
        ),
    ),
    peak=(
        Formula("((v-1)D+1)/v..D", _peak_of_one_group, where="N = D", source=TABLE_2),
        Formula(
            "((v-1)D+1)/v..((v+1)D-1)/v",
            partial(_peak_of_groups, extra_warm_up=False),
            where="N >= 2D; with groups of G: ((v-1)G+1)/v..((v-1)G+2D-1)/v, N >= 2G",
            source="PipeOffload, arXiv 2503.01328",
        ),
        Formula(
            "((v-1)D+2)/v..(2(D-1)+(v-1)D+2)/v",
            partial(_peak_of_groups, extra_warm_up=True),
            where="extra_warm_up, N >= 2D, or with groups of G (v-1)G in place of (v-1)D, N >= 2G",
            source="Kimi K2, arXiv 2507.20534: one forward more than Megatron-LM's",
        ),
    ),
    messages=(
        Formula(
            "4N+4(D-1)",
            lambda d, n, o: 4 * n + 4 * (d - 1) if o["num_chunks"] == 2 else None,
            where="v=2",
            source=TABLE_6,
        ),
    ),
)
