"""Rules on activations that are parked elsewhere, with the paired device or the host: EVICT and LOAD move them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.rules.view import Breach, View, rule
from jaxpipe.schedules.schedule import NUMBERED_KINDS, PARKING_KINDS, Kind


@rule("parked-share", "there is one share of parked pages for each stage, above 0 and at most 1, or none at all")
def parked_share(view: View) -> Iterator[Breach]:
    """Yields fractions that are not one for each stage, or not above 0 and at most 1."""
    parked = view.schedule.parked
    num_stages = view.schedule.num_stages
    # None at all is legal: whole microbatches move.
    if parked and len(parked) != num_stages:
        yield Breach(
            f"there are {len(parked)} shares of parked pages for num_stages={num_stages}",
            f"give {num_stages} shares, or none if whole microbatches leave",
        )
    for stage, share in enumerate(parked):
        if not 0 < share <= 1:
            yield Breach(f"stage {stage} parks {share} of a microbatch", "set a share in (0, 1]")


@rule("paired", "EVICT and LOAD are between device d and device D-1-d; the middle device of odd D has no other")
def paired(view: View) -> Iterator[Breach]:
    """Yields evictions and loads of a device that is its own partner."""
    # On the host every device parks.
    if view.schedule.parks_on_host:
        return
    middle = view.columns.device == view.schedule.placement.partner_of(view.columns.device)
    for index in np.flatnonzero(view.is_placed & middle & view.columns.is_kind(*PARKING_KINDS)).tolist():
        other = "LOAD" if view.action(index).kind is Kind.EVICT else "EVICT"
        what = f"moves activations of device {view.place(index)[0]} to itself"
        yield view.breach(index, what, f"remove it and its {other}")


@rule(
    "evict-load",
    "of one (stage, microbatch), EVICT follows the F, LOAD follows its EVICT, and the backward follows the LOAD",
)
def evict_load(view: View) -> Iterator[Breach]:
    """Yields evictions, loads and backwards that find the activations elsewhere."""
    columns = view.columns
    is_moved = view.is_placed & columns.is_kind(*PARKING_KINDS)
    if not is_moved.any():
        return
    # Most microbatches never move; only the histories of these are followed.
    moved = set(zip(columns.stage[is_moved].tolist(), columns.microbatch[is_moved].tolist(), strict=True))
    histories: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in np.flatnonzero(view.is_placed & columns.is_kind(*NUMBERED_KINDS)).tolist():
        key = (int(columns.stage[index]), int(columns.microbatch[index]))
        if key in moved:
            histories[key].append(index)
    for history in histories.values():
        yield from _evict_load_of_one(view, history)


def _evict_load_of_one(view: View, history: list[int]) -> Iterator[Breach]:
    """Violations in the actions of one (stage, microbatch), in row order."""
    # absent -> stored (F) -> parked (EVICT) -> stored (LOAD) -> given back (backward); an I gives nothing back.
    state = "absent"
    for index in history:
        action = view.action(index)
        if action.kind is Kind.F:
            state = "stored"
        elif action.kind in PARKING_KINDS:
            needed = "stored" if action.kind is Kind.EVICT else "parked"
            if state != needed:
                other = "the F or LOAD" if action.kind is Kind.EVICT else "the EVICT"
                place = "before the backward" if state == "given back" else f"after {other} that it belongs to"
                what = f"finds the activations {state}, not {needed}"
                yield view.breach(index, what, f"move it to {place}, or remove it")
            # Go on as if it had been right, so that one mistake is reported once.
            state = "parked" if action.kind is Kind.EVICT else "stored"
        elif state == "parked":
            repair = f"put {action._replace(kind=Kind.LOAD)} before position {view.place(index)[1]}"
            yield view.breach(index, "needs activations that are still parked", repair)
        elif action.kind is not Kind.I:
            state = "given back"
