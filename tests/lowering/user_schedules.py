"""Schedules as users may write them: any placement, rows in any order that can run, SYNCs anywhere behind backwards."""

import random

from jaxpipe.schedules import (
    Action,
    Kind,
    Placement,
    Schedule,
    bidirectional,
    check,
    linear,
    looped,
    parse_action,
    zig_zag,
)

PLACEMENTS = {
    "one device": linear(1),
    "linear": linear(3),
    "three chunks on one device": Placement(1, ((0, 0, 0),)),
    "looping": looped(3, 2),
    "V": zig_zag(2, 2),
    "back and forth": Placement(3, ((0, 2, 1, 1, 0, 2),)),
}

TWO_WAYS = {
    "two lines": bidirectional(linear(4)),
    "two loops": bidirectional(looped(2, 3)),
    "two Vs": bidirectional(zig_zag(4, 2)),
    "two back and forth": bidirectional(Placement(4, ((3, 0, 2, 1, 1, 3, 0, 2),))),
}


def random_schedule(
    placement: Placement, *, num_microbatches: int, seed: int, has_syncs: bool = False, split_fraction: float = 0.0
) -> Schedule:
    """Rows in the order in which a random device takes a random action that is ready, over and over.

    Each microbatch runs in a random replica. A SYNC stands anywhere behind the last backward of its stage and replica.
    A fraction `split_fraction` of the backwards is split into I and W.
    """
    generator = random.Random(seed)
    last_stage = placement.num_stages - 1
    replicas = [generator.randrange(placement.num_replicas) for _ in range(num_microbatches)]
    ready = [Action(Kind.F, 0, microbatch, replica) for microbatch, replica in enumerate(replicas)]
    rows: list[list[Action]] = [[] for _ in range(placement.num_devices)]
    while ready:
        action = ready.pop(generator.randrange(len(ready)))
        kind, stage, _, replica, _ = action
        rows[placement.device_of(stage, replica)].append(action)
        if kind is Kind.F and stage < last_stage:
            ready.append(action._replace(stage=stage + 1))
        elif kind is Kind.F or (kind is not Kind.W and stage > 0):
            backward = Kind.I if split_fraction and generator.random() < split_fraction else Kind.B
            ready.append(action._replace(kind=backward, stage=last_stage if kind is Kind.F else stage - 1))
        if kind is Kind.I:
            ready.append(action._replace(kind=Kind.W))
    if has_syncs:
        for row, held in zip(rows, placement.stages_of, strict=True):
            for replica, stage in held:
                own = [i for i, action in enumerate(row) if (action.replica, action.stage) == (replica, stage)]
                position = generator.randint(own[-1] + 1 if own else 0, len(row))
                row.insert(position, Action(Kind.SYNC, stage, replica=replica))
    return check(Schedule(f"random {seed}", placement, num_microbatches, tuple(map(tuple, rows))))


def handwritten_v() -> Schedule:
    """Four stages in a V on two devices: stages 1 and 2 hand over on device 1, without a transfer."""
    rows = (
        "0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2",
        "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2",
    )
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return check(Schedule("handwritten V", PLACEMENTS["V"], 3, actions))
