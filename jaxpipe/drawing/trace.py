"""A timeline as Chrome trace events, to open in Perfetto or chrome://tracing."""

from __future__ import annotations

from jaxpipe.drawing.tracks import Tracks
from jaxpipe.schedules import NO_MICROBATCH, Kind, Timeline
from jaxpipe.schedules.schedule import COMPUTE_KINDS

TRACE_TIME_PER_UNIT = 1000.0  # the format counts microseconds: one unit of cost is shown as 1 ms


def chrome_trace(timeline: Timeline) -> list[dict[str, object]]:
    """Trace events, one complete event per action; `json.dumps` writes the file.

    Every device is a named thread. A device that exchanges activations or gradients with its partner has a second
    thread for them, next to its own.

    Args:
        timeline: a timeline from `simulate(schedule, costs)`.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> event = chrome_trace(simulate(build("gpipe", num_devices=1, num_microbatches=1)))[-1]
        >>> event["name"], event["ts"], event["dur"]
        ('0B0', 1000.0, 2000.0)
    """
    schedule = timeline.schedule
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": schedule.name}}]
    for place, (thread, name) in enumerate(_threads(timeline).items()):
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
                    "tid": device + schedule.num_devices * (action.kind not in COMPUTE_KINDS),
                    "args": args,
                }
            )
            index += 1
    return events


def _threads(timeline: Timeline) -> dict[int, str]:
    """Thread -> name, in the order in which they are shown; the second thread of device d is num_devices + d."""
    schedule = timeline.schedule
    names: dict[int, str] = {}
    for device, has_transfers in enumerate(Tracks(schedule).has_thin.tolist()):
        names[device] = f"device {device}"
        if has_transfers:
            names[schedule.num_devices + device] = (
                f"device {device} with device {schedule.placement.partner_of(device)}"
            )
    return names
