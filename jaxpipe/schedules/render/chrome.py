"""A timeline as Chrome trace events, to open in Perfetto or chrome://tracing."""

from __future__ import annotations

from jaxpipe.schedules.analysis.simulate import Timeline
from jaxpipe.schedules.render.lanes import Lanes
from jaxpipe.schedules.schedule import COMPUTE_KINDS, NO_MICROBATCH, Kind, Schedule

TRACE_TIME_PER_UNIT = 1000.0  # the format counts microseconds: one unit of cost is shown as 1 ms


def chrome_trace(schedule: Schedule, timeline: Timeline) -> list[dict[str, object]]:
    """Trace events: one complete event per action; `json.dumps` writes the file.

    Every device is a named thread; one that has transfers with its partner has a second thread for them, next to it.

    Args:
        schedule: what runs.
        timeline: when, from `simulate(schedule, costs)`.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> schedule = build("gpipe", num_devices=1, num_microbatches=1)
        >>> event = chrome_trace(schedule, simulate(schedule))[-1]
        >>> event["name"], event["ts"], event["dur"]
        ('0B0', 1000.0, 2000.0)
    """
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": schedule.name}}]
    num_devices, has_moves = schedule.num_devices, Lanes(schedule).has_moves
    names: dict[int, str] = {}  # thread -> name, in the order in which they are shown
    for device in range(num_devices):
        names[device] = f"device {device}"
        if has_moves[device]:
            names[num_devices + device] = f"device {device} with device {schedule.placement.partner_of(device)}"
    for place, (thread, name) in enumerate(names.items()):
        metadata = {"ph": "M", "pid": 0, "tid": thread}
        events.append({**metadata, "name": "thread_name", "args": {"name": name}})
        events.append({**metadata, "name": "thread_sort_index", "args": {"sort_index": place}})
    start = (timeline.start * TRACE_TIME_PER_UNIT).tolist()
    duration = ((timeline.end - timeline.start) * TRACE_TIME_PER_UNIT).tolist()
    kinds = [kind.name for kind in Kind]
    index = 0
    for device, row in enumerate(schedule.rows):
        for action in row:
            args = {"stage": action.stage, "replica": action.replica}
            if action.microbatch != NO_MICROBATCH:
                args["microbatch"] = action.microbatch
            events.append(
                {
                    "name": str(action),
                    "cat": kinds[action.kind],
                    "ph": "X",
                    "ts": start[index],
                    "dur": duration[index],
                    "pid": 0,
                    "tid": device + num_devices * (action.kind not in COMPUTE_KINDS),
                    "args": args,
                }
            )
            index += 1
    return events
