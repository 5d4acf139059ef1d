"""Schedules other than 1F1B in which early devices store more than late ones."""

from collections.abc import Sequence

from jaxpipe.schedules import Action, Kind, Placement, Schedule, check, linear


def one_f_one_b_with_warm_up(nums_warm_up: Sequence[int], *, num_microbatches: int) -> Schedule:
    """1F1B with as many forwards ahead as each device is told, falling from device to device."""
    rows = []
    for stage, num_ahead in enumerate(nums_warm_up):
        ahead = min(num_ahead, num_microbatches)
        row = [Action(Kind.F, stage, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if ahead + m < num_microbatches:
                row.append(Action(Kind.F, stage, ahead + m))
            row.append(Action(Kind.B, stage, m))
        rows.append(tuple(row))
    return check(Schedule("warm-up", linear(len(rows)), num_microbatches, tuple(rows)))


def interleaved(*, num_devices: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Interleaved 1F1B as Megatron-LM orders it; `num_microbatches` is a multiple of `num_devices`.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, section 2.2.
    """
    num_actions = num_microbatches * num_chunks

    def action(kind: Kind, device: int, index: int) -> Action:
        group, rest = divmod(index, num_devices * num_chunks)
        chunk, microbatch = divmod(rest, num_devices)
        chunk = chunk if kind is Kind.F else num_chunks - 1 - chunk
        return Action(kind, chunk * num_devices + device, group * num_devices + microbatch)

    rows = []
    for device in range(num_devices):
        ahead = min((num_devices - device - 1) * 2 + (num_chunks - 1) * num_devices, num_actions)
        row = [action(Kind.F, device, i) for i in range(ahead)]
        for i in range(num_actions):
            if ahead + i < num_actions:
                row.append(action(Kind.F, device, ahead + i))
            row.append(action(Kind.B, device, i))
        rows.append(tuple(row))
    placement = Placement(num_devices, (tuple(range(num_devices)) * num_chunks,))
    return check(Schedule("interleaved", placement, num_microbatches, tuple(rows)))


def with_split_backward(schedule: Schedule, *, num_late: int) -> Schedule:
    """Each B as I and W, the W `num_late` backwards later."""
    rows = []
    for row in schedule.rows:
        new, open_ = [], []
        for action in row:
            if action.kind is not Kind.B:
                new.append(action)
                continue
            new.append(action._replace(kind=Kind.I))
            open_.append(action._replace(kind=Kind.W))
            if len(open_) > num_late:
                new.append(open_.pop(0))
        rows.append((*new, *open_))
    return check(Schedule("split", schedule.placement, schedule.num_microbatches, tuple(rows)))
