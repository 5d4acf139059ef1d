"""Who is lost, from what was heard and when: one process of three, with times typed in."""

import pytest

from jaxpipe.distributed.liveness import Heartbeat, Liveness, parse

LIMIT_S = 30.0


def beat(position=0, number=0, end=None, doing="its start", status=0):
    return Heartbeat(position, doing, "host a, pid 1", number, position > 0, end, status)


@pytest.fixture
def liveness():
    known = Liveness(beat(), index=1, count=3, limit_s=LIMIT_S, now=0.0)
    known.heard({0: beat(), 1: beat(), 2: beat()}, 0.0)
    return known


def hear(liveness, now, *, silent=(), **lines):
    """New lines of all processes but the silent ones; `_2=beat(...)` is that of process 2."""
    others = {process: lines.get(f"_{process}", beat(number=int(now))) for process in (0, 1, 2)}
    liveness.heard({process: line for process, line in others.items() if process not in silent}, now)


def test_a_line_comes_back():
    assert parse(beat(3, 4, "TrainingError: x", "step 3").line()) == beat(3, 4, "TrainingError: x", "step 3")


def test_who_speaks_is_not_lost(liveness):
    for now in range(0, 300, 5):
        hear(liveness, now)
        liveness.begin(f"step {now}", now)
        liveness.heard({process: beat(liveness.own.position, now) for process in (0, 2)}, now)
        assert liveness.failure(now) is None


def test_who_is_silent_for_longer_than_the_limit_is_lost_and_named(liveness):
    for now in range(0, 31, 5):
        hear(liveness, now, silent=[2])
    assert liveness.failure(30.0) is None
    hear(liveness, 31.0, silent=[2])
    assert liveness.failure(31.0).process == 2
    assert "nothing heard of it for 31 s" in liveness.failure(31.0).why


def test_who_never_speaks_is_lost_too():
    known = Liveness(beat(), index=1, count=3, limit_s=LIMIT_S, now=0.0)
    for now in (0.0, 30.0):
        hear(known, now, silent=[2])
        assert known.failure(now) is None
    hear(known, 31.0, silent=[2])
    assert known.failure(31.0).process == 2


def test_a_line_that_stays_the_same_is_silence(liveness):
    for now in range(0, 31, 5):
        hear(liveness, now, _2=beat(number=7))
        assert liveness.failure(now) is None  # the first line with number 7 came at 0
    hear(liveness, 31.0, _2=beat(number=7))
    assert liveness.failure(31.0).process == 2


def test_a_line_is_not_missed_while_the_store_is_silent(liveness):
    hear(liveness, 5.0, silent=[2])  # the last that is heard of all: process 2 spoke at 0
    assert liveness.failure(34.0) is None
    assert liveness.failure(36.0).process == 0


def test_a_store_that_does_not_answer_means_process_0(liveness):
    assert liveness.failure(30.0) is None
    assert liveness.failure(30.5).process == 0


def test_an_error_of_another_is_told_at_once(liveness):
    hear(liveness, 1.0, _2=beat(end="ConfigError: no file", status=2))
    failure = liveness.failure(1.0)
    assert (failure.process, failure.why, failure.status) == (2, "it ended: ConfigError: no file", 2)


def test_who_has_ended_as_it_should_may_be_silent(liveness):
    for now in range(0, 60, 5):
        hear(liveness, now, _2=beat(end=""))
    assert liveness.failure(55.0) is None
    liveness.begin("step 1", 55.0)
    for now in range(55, 400, 5):
        hear(liveness, now, _0=beat(1, now), _2=beat(end=""))
    failure = liveness.failure(395.0)
    assert failure.process is None  # it waits for nobody who is there


def test_who_has_not_begun_what_others_wait_in_is_stuck(liveness):
    liveness.begin("step 1", 0.0)
    liveness.begin("step 2", 0.0)
    for now in range(0, 31, 5):
        hear(liveness, now, _0=beat(2, now), _2=beat(1, now, doing="step 1"))
    assert liveness.failure(30.0) is None
    failure = liveness.failure(30.5)
    assert (failure.process, failure.why) == (2, "it has not begun step 2, in which others wait for 30 s")
    assert liveness.where(2) == "host a, pid 1; its last: step 1"


def test_an_evaluation_may_take_ten_times_as_long_as_a_step(liveness):
    liveness.begin("step 1", 0.0)
    liveness.begin("the evaluation", 0.0, is_step=False)
    for now in range(0, 301, 5):
        hear(liveness, now, _0=beat(2, now), _2=beat(2, now))
        assert liveness.failure(now) is None
    hear(liveness, 301.0, _0=beat(2, 301), _2=beat(2, 301))
    assert liveness.failure(301.0).process is None


def test_a_start_may_take_ten_times_as_long(liveness):
    liveness.begin("step 1", 0.0)
    for now in range(0, 301, 5):
        hear(liveness, now, _0=beat(1, now), _2=beat(0, now))
        assert liveness.failure(now) is None
    hear(liveness, 301.0, _0=beat(1, 301), _2=beat(0, 301))
    assert liveness.failure(301.0).process == 2


def test_who_is_behind_all_others_is_stuck_itself_unless_it_still_starts(liveness):
    for now in range(0, 36, 5):
        hear(liveness, now, _0=beat(2, now), _2=beat(2, now))
    assert liveness.failure(35.0) is None
    liveness.begin("step 1", 35.0)
    for now in range(35, 71, 5):
        hear(liveness, now, _0=beat(2, now), _2=beat(2, now))
    assert liveness.failure(65.0) is None
    assert liveness.failure(65.5).process == 1


def test_a_step_that_takes_ten_times_as_long_as_any_before_hangs(liveness):
    liveness.begin("step 1", 0.0)
    liveness.begin("step 2", 5.0)  # step 1 took 5 s
    for now in range(5, 60, 5):
        hear(liveness, now, _0=beat(2, now), _2=beat(2, now))
        assert liveness.failure(now) is None
    hear(liveness, 56.0, _0=beat(2, 56), _2=beat(2, 56))
    failure = liveness.failure(56.0)
    assert (failure.process, failure.why) == (None, "every process has been in step 2 for 51 s")


def test_nobody_knows_yet_how_far_one_is_that_has_just_fallen_silent(liveness):
    liveness.begin("step 1", 0.0)
    liveness.begin("step 2", 1.0)
    for now in range(5, 36, 5):
        hear(liveness, now, _0=beat(2, now), _2=beat(2, min(now, 20)))
    assert liveness.failure(35.0) is None
    hear(liveness, 51.0, _0=beat(2, 51), _2=beat(2, 20))
    assert liveness.failure(51.0).process == 2


def test_a_process_that_was_itself_stopped_starts_anew(liveness):
    hear(liveness, 5.0)
    liveness.start_anew(500.0)
    assert liveness.failure(529.0) is None
    assert liveness.failure(531.0).process == 0


def test_a_checkpoint_may_take_any_time_as_long_as_all_live(liveness):
    liveness.begin("step 1", 0.0)
    liveness.begin("the checkpoint of step 1", 5.0, is_step=False, waits_for_files=True)
    for now in range(5, 5000, 5):
        hear(liveness, now, _0=beat(2, now), _2=beat(2, now))
        assert liveness.failure(now) is None
    for now in (*range(5000, 5030, 5), 5026):  # the last word of process 2 was at 4995
        assert liveness.failure(now) is None
        hear(liveness, now, _0=beat(2, now), silent=[2])
    assert liveness.failure(5026).process == 2
