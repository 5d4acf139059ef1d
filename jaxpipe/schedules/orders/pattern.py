"""What all microbatches have in common: when the steps of one are planned, and how far apart microbatches start.

Goes in: a few numbers. Comes out: a `Guide` for `greedy`. Which numbers are good, `capped_search` knows for some
schedules, and the search tries. A pattern says what the building blocks of controllable
memory (Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024) say: how long a microbatch takes for
each hop sets how long each device stores it. Here it is a preference, not a timetable: devices do what is ready.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.schedules.orders.device import Guide
from jaxpipe.schedules.orders.shop import Shop

NEVER_FIRST = 1000.0  # intervals: W only where nothing else is ready


@dataclass(frozen=True)
class Pattern:
    """Preferences in a form that can be drawn and varied; intervals are those of `Shop.interval`.

    Attributes:
        hops: [pass] what a step is planned to take, in its own durations; a pass is D steps of a chain.
        turn: intervals between the last F and the first I.
        weight_delay: intervals from the start of an I to that of its W.
        spacing: intervals between the starts of chains; 0 lets them start whenever they can.
        burst: chains that may start before that.
        forward_wait, weight_wait: of `Guide`.
        room: forwards by which the quotas of a device's stages, in proportion to how long each is planned to be stored,
            exceed what fits; no quotas below 0.
        shifts: [step] ticks added to the plan; none if empty.
    """

    hops: tuple[float, ...]
    turn: float = 0.0
    weight_delay: float = NEVER_FIRST
    spacing: float = 0.0
    burst: float = 0.0
    forward_wait: float = 0.0
    weight_wait: float = 0.0
    room: int = -1
    shifts: tuple[int, ...] = ()

    def guide(self, shop: Shop) -> Guide:
        """What devices of `shop` go by."""
        plan, interval = self._plan(shop), shop.interval
        quotas = _quotas(shop, plan, self.room) if self.room >= 0 else ()
        if self.shifts:
            plan = [at + shift for at, shift in zip(plan, self.shifts, strict=True)]
        keys = [chain * interval + at for chain in range(shop.num_chains) for at in plan]
        release = [
            max(0, int((chain - self.burst) * interval * self.spacing)) if self.spacing else 0
            for chain in range(shop.num_chains)
        ]
        return Guide(keys, release, quotas, self.forward_wait, self.weight_wait)

    def _plan(self, shop: Shop) -> list[int]:
        """[step] ticks after the start of its chain."""
        num_stages, num_devices = shop.placement.num_stages, shop.placement.num_devices
        plan, at = [], 0
        for step in range(2 * num_stages):
            if step == num_stages:
                at += int(self.turn * shop.interval)
            plan.append(at)
            at += int(shop.duration[step] * self.hops[step // num_devices])
        delay = int(self.weight_delay * shop.interval)
        return (plan + [at + delay for at in plan[num_stages:]])[: shop.num_steps]


def plain(shop: Shop) -> Pattern:
    """As if nothing ever waited; without quotas, so that `greedy` always comes to an end."""
    return Pattern((1.0,) * (2 * shop.placement.num_chunks))


def _quotas(shop: Shop, plan: list[int], room: int) -> list[list[int]]:
    """[device][slot] forwards it may hold, in proportion to how long the plan stores them; one at least."""
    num_stages = shop.placement.num_stages
    fits = shop.sizes.num_forwards
    last = [plan[2 * num_stages - 1 - stage] + shop.duration[2 * num_stages - 1 - stage] for stage in range(num_stages)]
    quotas = []
    for stages in shop.placement.stages_of:
        stays = [max(1, last[stage] - plan[stage] + shop.duration[-1]) for _, stage in stages]
        shares = [(fits + room) * stay / sum(stays) for stay in stays]
        counts = [max(1, int(share)) for share in shares]
        by_rest = sorted(range(len(shares)), key=lambda slot: counts[slot] - shares[slot])
        for extra in range(fits + room - sum(counts)):
            counts[by_rest[extra % len(counts)]] += 1
        quotas.append([min(count, fits) for count in counts])
    return quotas
