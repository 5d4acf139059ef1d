"""The rule against deadlock: does every device come to the end of its row?"""

from __future__ import annotations

from collections.abc import Iterator

from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.dependencies import dependencies
from jaxpipe.schedules.rules.view import View
from jaxpipe.schedules.rules.violation import Violation
from jaxpipe.schedules.schedule import Schedule


def acyclic(view: View) -> Iterator[Violation]:
    """One circle of devices that wait for each other, if there is any."""
    schedule = view.schedule
    message = dependencies(schedule).message.tolist()
    blocked = _blocked(schedule, message)
    if not blocked:
        return
    # Every message of a complete schedule has a sender, and it stands at or after the position at which
    # its own device is blocked: so following senders from any blocked device comes round.
    device_of = view.columns.device
    device, seen = next(iter(blocked)), []
    while device not in seen:
        seen.append(device)
        device = int(device_of[message[blocked[device]]])
    circle = seen[seen.index(device) :]
    waits = "; ".join(
        f"{view.where(blocked[d])}: {view.action(blocked[d])} waits for {view.action(message[blocked[d]])} "
        f"({view.where(message[blocked[d]])})"
        for d in circle
    )
    # Moving one sender ahead of what blocks its device opens the circle; a forward may always be moved so.
    senders = [message[blocked[d]] for d in circle]
    sender = next((i for i in senders if view.action(i).kind is Kind.F), senders[0])
    before = view.place(blocked[view.place(sender)[0]])
    yield Violation(
        "acyclic",
        waits,
        f"move {view.action(sender)} from position {view.place(sender)[1]} of device {before[0]} "
        f"to before position {before[1]}",
        tuple(view.place(blocked[d]) for d in circle),
    )


def _blocked(schedule: Schedule, message: list[int]) -> dict[int, int]:
    """Device -> index of the action at which it is stuck, for the devices that cannot go on.

    Only messages are looked at: the rules on order have seen to what is kept on the device itself.
    """
    first = schedule.columns.first.tolist()
    done = bytearray(len(message) + 1)
    done[-1] = True  # what waits for no message has message -1
    position, num_left, num_left_before = first[:-1], len(message), -1
    while num_left != num_left_before:
        num_left_before = num_left
        for device, start in enumerate(position):
            i, end = start, first[device + 1]
            while i < end and done[message[i]]:
                done[i] = True
                i += 1
            position[device] = i
            num_left -= i - start
    return {device: i for device, i in enumerate(position) if i < first[device + 1]}
