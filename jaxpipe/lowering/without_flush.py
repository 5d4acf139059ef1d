"""The round table of a run without flush, cut along time into the calls of one program.

A call has equally many rounds for each microbatch of a batch, and those of all calls have the same types. Call w begins
with the first forward of batch w on the first device; the later ones still work on batch w-1 then. So a device's line
of a call holds the end of one batch and the beginning of the next, and what is in flight goes from call to call. Call 0
fills the pipeline, the last one drains it, and all others are equal: the program runs the middle one again and again.
Slots of residuals and entries of messages that live on into the next call are numbered anew there (`Places`).

In some rounds of each call all devices meet (`SharedSums`). The collectives begin with the round, beside an action that
is under way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from jaxpipe.errors import ScheduleError, explain
from jaxpipe.lowering.replay import replay
from jaxpipe.lowering.rounds import REMOTE_ROUNDS, periodic_rounds
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfers.messages import MESSAGES
from jaxpipe.lowering.transfers.shared_sums import OF_HEAD, Meeting, SharedSums, meetings_of
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Kind, Schedule

_TOLERANCE = 1e-9  # of makespans


def lower_run(
    schedule: Schedule,
    *,
    layers_per_stage: tuple[int, ...] | None = None,
    costs: Costs | None = None,
    blocking: bool = False,
) -> RoundTable:
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
        ScheduleError: its devices do not do one F and one B in turn, or it is none of those above.

    Example:
        Two devices, two microbatches a batch: a call has 6 x 2 rounds, and one more for a third meeting.

        >>> from jaxpipe.schedules import build
        >>> table = lower_run(build("pipedream_2bw", num_devices=2, num_microbatches=2))
        >>> table.rounds_per_call, table.num_types, table.num_slots
        (13, 6, 2)
    """
    _check_run(schedule)
    costs = costs or Costs()
    expected = costs.in_forwards()
    # Where devices wait for each other in the middle of backwards, rounds for shorter or longer ones may be shorter.
    found = []
    for change in (0, 1, -1) if blocking else (0,):
        lengths = expected + change * (np.arange(len(expected)) == Kind.B)
        if lengths[Kind.B] > 0:
            found.append(_laid_out(schedule, layers_per_stage, lengths, costs, blocking=blocking))
    return min(found, key=lambda laid_out: laid_out[1])[0]


def _check_run(schedule: Schedule) -> None:
    num_devices = schedule.num_devices
    found = {
        "one device": num_devices == 1,
        f"num_batches={schedule.num_batches}": schedule.num_batches < 2,
        f"{schedule.batch_size} microbatches a batch for {num_devices} devices": schedule.batch_size < num_devices,
        "other actions than F, B and UPDATE": not schedule.columns.is_kind(Kind.F, Kind.B, Kind.UPDATE).all(),
    }
    if any(found.values()):
        raise ScheduleError(
            explain(
                f"{schedule.name!r} has {', '.join(what for what, holds in found.items() if holds)}.",
                rule="run-of-batches: a run without flush has two devices or more, and two batches or more of at least"
                " as many microbatches, with whole backwards",
                repair="use 'pipedream_2bw'",
            )
        )


def _laid_out(
    schedule: Schedule,
    layers_per_stage: tuple[int, ...] | None,
    lengths: np.ndarray,
    costs: Costs,
    *,
    blocking: bool,
) -> tuple[RoundTable, float]:
    """The shortest table at `costs` that has been found for actions of `lengths`, in forwards; and its makespan."""
    columns, batch_size, last_stage = schedule.columns, schedule.batch_size, schedule.num_stages - 1
    period = int(REMOTE_ROUNDS * (lengths[Kind.F] + lengths[Kind.B]))
    per_call = period * batch_size * schedule.placement.num_chunks
    rounds = _rounds(schedule, period, lengths)

    def round_of(kind: Kind, stage: int, microbatch: int) -> int:
        is_it = (columns.kind == kind) & (columns.stage == stage) & (columns.microbatch == microbatch)
        return rounds[is_it].item()

    rounds -= round_of(Kind.F, 0, 0)
    last_forward = round_of(Kind.F, last_stage, batch_size - 1) - per_call
    first_forward = round_of(Kind.F, last_stage, 0)
    first_update, next_backward = round_of(Kind.UPDATE, 0, 0) - per_call, round_of(Kind.B, 0, batch_size) - per_call

    def table_with(meetings: list[tuple[Meeting, int]], ahead: int) -> RoundTable:
        return _with_meetings(schedule, layers_per_stage, rounds, period, lengths, meetings, ahead)

    asynchronous = simulate(schedule, costs).makespan

    def shortest(tables: Iterable[RoundTable]) -> tuple[int, float]:
        """Place of the first of the shortest tables, and its makespan."""
        best, least = 0, np.inf
        for place, table in enumerate(tables):
            makespan = replay(table, costs, blocking=blocking).makespan
            if makespan < least * (1 - _TOLERANCE):
                best, least = place, makespan
            if least <= asynchronous * (1 + _TOLERANCE):
                break
        return best, least

    # Where a device exchanges messages in the middle of its backwards, these take the round of that exchange.
    choices = [0, *range(1, REMOTE_ROUNDS * (int(lengths[Kind.B]) - 1), REMOTE_ROUNDS)]
    chosen, without = shortest(table_with([], each) for each in choices)
    ahead = choices[chosen]
    # Rounds, first and last, in which all may meet: for the head between the last stage's last F of a batch and its
    # first of the next; for the others between the first stage's UPDATE, the last of all, and its next B.
    window = {
        Meeting.COLLECT_OTHERS: (first_update + 1, min(next_backward - ahead, per_call) - 1),
        **dict.fromkeys(OF_HEAD, (max(last_forward + 1, 0), first_forward - 1)),
    }
    # Each meeting takes the best round after those before it; and once more, when all have one.
    meetings: list[tuple[Meeting, int]] = []
    turns, makespan = meetings_of(schedule), np.inf
    for _ in (1, 2):
        for number, meeting in enumerate(turns):
            first, last = window.get(meeting, (0, per_call - 1))
            before, after = meetings[:number], meetings[number + 1 :]
            first = max(first, before[-1][1] if before else 0)
            last = min(last, first + period, after[0][1] if after else last)
            places = range(first + (first + 1) % REMOTE_ROUNDS, last + 1, REMOTE_ROUNDS)  # those of messages
            found, makespan = shortest(table_with([*before, (meeting, each), *after], ahead) for each in places)
            meetings = [*before, (meeting, places[found]), *after]
        if makespan <= without * (1 + _TOLERANCE):
            break
    return table_with(meetings, ahead), makespan


