"""Activation balancing: no device stores more than a bound, because its partner keeps the rest (BPipe), or its host.

Goes in: a schedule in which some devices store much more than others. Comes out: the same schedule with EVICT and LOAD,
the order of computation unchanged. Left to others: the pages and rounds of transfers (the lowering), and the places of
devices (the mesh).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.activations import peak_activations
from jaxpipe.schedules.methods.option import at_least, one_of
from jaxpipe.schedules.passes.eviction_plans import (
    EvictionPlan,
    activation_lifetimes,
    microbatch_plan,
    page_plan,
    with_transfers,
)
from jaxpipe.schedules.passes.overlap import check_apart
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import GRADIENT_KINDS, HOST, PARTNER, Kind, Schedule

UNITS = ("page", "microbatch")
POLICIES = ("latest", "oldest")
PLACES = (PARTNER, HOST)


def balance(
    schedule: Schedule,
    *,
    bound: int | None = None,
    unit: str = "page",
    policy: str = "latest",
    overlapped: bool = True,
    to: str = PARTNER,
) -> Schedule:
    """Returns `schedule` with EVICT and LOAD, so that no device stores more than `bound` slots at once.

    Device d is paired with D-1-d. Device 0 of 1F1B, D=4, N=8, bound 3, by whole microbatches:

        0F0 0F1 0EVICT1 0F2 0F3 0EVICT3 0B0 0LOAD1 0F4 0B1 0F5 0EVICT5 0B2 0LOAD3 0F6 0B3 0EVICT6 0F7 0LOAD5 ...

    and by pages, half of each:

        0F0 0EVICT0 0F1 0EVICT1 0F2 0EVICT2 0LOAD0 0F3 0EVICT3 0B0 0LOAD1 0F4 0EVICT4 0B1 0LOAD2 0F5 0EVICT5 ...

    Why the bound holds. Let a row store at most c slots, its partner c', and let the bound be
    k = ceil((c + c' + 1) / 2). Stored slots are those that a device has computed and not freed, those
    parked with it, and those in transit, from the start of the transfer at its target and to its end
    at its source. A transfer takes no longer than one compute action.

    - `unit="page"`: EVICT_m stands directly after F_m, LOAD_x one compute action before B_x, and each moves
      the share f = (c - k) / (c - 2) of a microbatch's pages. At each moment at most two of the c
      microbatches are whole: during F_m, m itself and x, which arrives; during B_x, x itself and m, which
      leaves. (If m - 1 leaves and x arrives during one action, the second transfer waits for the
      first.) The other c - 2 have 1 - f at home: (c - 2)(1 - f) + 2 = k. The partner stores the pages
      of all but one: c' + (c - 1) f = c' + (c - k) + f <= c' + c - k + 1 <= k.
      The program moves whole pages. A stage of L layers parks floor((i + 1) f L) - floor(i f L) pages of
      its i-th microbatch: any c - 2 consecutive ones park exactly (c - k) L, so the bound holds to the page.
      If a backward is split, or chunks take turns irregularly, more than two may be whole; f is then
      the least share with which the row keeps k.
    - `unit="microbatch"`: an eviction is made only where the device would store more than k during the action
      after the one in which it travels; then it stores exactly k there. So the partner has c - k of the c and, of
      those in transit, one: a load that is due at once goes before the eviction. c' + (c - k) + 1 <= k.

    With `to="host"` every device may evict, and nothing bounds what is parked: the proof is that of above without c',
    and k is at least 2. The copies of one device follow each other, so that a copy takes no longer than an action.

    Evictions over a step at (D=4, N=16) and (8, 32), of 1F1B's stages 0, 1, 2: 8 and 15, 12, 8 whole
    microbatches; 5 and 12, 10, 6 if transfers take no time (oldest first: 14 and 28, 28, 28); by pages 16 f =
    8 and 32 f = 16, 12.8, 8 slots.

    Args:
        schedule: a legal schedule without EVICT and LOAD.
        bound: slots, the (stage, microbatch) pairs that a device may hold; by default the least one that can
            be kept, ceil((c + c' + 1) / 2) for the pair that needs most: ceil((D + 2) / 2) for 1F1B; with a host 3.
        unit: "page" moves the same share of every microbatch; "microbatch" moves whole ones, as BPipe does.
        policy: the whole microbatch to evict: the one needed last ("latest") or next ("oldest").
        to: "partner", or "host": the memory of the device's own host, from which every device gets its pages back.
        overlapped: whether transfers of whole microbatches travel during computation and count as
            stored; otherwise they take no time and no memory.

    Raises:
        ScheduleError: no device stores more than the bound, the bound cannot be kept, an option is unknown
            or without effect, or the schedule is not legal.

    Source: Kim et al., BPipe, ICML 2023 (whole microbatches, evict the latest); Wan et al., PipeOffload, ICML 2025
    (arXiv 2503.01328), for the host in place of the partner; the page form is ours.
    """
    check_options(schedule.name, unit=unit, policy=policy, overlapped=overlapped, to=to)
    if bound is not None:
        at_least(0)(schedule.name, "bound", bound)
    if to == HOST and (schedule.num_replicas > 1 or schedule.delays):
        raise ScheduleError(
            f"{schedule.name!r} has {'two replicas' if schedule.num_replicas > 1 else 'no flush'}.",
            rule=f"host-apart: to={HOST!r} is for schedules of one replica, with a flush",
            repair="leave it out, or balance another schedule, as '1f1b'",
        )
    if check(schedule).parks_pages:
        raise ScheduleError(
            f"{schedule.name!r} has EVICT and LOAD actions already.",
            rule="balance-once: a schedule to balance has no transfers yet",
            repair="balance the schedule that it was made from, with the bound that you want",
        )
    check_apart(schedule, "transfers")
    peaks = row_peaks(schedule)

    def plans(bound: int) -> dict[int, EvictionPlan] | None:
        return _plans(schedule, peaks, bound, unit=unit, policy=policy, overlapped=overlapped, to=to)

    # Upwards from the least bound that can be right: the first with plans is the least that can be kept.
    kept = max(least_bound(peaks, to), bound or 0)
    # The search ends: at the highest peak no device needs a plan.
    while (chosen := plans(kept)) is None:
        kept += 1
    if not chosen:
        raise _nothing_to_balance(schedule, peaks, kept, to)
    if bound is not None and bound < kept:
        raise _bound_too_small(schedule, peaks, bound, kept, to)
    rows = tuple(
        with_transfers(row, chosen[device].transfers) if device in chosen else row
        for device, row in enumerate(schedule.rows)
    )
    shares: tuple[Fraction, ...] = ()
    if unit == "page":
        shares = tuple(_share(schedule, chosen, stage) for stage in range(schedule.num_stages))
    places = (HOST,) * schedule.num_stages if to == HOST else ()
    return replace(schedule, name=f"{schedule.name} balanced", rows=rows, parked=shares, parked_on=places)


def row_peaks(schedule: Schedule) -> tuple[int, ...]:
    """The peak of slots on each device, [device], from its own actions; EVICT and LOAD are ignored."""
    columns = schedule.columns
    change = columns.is_kind(Kind.F).astype(int) - columns.is_kind(*GRADIENT_KINDS)
    return tuple(int(np.cumsum(row).max(initial=0)) for row in np.split(change, columns.first[1:-1]))


def least_bound(peaks: tuple[int, ...], to: str = PARTNER) -> int:
    """The least bound that may be kept: half of all slots of a pair, including one in transit, rounded up.

    A host has room for all: then two, the one that leaves and the one that comes.
    """
    if to == HOST:
        return 2
    # (c + c' + 1) / 2 rounded up, in whole numbers.
    return max((own + other + 2) // 2 for own, other in zip(peaks, reversed(peaks), strict=True))


def bound_kept(schedule: Schedule) -> int | None:
    """Slots within which a schedule with EVICT can be executed on every device; None without EVICT."""
    if not schedule.columns.is_kind(Kind.EVICT).any():
        return None
    most = peak_activations(schedule).max() * schedule.placement.num_chunks
    # Sums of shares may be just above a whole number by rounding.
    least = least_bound(row_peaks(schedule), HOST if schedule.parks_on_host else PARTNER)
    return max(least, math.ceil(most - 1e-9))


def check_options(name: str, *, unit: str, policy: str, overlapped: bool, to: str = PARTNER) -> None:
    """Raises ScheduleError for options of `balance` for the schedule `name` that are unknown or have no effect."""
    one_of(UNITS)(name, "unit", unit)
    one_of(POLICIES)(name, "policy", policy)
    one_of(PLACES)(name, "to", to)
    for setting, used in ((f"policy={policy!r}", policy != "latest"), (f"overlapped={overlapped}", not overlapped)):
        if unit == "page" and used:
            raise ScheduleError(
                f"{setting} has no effect with unit='page'.",
                rule="whole-microbatches: by pages every microbatch is evicted, while others compute",
                repair="leave it out, or set unit='microbatch'",
            )


def _plans(
    schedule: Schedule, peaks: tuple[int, ...], bound: int, *, unit: str, policy: str, overlapped: bool, to: str
) -> dict[int, EvictionPlan] | None:
    """Device -> plan, for each device that stores more than `bound`; None if one, or a pair, cannot keep it."""
    plans = {}
    for device, row in enumerate(activation_lifetimes(schedule)):
        if peaks[device] <= bound:
            continue
        if unit == "page":
            plan = page_plan(row, bound)
        else:
            plan = microbatch_plan(row, bound, policy=policy, overlapped=overlapped)
        if plan is None:
            return None
        # The partner has its own activations and what this device parks there, at worst at the same moment.
        if to == PARTNER and peaks[schedule.placement.partner_of(device)] + plan.most_parked > bound:
            return None
        plans[device] = plan
    return plans


def _share(schedule: Schedule, plans: dict[int, EvictionPlan], stage: int) -> Fraction:
    """The share of its device's plan that `stage` parks: 1 if none leaves."""
    shares = {plans[devices[stage]].share for devices in schedule.placement.devices if devices[stage] in plans}
    # All holders of a stage park the same share of it, so the larger one counts.
    return max(shares, default=Fraction(1))


# Place -> why there may be nothing to balance, and why a bound may be too small.
_RULES = {
    PARTNER: (
        "imbalance: a slot in transit counts on both devices of a pair, so balancing pays if one stores at least three "
        "more than the other; in 1F1B from num_devices=4 on",
        "room: the two devices of a pair have room for all that both store, and for a slot in transit",
    ),
    HOST: (
        "host: a microbatch leaves if its backward is at least four actions behind its forward, so that it is away "
        "while one computes",
        "room: a device has room for the microbatch that leaves, for the one that comes back, and for those that stay",
    ),
}


def _nothing_to_balance(schedule: Schedule, peaks: tuple[int, ...], bound: int, to: str) -> ScheduleError:
    return ScheduleError(
        f"nothing to balance in {_where(schedule)}: no device stores more than bound={bound} slots",
        rule=_RULES[to][0],
        picture=_picture(peaks, to),
        repair="use the schedule as it is, or give a lower bound if there is room for it",
    )


def _bound_too_small(schedule: Schedule, peaks: tuple[int, ...], bound: int, least: int, to: str) -> ScheduleError:
    return ScheduleError(
        f"bound={bound} cannot be kept in {_where(schedule)}",
        rule=_RULES[to][1],
        picture=_picture(peaks, to),
        repair=f"set bound={least}, the least that can be kept, or leave it out",
    )


def _where(schedule: Schedule) -> str:
    return f"{schedule.name!r} (num_devices={schedule.num_devices}, num_microbatches={schedule.num_microbatches})"


def _picture(peaks: tuple[int, ...], to: str) -> str:
    width = len(str(max(len(peaks) - 1, *peaks)))
    lines = [("device", range(len(peaks))), ("slots", peaks)]
    lines += [("of partner", peaks[::-1])] if to == PARTNER else []
    return "".join(f"{head:<12} {' '.join(f'{number:>{width}}' for number in numbers)}\n" for head, numbers in lines)
