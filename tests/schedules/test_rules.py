"""Legal schedules pass; for every rule, the smallest broken schedule is rejected by that rule alone."""

from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Action, Kind, Placement, Schedule, build, linear
from jaxpipe.schedules.entries import parse_entry
from jaxpipe.schedules.rules import RULES, check, violations
from jaxpipe.schedules.rules.view import View


def schedule_of(
    *rows: str, placement: Placement | None = None, num_microbatches: int = 1, parked: tuple[Fraction, ...] = ()
) -> Schedule:
    actions = tuple(tuple(chain.from_iterable(map(parse_entry, row.split()))) for row in rows)
    return Schedule("broken", placement or linear(len(rows)), num_microbatches, actions, parked)


def batches_of(*rows: str, delays: tuple[int, ...] = (1,), num_batches: int = 2) -> Schedule:
    """Batches of one microbatch."""
    return replace(schedule_of(*rows, num_microbatches=num_batches), delays=delays, num_batches=num_batches)


TWO_WAYS = Placement(2, ((0, 1), (1, 0)))

# rule -> the smallest schedule that breaks it and no other
BROKEN = {
    "row-per-device": schedule_of("0F0 0B0", placement=Placement(2, ((0, 1),))),
    "placement": schedule_of("0F0 0B0", "", placement=Placement(2, ((0,),))),
    "mirrored": schedule_of("0F0 0B0", "1F0 1B0", placement=Placement(2, ((0, 1), (0, 1)))),
    "parked-share": schedule_of("0F0 0B0", parked=(Fraction(0),)),
    "parked-place": replace(schedule_of("0F0 0B0"), parked_on=("host", "host")),
    "range": schedule_of("0F0 0B0 0F1"),
    "holder": schedule_of("0F0 0B0", "1F0 1B0 0F0"),
    "one-replica": schedule_of("0F0 1F0@1 1B0@1 0B0", "", placement=TWO_WAYS),
    "forward-once": schedule_of("0B0"),
    "backward-once": schedule_of("0F0"),
    "forward-first": schedule_of("0B0 0F0"),
    "input-gradient-first": schedule_of("0F0 0W0 0I0"),
    "pair": schedule_of("(0F0;0B0)OVERLAP_F_B"),
    "paired": schedule_of("0F0 0EVICT0 0LOAD0 0B0"),
    "evict-load": schedule_of("0F0 0EVICT0 0B0", "1F0 1B0"),
    "sync-last": schedule_of("0F0 0SYNC 0B0"),
    "sync-both": schedule_of("0F0 0B0 0SYNC", "1F0 1B0", placement=TWO_WAYS),
    "batches": batches_of("0F0 0B0 0UPDATE0 0F1 0B1 0UPDATE1", delays=(1, 1)),
    "update-once": batches_of("0F0 0B0 0UPDATE0 0F1 0B1"),
    "update-in-time": batches_of("0F0 0UPDATE0 0B0 0F1 0B1 0UPDATE1"),
    "head-everywhere": schedule_of("0F0 0S0 0B0"),
    "head-in-order": schedule_of("0F0 0T0 0S0 0B0"),
    "acyclic": schedule_of("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", num_microbatches=2),
}

