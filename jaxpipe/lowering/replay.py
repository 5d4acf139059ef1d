"""The SPMD clock: the times of a round table as the program executes it.

Every device runs the rounds in order. The permutes of a round start with it and end before the next; a
permute couples exactly its pairs; each device of a pair waits for the other to start the round
(rendezvous); the permutes of a device run one after the other. Pairs couple in every round of their type,
whether a message travels or not, just as in the program. Where permutes block, the action begins only when those of its
round are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.permutes import Pair
from jaxpipe.lowering.table import RoundTable
from jaxpipe.schedules.analysis.costs import Costs


@dataclass(frozen=True, eq=False)
class Replay:
    """Times of every round of a table under some costs."""

    start: np.ndarray  # [R, D]
    end: np.ndarray  # [R, D] when the device proceeds to the next round

    @property
    def makespan(self) -> float:
        """Time at which the last device ends its last round."""
        return float(self.end[-1].max())


def replay(table: RoundTable, costs: Costs | None = None, *, blocking: bool = False) -> Replay:
    """The times of every round of `table` on every device.

    Args:
        table: a lowered schedule.
        costs: costs of actions and transfers; by default a backward takes two forwards, and transfers take no time.
        blocking: whether a permute holds up both of its devices, as gloo's does in a process of one thread.

    Example:
        One microbatch on two devices: F 1, B 2, a message 0.25. F, message, F, B, message, B.

        >>> from jaxpipe.lowering import lower
        >>> from jaxpipe.schedules import build
        >>> table = lower(build("gpipe", num_devices=2, num_microbatches=1))
        >>> replay(table, Costs(transfer=0.25)).makespan
        6.5
    """
    starts, ends = _replay(table, [costs or Costs()], blocking=blocking)
    return Replay(starts[:, 0], ends[:, 0])


def replay_makespans(table: RoundTable, costs: Sequence[Costs], *, blocking: bool = False) -> np.ndarray:
    """The makespan of `table` under each of `costs`, computed in one pass, [costs]."""
    return _replay(table, costs, blocking=blocking)[1][-1].max(axis=-1)


def _replay(table: RoundTable, costs: Sequence[Costs], *, blocking: bool) -> tuple[np.ndarray, np.ndarray]:
    """[R, costs, D] start and end of every round."""
    schedule = table.schedule
    durations = np.stack([table.durations(c) for c in costs], axis=1)
    for transfer in table.kinds_of_traffic:
        for index, c in enumerate(costs):
            exposed = transfer.exposed(table, c)
            # 0 for nearly all, and the arrays are the largest of all.
            if np.any(exposed):
                durations[:, index] += exposed
    links = np.stack([c.of_link(schedule.num_devices) for c in costs])
    # [type] the devices that each meets in every permute and collective of its rounds, and for how long.
    of_type: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(table.num_types)]
    for name, transfer in table.transfers.items():
        times = np.stack(
            [transfer.duration(link, c, table.layers_per_stage) for link, c in zip(links, costs, strict=True)]
        )
        num_collectives = transfer.num_collectives(table).tolist()
        for of_round, lanes, num_meetings in zip(of_type, table.permutes[name], num_collectives, strict=True):
            of_round += [_rendezvous(pairs, times) for pairs in lanes]
            of_round += [_meeting(times)] * num_meetings

    starts = np.empty_like(durations)
    ends = np.empty_like(durations)
    now = np.zeros(durations.shape[1:])
    for r, round_type in enumerate(table.round_type.tolist()):
        # Permutes begin with the round, one after the other on each device.
        starts[r] = transferred = now
        for partner, transfer in of_type[round_type]:
            transferred = (transferred[:, partner] + transfer).max(axis=1)
        now = transferred + durations[r] if blocking else np.maximum(now + durations[r], transferred)
        ends[r] = now
    return starts, ends


def _rendezvous(pairs: tuple[Pair, ...], links: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[3, D] the devices that a device meets in a permute (itself, its target, its source); [costs, 3, D] for how long.

    A device without a partner is paired with itself at zero cost; it proceeds once both its send and its receive are
    complete.
    """
    num_costs, num_devices = links.shape[:2]
    partner = np.tile(np.arange(num_devices), (3, 1))
    transfer = np.zeros((num_costs, 3, num_devices))
    for source, target in pairs:
        partner[1, source] = target
        transfer[:, 1, source] = links[:, source, target]
        partner[2, target] = source
        transfer[:, 2, target] = links[:, source, target]
    # Row 0 is the device itself, which waits for the longer of send and receive.
    transfer[:, 0] = transfer.max(axis=1)
    return partner, transfer


def _meeting(links: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same, [D, D] and [costs, 1, 1], for a collective over all devices: the time of the slowest link."""
    num_devices = links.shape[-1]
    all_devices = np.repeat(np.arange(num_devices)[:, None], num_devices, axis=1)
    return all_devices, links.max(axis=(1, 2))[:, None, None]