def _with_meetings(
    schedule: Schedule,
    layers_per_stage: tuple[int, ...] | None,
    rounds: np.ndarray,
    period: int,
    lengths: np.ndarray,
    meetings: list[tuple[Meeting, int]],
    ahead: int,
) -> RoundTable:
    """The table of actions in `rounds`, in which all devices meet in the given rounds of each call.

    A second meeting in the same round has one of its own, after it. Backwards take the round `ahead` of theirs; those
    that are under way when all meet take the round of the meeting.
    """
    columns, num_calls = schedule.columns, schedule.num_batches + 1
    per_call = period * schedule.batch_size * schedule.placement.num_chunks
    places = np.array([place for _, place in meetings], int)
    is_more = np.append(False, np.diff(places) == 0)[: len(places)]
    more = places[is_more]
    call, within = np.divmod(rounds, per_call)
    started = call * (per_call + len(more)) + within + np.searchsorted(more, within)
    taken, of_meetings = started - ahead * (columns.kind == Kind.B), places + np.cumsum(is_more)
    for each, (number, (meeting, place)) in itertools.product(range(num_calls), enumerate(meetings)):
        under_way = _under_way(schedule, rounds, lengths, each * per_call + place)
        if meeting is Meeting.COLLECT_OTHERS:  # the first stage's sums change hands
            under_way &= columns.stage > 0
        taken[under_way] = each * (per_call + len(more)) + of_meetings[number]
    # Actions in even rounds; in odd ones messages, which need types of their own, and UPDATE; and where all meet.
    position = np.arange(per_call) % period
    types = np.insert(np.where(position % 2, position // 2 + 1, 0), more + 1, 0)
    events = np.zeros_like(types)
    types[of_meetings] = period // 2 + 1 + np.arange(len(meetings))
    events[of_meetings] = [meeting for meeting, _ in meetings]
    _, types = np.unique(types, return_inverse=True)
    return RoundTable(
        schedule,
        layers_per_stage or (1,) * schedule.num_stages,
        taken,
        started + 1,
        np.tile(types, num_calls),
        (MESSAGES, SharedSums(np.tile(events, num_calls))),
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
    if (
        found is None
        or (rounds[in_row] <= rounds[in_row - 1]).any()
        or not _are_equal(schedule, rounds, period * schedule.batch_size * schedule.placement.num_chunks)
    ):
        raise ScheduleError(
            explain(
                f"{schedule.name!r} cannot be cut into calls.",
                rule="periodic-run: every device does one F and one B in turn, and an UPDATE after each batch, in every"
                " batch alike",
                repair="use 'pipedream_2bw'",
            )
        )
    return rounds


def _are_equal(schedule: Schedule, rounds: np.ndarray, per_call: int) -> bool:
    """Whether every batch has the actions of the one before in the rounds of the next call."""
    columns = schedule.columns
    batch, within = np.divmod(columns.microbatch, schedule.batch_size)
    is_update = columns.kind == Kind.UPDATE
    batch, within = np.where(is_update, columns.microbatch, batch), np.where(is_update, 0, within)
    in_turn = rounds[np.lexsort((within, columns.stage, columns.kind, batch))].reshape(schedule.num_batches, -1)
    return bool((np.diff(in_turn, axis=0) == per_call).all())