# further ways to break a rule, each rejected by that rule alone
MORE_BROKEN = [
    ("parked-place", replace(schedule_of("0F0 0B0"), parked_on=("nowhere",))),
    ("parked-place", replace(schedule_of("0F0 0B0", "1F0 1B0"), parked_on=("host", "partner"))),
    ("parked-place", replace(schedule_of("0F0 0B0", "1F0 1B0", placement=TWO_WAYS), parked_on=("host", "host"))),
    ("parked-place", replace(batches_of("0F0 0B0 0UPDATE0 0F1 0B1 0UPDATE1"), parked_on=("host",))),
    ("row-per-device", schedule_of("", num_microbatches=0)),
    ("row-per-device", schedule_of("0F0 0B0", "1F0 1B0", placement=linear(1))),
    ("row-per-device", schedule_of(placement=Placement(0, ((),)))),
    ("row-per-device", schedule_of("0F0 0B0", "1F0 1B0", placement=Placement(10**15, ((0, 1),)))),
    ("row-per-device", replace(schedule_of("0F0 0B0", "1F0 1B0"), delays=(1, 1), num_batches=10**20)),
    ("placement", schedule_of("0F0 0B0", placement=Placement(1, ((1,),)))),
    ("placement", schedule_of("0F0 0B0", placement=Placement(1, ()))),
    ("placement", schedule_of("0F0 0B0", placement=Placement(1, ((0,), (0, 0))))),
    ("mirrored", schedule_of("0F0 0B0", "1F0 1B0", placement=Placement(2, ((0, 1), (1, 0), (0, 1))))),
    ("mirrored", schedule_of("0F0 0B0", placement=Placement(1, ((0,), (0,))))),
    ("range", schedule_of("0F0 0B0 1F0")),
    ("range", schedule_of("0F0 0B0 0F0@1")),
    ("range", Schedule("broken", linear(1), 1, ((*schedule_of("0F0 0B0").rows[0], Action(Kind.SYNC, 0, 0)),))),
    ("forward-once", schedule_of("0F0 0F0 0B0")),
    ("backward-once", schedule_of("0F0 0B0 0B0")),
    ("backward-once", schedule_of("0F0 0I0")),
    ("backward-once", schedule_of("0F0 0W0")),
    ("backward-once", schedule_of("0F0 0B0 0W0")),
    ("backward-once", schedule_of("0F0 0B0 0I0 0W0")),
    ("forward-first", schedule_of("0I0 0F0 0W0")),
    ("pair", schedule_of("(0F0;0F1)OVERLAP_F_B 0B0 0B1", num_microbatches=2)),
    ("pair", schedule_of("0F0 (0B0;0F1)OVERLAP_F_B 0B1", num_microbatches=2)),
    ("pair", schedule_of("0F0 (0F1;0B0;0B1)OVERLAP_F_B", num_microbatches=2)),
    ("pair", schedule_of("0F0 (0F1;0I0)OVERLAP_F_B (0W0;0B1)OVERLAP_F_B", num_microbatches=2)),
    ("acyclic", schedule_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1F1 1B1 1B0", num_microbatches=2)),
    ("parked-share", schedule_of("0F0 0B0", parked=(Fraction(3, 2),))),
    ("parked-share", schedule_of("0F0 0B0", parked=(Fraction(1, 2), Fraction(1, 2)))),
    ("paired", schedule_of("0F0 0B0", "1F0 1EVICT0 1LOAD0 1B0", "2F0 2B0")),
    ("evict-load", schedule_of("0EVICT0 0F0 0LOAD0 0B0", "1F0 1B0")),
    ("evict-load", schedule_of("0F0 0LOAD0 0B0", "1F0 1B0")),
    ("evict-load", schedule_of("0F0 0LOAD0 0EVICT0 0LOAD0 0B0", "1F0 1B0")),
    ("evict-load", schedule_of("0F0 0EVICT0 0EVICT0 0LOAD0 0B0", "1F0 1B0")),
    ("evict-load", schedule_of("0F0 0EVICT0 0LOAD0 0LOAD0 0B0", "1F0 1B0")),
    ("evict-load", schedule_of("0F0 0EVICT0 0B0 0LOAD0", "1F0 1B0")),
    ("evict-load", schedule_of("0F0 0B0 0EVICT0", "1F0 1B0")),
    ("evict-load", schedule_of("0F0 0B0 0EVICT0 0LOAD0", "1F0 1B0")),
    ("evict-load", schedule_of("0F0 0I0 0EVICT0 0W0", "1F0 1B0")),
    ("sync-last", schedule_of("0F0 0B0 0SYNC 0SYNC")),
    ("sync-last", schedule_of("0F0 0I0 0SYNC 0W0")),
    ("sync-both", schedule_of("0F0 0B0 0SYNC", "1F0 1B0 0SYNC@1 1SYNC", placement=TWO_WAYS)),
    ("batches", schedule_of("0F0 0B0 0UPDATE0")),
    ("batches", batches_of("0F0 0B0 0UPDATE0 0F1 0B1 0UPDATE1", delays=(-1,))),
    ("batches", replace(batches_of("0F0 0B0 0F1 0B1 0F2 0B2", num_batches=3), num_batches=2, delays=())),
    ("update-once", batches_of("0F0 0B0 0UPDATE0 0UPDATE0 0F1 0B1 0UPDATE1")),
    # W(1) is not there yet, and with a delay of one it is, but the third batch uses W(2)
    ("update-in-time", batches_of("0F0 0F1 0B0 0UPDATE0 0B1 0UPDATE1", delays=(0,))),
    ("update-in-time", batches_of("0F0 0F1 0B0 0F2 0UPDATE0 0B1 0UPDATE1 0B2 0UPDATE2", num_batches=3)),
    # the sum of gradients that the update reads has a term of the next batch
    ("update-in-time", batches_of("0F0 0F1 0B0 0B1 0UPDATE0 0UPDATE1")),
    ("head-everywhere", schedule_of("0F0 1S0 1T0 0B0", "1F0 1B0")),
    ("head-everywhere", schedule_of("0F0 0S0 0S0 0T0 0B0")),
    ("head-everywhere", schedule_of("0F0 0S0 0T0 1F0 1B0 0B0", placement=Placement(1, ((0, 0),)))),
    (
        "head-in-order",
        schedule_of(
            "0F0 0F1 1S0 1S1 1T0 1T1 0B0 0B1", "1F0 1F1 1S1 1S0 1T0 1T1 1B0 1B1", num_microbatches=2
        ),
    ),
    (
        "head-in-order",
        schedule_of(
            "0F1 1S1 1T1 1F0@1 1S0@1 1T0@1 0B1 1B0@1", "1S0@1 1F1 1S1 1B1 1T1 0F0@1 1T0@1 0B0@1",
            placement=TWO_WAYS, num_microbatches=2,
        ),
    ),
    # a T waits for the S of the other device, which waits for the T of this one
    (
        "acyclic",
        schedule_of(
            "0F0 0F1 1S0 1T0 1S1 1T1 0B0 0B1", "1F0 1F1 1B0 1S0 1S1 1T0 1T1 1B1", num_microbatches=2
        ),
    ),
    # three devices wait in a circle of two; the first waits for them
    (
        "acyclic",
        schedule_of(
            "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0", num_microbatches=2
        ),
    ),
]  # fmt: skip

LEGAL = {
    "input and weight gradient": schedule_of("0F0 0I0 0F1 0I1 0W1 0W0", num_microbatches=2),
    "evict, load, sync": schedule_of("0F0 0EVICT0 0LOAD0 0EVICT0 0LOAD0 0B0 0SYNC", "1F0 1B0"),
    "evict between gradients": schedule_of("0F0 0I0 0EVICT0 0LOAD0 0W0", "1F0 1B0"),
    "shares": schedule_of("0F0 0EVICT0 0LOAD0 0B0", "1F0 1B0", parked=(Fraction(2, 5), Fraction(1))),
    "two replicas": schedule_of("0F0 1F1@1 1B1@1 0B0", "0F1@1 1F0 1B0 0B1@1", placement=TWO_WAYS, num_microbatches=2),
    "two replicas that are summed": schedule_of("0F0 0B0 0SYNC 1SYNC@1", "1F0 1B0 1SYNC 0SYNC@1", placement=TWO_WAYS),
    "the head of two devices": schedule_of("0F0 1S0 1T0 0B0", "1F0 1S0 1T0 1B0"),
    "two stages on a device": schedule_of("0F0 1F0 1B0 0B0", placement=Placement(1, ((0, 0),))),
}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_schedules_pass(case):
    assert check(LEGAL[case]) is LEGAL[case]


def test_every_rule_has_a_smallest_broken_schedule():
    assert list(BROKEN) == list(RULES)


@pytest.mark.parametrize(("rule", "schedule"), [*BROKEN.items(), *MORE_BROKEN])
def test_only_its_rule_rejects_a_broken_schedule(rule, schedule):
    assert {violation.rule for violation in violations(schedule)} == {rule}
    with pytest.raises(ScheduleError, match=f"rule {rule}: "):
        check(schedule)


def test_an_update_of_a_batch_that_the_schedule_has_not_is_named():
    """As of a file whose line of delays is gone: microbatches and batches have their own numbers."""
    without = schedule_of("0F0 0F1 0B0 0B1 0UPDATE1", num_microbatches=2)
    found = next(violation for violation in violations(without) if violation.rule == "range")
    assert "0UPDATE1 has batch=1, outside 0..0" in found.what
    assert "delays" in found.repair
    beyond = violations(batches_of("0F0 0B0 0UPDATE0 0F1 0B1 0UPDATE9"))
    assert [violation.repair for violation in beyond if violation.rule == "range"] == [
        "remove it, or use the nearest batch=1"
    ]


def test_message_has_five_parts():
    rows = list(build("1f1b", num_devices=4, num_microbatches=6).rows)
    rows[2] = (*rows[2][:9], rows[2][11], rows[2][10], rows[2][9])
    with pytest.raises(ScheduleError) as error:
        check(Schedule("my_schedule", linear(4), 6, tuple(rows)))
    assert str(error.value) == (
        "1 rule broken in 'my_schedule' (num_devices=4, num_stages=4, num_microbatches=6)\n"
        "  device 2, position 9: 2B5 comes before 2F5\n"
        "  rule forward-first: on a device, the F of a (stage, microbatch) precedes its B or I\n"
        "      position      7    8   >9<   10   11\n"
        "      device 2     2F4  2B3  2B5  2B4  2F5\n"
        "  repair: move 2F5 from position 11 to before position 9"
    )


@pytest.mark.parametrize(
    ("schedule", "what", "places"),
    [
        (schedule_of("0F0 0F0 0B0"), "device 0, position 1: 0F0 stands here again", ((0, 1), (0, 0))),
        (schedule_of("0F0 0B0 0I0"), "device 0, position 1: 0B0 is the whole backward", ((0, 1), (0, 2))),
        (schedule_of("0B0 0F0"), "device 0, position 0: 0B0 comes before 0F0", ((0, 0),)),  # both are in its picture
        (schedule_of("0F0 1F0@1 1B0@1 0B0", "", placement=TWO_WAYS), "1F0@1 is of replica 1", ((0, 1), (0, 0))),
        (schedule_of("0F0 0T0 0S0 0B0"), "device 0, position 2: 0S0 comes after 0T0", ((0, 2), (0, 1))),
    ],
)
def test_every_action_concerned_is_pictured(schedule, what, places):
    first = violations(schedule)[0]
    assert what in first.what
    assert first.places == places


def test_all_violations_are_counted_and_five_shown():
    with pytest.raises(ScheduleError) as error:
        check(schedule_of("", num_microbatches=7))
    lines = str(error.value).splitlines()
    assert lines[0].startswith("2 rules broken 14 times in 'broken'")
    assert sum("is missing" in line for line in lines) == 5
    assert lines[-1] == "  and 9 more"


def test_violations_of_different_rules_are_collected():
    found = violations(schedule_of("0B0 0F0 0SYNC 0F1", "1F0 1F0 1B0", num_microbatches=2))
    assert {violation.rule for violation in found} == {"forward-once", "backward-once", "forward-first"}


def test_circle_names_what_blocks_each_device_and_the_repair_opens_it():
    (violation,) = violations(BROKEN["acyclic"])
    assert violation.what == (
        "device 0, position 1: 0B0 waits for 1B0 (device 1, position 3); "
        "device 1, position 0: 1F1 waits for 0F1 (device 0, position 2)"
    )
    assert violation.repair == "move 0F1 from position 2 of device 0 to before position 1"
    check(schedule_of("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0", num_microbatches=2))


def test_old_pytorch_name_of_the_input_gradient_is_explained():
    with pytest.raises(ScheduleError, match="or write 0I0 for 0B0"):
        check(schedule_of("0F0 0B0 0W0"))


def test_rules_look_at_the_actions_of_a_legal_schedule_as_arrays(monkeypatch):
    """65536 actions: an Action is only looked up where a rule is broken."""
    schedule = build("1f1b", num_devices=64, num_microbatches=512)
    monkeypatch.setattr(View, "action", lambda *_: pytest.fail("looked at one by one"))
    assert check(schedule) is schedule
