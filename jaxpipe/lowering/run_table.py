"""The round table of a run without flush, cut along time into the calls of one program.

A call has equally many rounds for each microbatch of a batch, and those of all calls have the same types. Call w begins
with the first forward of batch w on the first device; the later ones still work on batch w-1 then. So a device's line
of a call holds the end of one batch and the beginning of the next, and what is in flight goes from call to call. Call 0
fills the pipeline, the last one drains it, and all others are equal: the program runs the middle one again and again.

Three rounds of each call are for all devices together. In the first the last stage gives up the head's gradient of
batch w-1, which is complete, before its first forward of batch w; in the second all others give up theirs of embedding
and head; in the third all devices learn whether these are finite, and what the batch measured, and update the
parameters that all stages share. The collectives begin with the round, beside an action that is under way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.errors import ScheduleError, explain
from jaxpipe.lowering.exchange import NO_EXCHANGE
from jaxpipe.lowering.pages import Pages
from jaxpipe.lowering.parking import NO_PARKED_PAGES
from jaxpipe.lowering.replay import replay
from jaxpipe.lowering.rounds import REMOTE_ROUNDS, periodic_rounds
from jaxpipe.lowering.table import RoundTable
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Kind, Schedule

NO_EVENT, COLLECT_HEAD, COLLECT_OTHERS, UPDATE_SHARED = range(4)
MEETINGS = (COLLECT_HEAD, COLLECT_OTHERS, UPDATE_SHARED)  # in the order of a call
FILL, STEADY, DRAIN = range(3)  # forms of a call
_TOLERANCE = 1e-9  # of makespans


@dataclass(frozen=True, eq=False, kw_only=True)
class RunTable(RoundTable):
    """A round table of several calls.

    Attributes:
        event: [R] what all devices do together in a round.
        num_calls: calls, one more than batches.
    """

    event: np.ndarray
    num_calls: int

    @property
    def rounds_per_call(self) -> int:
        """Rounds of one call."""
        return self.num_rounds // self.num_calls

    @property
    def num_versions(self) -> int:
        """Versions of the layers' weights that a device computes with."""
        return 1 + max(self.schedule.delays)

    @cached_property
    def event_of_type(self) -> tuple[int, ...]:
        """[type] the event of its rounds."""
        return tuple(int(self.event[self.round_type == index].max()) for index in range(self.num_types))

    @cached_property
    def collectives_of_type(self) -> np.ndarray:
        """[type, 1] whether all devices meet in its rounds."""
        return np.array([[event != NO_EVENT] for event in self.event_of_type])

    @property
    def calls(self) -> tuple[slice, ...]:
        """[form] the rounds of the call that fills, of one in the middle, and of the one that drains."""
        size = self.rounds_per_call
        return tuple(slice(call * size, (call + 1) * size) for call in (0, 1, self.num_calls - 1))

    @cached_property
    def lap(self) -> np.ndarray:
        """[R, D] calls since the batch of the action began: 0 for the newest batch, 1 for the one before."""
        columns = self.schedule.columns
        batch = np.where(
            columns.kind == Kind.UPDATE, columns.microbatch, columns.microbatch // self.schedule.batch_size
        )
        return self.grid(self.rounds // self.rounds_per_call - batch, otherwise=0)

    @cached_property
    def microbatch(self) -> np.ndarray:
        """[R, D] microbatch of the action, counted in its batch; 0 where idle, and for UPDATE."""
        columns = self.schedule.columns
        is_update = columns.kind == Kind.UPDATE
        return self.grid(np.where(is_update, 0, columns.microbatch % self.schedule.batch_size), otherwise=0)

    @cached_property
    def pages(self) -> Pages:
        """Pages of call 0, modulo their number; those of call w are N w slots further.

        Microbatches come and go in turn, so that a few slots serve them in turn, whatever N.
        """
        columns, num_layers = self.schedule.columns, max(self.layers_per_stage)
        num_slots = slots_in_turn(self.schedule, self.rounds)
        first = self.rounds // self.rounds_per_call * self.schedule.batch_size
        is_update = columns.kind == Kind.UPDATE
        slot = self.grid(np.where(is_update, 0, (columns.microbatch - first) % num_slots), otherwise=0)
        of_layer = (slot[:, :, None] * num_layers + np.arange(num_layers)).astype(np.int32)
        none, lanes = np.zeros(slot.shape, np.int32), np.zeros((*slot.shape, 0), np.int32)
        return Pages(of_layer, lanes, none, lanes, none, num_slots * num_layers, num_slots)


def slots_in_turn(schedule: Schedule, rounds: np.ndarray) -> int:
    """The fewest slots that serve the microbatches of every device in turn.

    Args:
        schedule: one stage on each device.
        rounds: [A] round of each action.
    """
    columns, most = schedule.columns, 1
    for stage in range(schedule.num_stages):
        # Both rise, since each device takes the microbatches in turn.
        start, end = (rounds[(columns.stage == stage) & (columns.kind == kind)] for kind in (Kind.F, Kind.B))
        held = np.searchsorted(start, end, side="right") - np.arange(len(end))
        most = max(most, int(held.max()))
    return most


def lower_run(
    schedule: Schedule,
    *,
    layers_per_stage: tuple[int, ...] | None = None,
    costs: Costs | None = None,
    blocking: bool = False,
) -> RunTable:
    """Lowers a schedule of several batches without flush.

    Rounds follow time, two for each forward, so that all devices are in the same rounds when they meet: an action
    stands at the end of its length, in an even round, its message and an UPDATE in the odd one after it. A device that
    is in the middle of a longer action when all meet does it in their round, so that nobody waits for it.

    Args:
        schedule: a schedule that keeps the rules, of two batches or more, each of N >= D microbatches.
        layers_per_stage: [stage] layers; by default one per stage.
        costs: expected costs of actions; by default a backward takes two forwards.
        blocking: whether a permute holds up both of its devices. Then an action cannot run beside a meeting, and
            meetings stand where they cost the least by that clock.

    Raises:
        ScheduleError: its devices do not do one F and one B in turn.

    Example:
        Two devices, two microbatches a batch: a call has 6 x 2 rounds and the three of all devices.

        >>> from jaxpipe.schedules import build
        >>> table = lower_run(build("pipedream_2bw", num_devices=2, num_microbatches=2))
        >>> table.rounds_per_call, table.num_types, table.pages.num_slots
        (15, 7, 2)
    """
    columns, batch_size = schedule.columns, schedule.batch_size
    lengths = (costs or Costs()).in_forwards()
    period = int(REMOTE_ROUNDS * (lengths[Kind.F] + lengths[Kind.B]))
    per_call = period * batch_size
    rounds = _rounds(schedule, period, lengths)

    def round_of(kind: Kind, stage: int, microbatch: int) -> int:
        is_it = (columns.kind == kind) & (columns.stage == stage) & (columns.microbatch == microbatch)
        return rounds[is_it].item()

    rounds -= round_of(Kind.F, 0, 0)
    # Rounds of a call before which all may meet: between the last stage's last F of a batch and its first of the next;
    # between the first stage's UPDATE, the last of all, and its next B; a period, a forward, or nothing after that.
    first_forward = round_of(Kind.F, schedule.num_stages - 1, 0)
    heads = range(max(first_forward - period + 1, 0), first_forward + 1)
    first_update, next_backward = round_of(Kind.UPDATE, 0, 0) - per_call, round_of(Kind.B, 0, batch_size) - per_call
    others = range(max(first_update + 1, heads[0]), min(next_backward, per_call) + 1)

    def table(meetings: list[int]) -> RunTable:
        return _with_meetings(schedule, layers_per_stage, rounds, period, lengths, meetings)

    best, shortest, bound = None, np.inf, simulate(schedule, costs).makespan
    for head, other, later in itertools.product(heads, others, (period, REMOTE_ROUNDS, 0)):
        trial = table([head, max(head, other), min(max(head, other) + later, per_call)])
        makespan = replay(trial, costs, blocking=blocking).makespan
        if makespan < shortest * (1 - _TOLERANCE):
            best, shortest = trial, makespan
        if shortest <= bound * (1 + _TOLERANCE):
            break
    assert best is not None
    return best


def _with_meetings(
    schedule: Schedule,
    layers_per_stage: tuple[int, ...] | None,
    rounds: np.ndarray,
    period: int,
    lengths: np.ndarray,
    meetings: list[int],
) -> RunTable:
    """The table of actions in `rounds`, with a round more in each call before each of `meetings`."""
    per_call, num_calls = period * schedule.batch_size, schedule.num_batches + 1
    call, within = np.divmod(rounds, per_call)
    started = call * (per_call + len(meetings)) + within + sum(within >= meeting for meeting in meetings)
    taken = started.copy()
    for number, meeting in enumerate(meetings):
        for each in range(num_calls):
            under_way = _under_way(schedule, rounds, lengths, each * per_call + meeting)
            under_way &= taken == started
            if MEETINGS[number] == COLLECT_OTHERS:  # the first stage's sums change hands
                under_way &= schedule.columns.stage > 0
            taken[under_way] = each * (per_call + len(meetings)) + meeting + number
    position = np.arange(per_call) % period
    # Actions in even rounds; in odd ones messages, which need rounds of their own, and UPDATE.
    types = np.insert(np.where(position % 2, position // 2 + 1, 0), meetings, period // 2 + np.array(MEETINGS))
    events = np.insert(np.full(per_call, NO_EVENT), meetings, MEETINGS)
    return RunTable(
        schedule,
        layers_per_stage or (1,) * schedule.num_stages,
        taken,
        started + 1,
        np.tile(types, num_calls),
        NO_PARKED_PAGES,
        NO_EXCHANGE,
        event=np.tile(events, num_calls),
        num_calls=num_calls,
    )


def _under_way(schedule: Schedule, rounds: np.ndarray, lengths: np.ndarray, meeting: int) -> np.ndarray:
    """[A] whether a B begins before and ends after the time of round `meeting`, and can take that round."""
    columns, message = schedule.columns, dependencies(schedule).message
    begun = rounds - REMOTE_ROUNDS * lengths[columns.kind] + 1
    before = np.where(columns.position > 0, np.roll(rounds, 1), meeting - 1)
    is_own = columns.device[message] == columns.device
    arrived = np.where(message < 0, meeting - 1, rounds[message] + ~is_own)
    is_under_way = (columns.kind == Kind.B) & (begun < meeting) & (rounds >= meeting)
    return is_under_way & (before < meeting) & (arrived < meeting)


def _rounds(schedule: Schedule, period: int, lengths: np.ndarray) -> np.ndarray:
    """[A] rounds that follow time; an UPDATE takes the round after the last backward of its batch."""
    columns = schedule.columns
    is_update = columns.kind == Kind.UPDATE
    kept = tuple(tuple(action for action in row if action.kind is not Kind.UPDATE) for row in schedule.rows)
    compute = Schedule(schedule.name, schedule.placement, schedule.num_microbatches, kept)
    found = periodic_rounds(compute, period, lengths=lengths)
    rounds = np.zeros(len(is_update), int)
    if found is not None:
        rounds[~is_update] = found
        rounds[is_update] = rounds[np.flatnonzero(is_update) - 1] + 1
    in_row = np.flatnonzero(columns.position > 0)
    if found is None or (rounds[in_row] <= rounds[in_row - 1]).any():
        raise ScheduleError(
            explain(
                f"{schedule.name!r} cannot be cut into calls.",
                rule="periodic-run: every device does one F and one B in turn, and an UPDATE after each batch",
                repair="use 'pipedream_2bw'",
            )
        )
    return rounds
