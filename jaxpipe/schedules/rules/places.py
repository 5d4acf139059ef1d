"""The rule on the place where activations are parked: with the paired device, or in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpipe.schedules.rules.view import Breach, View, rule
from jaxpipe.schedules.schedule import HOST, PARTNER


@rule(
    "parked-place",
    f"activations of all stages are parked with the {PARTNER}, or of all on the {HOST}; of two replicas, and without "
    f"flush, with the {PARTNER}",
)
def parked_place(view: View) -> Iterator[Breach]:
    """Yields places that are not one for all stages, or unknown, and what does not compose with the host."""
    schedule = view.schedule
    places = schedule.parked_on
    if not places:
        return
    if places not in ((HOST,) * schedule.num_stages, (PARTNER,) * schedule.num_stages):
        what = f"there are the places {' '.join(map(str, places))} for num_stages={schedule.num_stages}"
        yield Breach(what, f"name {HOST} or {PARTNER} {schedule.num_stages} times, or nothing for {PARTNER}")
    if HOST in places:
        for what, is_there in (("two replicas", schedule.num_replicas > 1), ("no flush", bool(schedule.delays))):
            if is_there:
                yield Breach(f"a schedule with {what} parks on the {HOST}", "leave the places out")
