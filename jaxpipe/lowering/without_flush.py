"""The round table of a schedule without flush, cut along time into the calls of one program.

Three calls of two devices with two microbatches a batch. Upper case is of batch t, lower case of all others; U is
UPDATE; H, O and S are meetings of all devices, COLLECT_HEAD, COLLECT_OTHERS and UPDATE_SHARED:

    round               0  1  2  3  4  5  6  7  8  9 10 11 12
    call t-1  device 0 f0  .  .  . b1  u f1  .  .  .  . b0  .
              device 1 b1  u f0  .  .  . b0  .  . f1  .  .  .
    call t    device 0 F0  .  .  . b1  u F1  .  .  .  . B0  .
              device 1 b1  u F0  .  .  . B0  .  . F1  .  .  .
    call t+1  device 0 f0  .  .  . B1  U f1  .  .  .  . b0  .
              device 1 B1  U f0  .  .  . b0  .  . f1  .  .  .
    all                    H                 O  S

Call t begins with the first forward of batch t on the first device, while the devices still work on batch t-1. So a
device's line of a call holds the end of one batch (batch age 1) and the beginning of the next (batch age 0), and what
is in flight goes from call to call: here the residuals and messages of microbatch 1. Call 0 fills the pipeline, the
last one drains it, and all others are equal: the program runs the middle one again and again. What lives on into the
next call is numbered anew there: a slot that a call fills second is the first one of the next.

Rounds follow time, two for each forward, as many for each microbatch of a batch; one more where two meetings would
share a round. The rounds of all calls have the same types. The collectives of a meeting begin with its round, beside an
action that is under way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.lowering.replay import replay
from jaxpipe.lowering.rounds import REMOTE_ROUNDS, periodic_rounds
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfers import traffic_of
from jaxpipe.lowering.transfers.shared_sums import OF_HEAD, Meeting, SharedSums, meetings_of
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Kind, Schedule

_TOLERANCE = 1e-9  # of makespans


def lower_stream(
    schedule: Schedule,
    *,
    layers_per_stage: tuple[int, ...] | None = None,
    costs: Costs | None = None,
    blocking: bool = False,
) -> RoundTable:
    """Lowers a schedule of several batches without flush.

    All devices are in the same rounds when they meet: an action stands at the end of its length, in an even round, its
    message and an UPDATE in the odd one after it. A device that is in the middle of a longer action when all meet does
    it in their round, so that nobody waits for it.

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
        >>> table = lower_stream(build("pipedream_2bw", num_devices=2, num_microbatches=2))
        >>> table.rounds_per_call, table.num_types, table.num_slots
        (13, 7, 2)
    """
    _check_batches(schedule)
    costs = costs or Costs()
    expected = costs.in_forwards()
    # With blocking permutes also try rounds fitted to a backward one forward longer or shorter: one of them is
    # sometimes faster.
    candidates = []
    for change in (0, 1, -1) if blocking else (0,):
        lengths = expected + change * (np.arange(len(expected)) == Kind.B)
        if lengths[Kind.B] > 0:
            candidates.append(_laid_out(schedule, layers_per_stage, lengths, costs, blocking=blocking))
    table, _ = min(candidates, key=lambda candidate: candidate[1])
    return table


def _check_batches(schedule: Schedule) -> None:
    num_devices = schedule.num_devices
    faults = {
        "one device": num_devices == 1,
        f"num_batches={schedule.num_batches}": schedule.num_batches < 2,
        f"{schedule.batch_size} microbatches a batch for {num_devices} devices": schedule.batch_size < num_devices,
        "other actions than F, B and UPDATE": not schedule.columns.is_kind(Kind.F, Kind.B, Kind.UPDATE).all(),
    }
    if any(faults.values()):
        raise ScheduleError(
            f"{schedule.name!r} has {', '.join(fault for fault, is_there in faults.items() if is_there)}.",
            rule="run-of-batches: a run without flush has two devices or more, and two batches or more of at least"
            " as many microbatches, with whole backwards",
            repair="use 'pipedream_2bw'",
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
    columns = schedule.columns
    batch_size = schedule.batch_size
    last_stage = schedule.num_stages - 1
    period = int(REMOTE_ROUNDS * (lengths[Kind.F] + lengths[Kind.B]))
    per_call = period * batch_size * schedule.placement.num_chunks
    rounds = _rounds(schedule, period, lengths)

    def round_of(kind: Kind, stage: int, microbatch: int) -> int:
        is_it = (columns.kind == kind) & (columns.stage == stage) & (columns.microbatch == microbatch)
        return rounds[is_it].item()

    # Call 0 begins with the first forward: earlier rounds would belong to no call.
    rounds -= round_of(Kind.F, 0, 0)
    last_forward = round_of(Kind.F, last_stage, batch_size - 1) - per_call
    first_forward = round_of(Kind.F, last_stage, 0)
    first_update = round_of(Kind.UPDATE, 0, 0) - per_call
    next_backward = round_of(Kind.B, 0, batch_size) - per_call

    def table_with(meetings: list[tuple[Meeting, int]], ahead: int) -> RoundTable:
        return _with_meetings(schedule, layers_per_stage, rounds, period, lengths, meetings, ahead)

    asynchronous = simulate(schedule, costs).makespan

    def shortest(tables: Iterable[RoundTable]) -> tuple[int, float]:
        """Place of the first of the shortest tables, and its makespan."""
        best = 0
        least = np.inf
        for place, table in enumerate(tables):
            makespan = replay(table, costs, blocking=blocking).makespan
            if makespan < least * (1 - _TOLERANCE):
                best = place
                least = makespan
            if least <= asynchronous * (1 + _TOLERANCE):
                break
        return best, least

    # Where a device sends and receives messages in the middle of its backwards, these take the round of the messages.
    choices = [0, *range(1, REMOTE_ROUNDS * (int(lengths[Kind.B]) - 1), REMOTE_ROUNDS)]
    chosen, without = shortest(table_with([], num_rounds) for num_rounds in choices)
    ahead = choices[chosen]
    # Rounds, first and last, in which all may meet: for the head between the last stage's last F of a batch and its
    # first of the next; for the others between the first stage's UPDATE, the last of all, and its next B.
    window = {
        Meeting.COLLECT_OTHERS: (first_update + 1, min(next_backward - ahead, per_call) - 1),
        **dict.fromkeys(OF_HEAD, (max(last_forward + 1, 0), first_forward - 1)),
    }
    # Each meeting takes the best round after those before it; and once more, when all have one.
    meetings: list[tuple[Meeting, int]] = []
    makespan = np.inf
    # The second time each is placed among all others, not only among those before it.
    for _ in (1, 2):
        for number, meeting in enumerate(meetings_of(schedule)):
            first, last = window.get(meeting, (0, per_call - 1))
            before = meetings[:number]
            after = meetings[number + 1 :]
            first = max(first, before[-1][1] if before else 0)
            last = min(last, first + period, after[0][1] if after else last)
            places = range(first + (first + 1) % REMOTE_ROUNDS, last + 1, REMOTE_ROUNDS)  # those of messages
            best, makespan = shortest(table_with([*before, (meeting, place), *after], ahead) for place in places)
            meetings = [*before, (meeting, places[best]), *after]
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

    A second meeting in the same round has one of its own, after it. Backwards take the round that is `ahead` rounds
    before theirs; those that are under way when all meet take the round of the meeting.
    """
    columns = schedule.columns
    num_calls = schedule.num_batches + 1  # the last one drains
    per_call = period * schedule.batch_size * schedule.placement.num_chunks
    places = np.array([place for _, place in meetings], int)
    # Cut to the length, for no meetings at all.
    is_more = np.append(False, np.diff(places) == 0)[: len(places)]
    more = places[is_more]
    call, within = np.divmod(rounds, per_call)
    started = call * (per_call + len(more)) + within + np.searchsorted(more, within)
    taken = started - ahead * (columns.kind == Kind.B)
    of_meetings = places + np.cumsum(is_more)
    for index, (number, (meeting, place)) in itertools.product(range(num_calls), enumerate(meetings)):
        under_way = _under_way(schedule, rounds, lengths, index * per_call + place)
        if meeting is Meeting.COLLECT_OTHERS:  # the first stage's sums change hands
            under_way &= columns.stage > 0
        taken[under_way] = index * (per_call + len(more)) + of_meetings[number]
    # Actions in even rounds; in odd ones messages, which need types of their own, and UPDATE; and where all meet.
    position = np.arange(per_call) % period
    types = np.insert(np.where(position % 2, position // 2 + 1, 0), more + 1, 0)
    if not ahead:
        # Rounds with an UPDATE have types of their own: in the other odd ones devices only send and receive.
        types[np.unique(taken[columns.is_kind(Kind.UPDATE)] % len(types))] += period // 2
    events = np.zeros_like(types)
    types[of_meetings] = period + 1 + np.arange(len(meetings))
    events[of_meetings] = [meeting for meeting, _ in meetings]
    _, types = np.unique(types, return_inverse=True)
    return RoundTable(
        schedule,
        layers_per_stage or (1,) * schedule.num_stages,
        taken,
        started + 1,
        np.tile(types, num_calls),
        traffic_of(schedule, SharedSums(np.tile(events, num_calls))),
        num_calls=num_calls,
    )


def _under_way(schedule: Schedule, rounds: np.ndarray, lengths: np.ndarray, meeting: int) -> np.ndarray:
    """[A] whether a B begins before and ends after the time of round `meeting`, and can take that round."""
    columns = schedule.columns
    message = dependencies(schedule).message  # [A] the action whose message it reads, negative for none
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
    of_compute = periodic_rounds(compute, period, lengths=lengths)
    rounds = np.zeros(len(is_update), int)
    if of_compute is not None:
        rounds[~is_update] = of_compute
        rounds[is_update] = rounds[np.flatnonzero(is_update) - 1] + 1  # it stands behind that backward in its row
    in_row = np.flatnonzero(columns.position > 0)
    if (
        of_compute is None
        or (rounds[in_row] <= rounds[in_row - 1]).any()
        or not _are_equal(schedule, rounds, period * schedule.batch_size * schedule.placement.num_chunks)
    ):
        raise ScheduleError(
            f"{schedule.name!r} cannot be cut into calls.",
            rule="periodic-run: every device does one F and one B in turn, and an UPDATE after each batch, in every"
            " batch alike",
            repair="use 'pipedream_2bw'",
        )
    return rounds


def _are_equal(schedule: Schedule, rounds: np.ndarray, per_call: int) -> bool:
    """Whether every batch has the actions of the one before in the rounds of the next call."""
    columns = schedule.columns
    batch, within = np.divmod(columns.microbatch, schedule.batch_size)
    is_update = columns.kind == Kind.UPDATE
    batch = np.where(is_update, columns.microbatch, batch)  # of an UPDATE the number of its batch
    within = np.where(is_update, 0, within)
    in_turn = rounds[np.lexsort((within, columns.stage, columns.kind, batch))].reshape(schedule.num_batches, -1)
    return bool((np.diff(in_turn, axis=0) == per_call).all())
