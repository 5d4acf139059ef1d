"""Schedules as users may write them: any placement of one replica, rows in any order that can run."""

import random

from jaxpipe.schedules import REGISTRY, Action, Kind, Placement, Schedule, check, linear, parse_action

LEAST_DEVICES = {"bpipe": 4}

PLACEMENTS = {
    "one device": linear(1),
    "linear": linear(3),
    "three chunks on one device": Placement(1, ((0, 0, 0),)),
    "looping": Placement(3, ((0, 1, 2, 0, 1, 2),)),
    "V": Placement(2, ((0, 1, 1, 0),)),
    "back and forth": Placement(3, ((0, 2, 1, 1, 0, 2),)),
}


def registered(*num_devices: int) -> list[tuple[str, int]]:
    """(name, number of devices) of registered schedules, where they exist."""
    return [(name, d) for name in sorted(REGISTRY) for d in num_devices if d >= LEAST_DEVICES.get(name, 1)]


def random_schedule(placement: Placement, *, num_microbatches: int, seed: int) -> Schedule:
    """Rows in the order in which a random device takes a random action that is ready, over and over."""
    generator = random.Random(seed)
    last_stage = placement.num_stages - 1
    ready = [Action(Kind.F, 0, microbatch) for microbatch in range(num_microbatches)]
    rows: list[list[Action]] = [[] for _ in range(placement.num_devices)]
    while ready:
        action = ready.pop(generator.randrange(len(ready)))
        rows[placement.device_of(action.stage)].append(action)
        kind, stage, microbatch, _ = action
        if kind is Kind.F:
            ready.append(Action(Kind.F, stage + 1, microbatch) if stage < last_stage else action._replace(kind=Kind.B))
        elif stage > 0:
            ready.append(Action(Kind.B, stage - 1, microbatch))
    return check(Schedule(f"random {seed}", placement, num_microbatches, tuple(map(tuple, rows))))


def handwritten_v() -> Schedule:
    """Four stages in a V on two devices: stages 1 and 2 hand over on device 1, without a transfer."""
    rows = (
        "0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2",
        "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2",
    )
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return check(Schedule("handwritten V", PLACEMENTS["V"], 3, actions))
