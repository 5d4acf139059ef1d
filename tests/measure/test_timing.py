"""What is counted of several steps in a row; the clock is one of the test's own."""

import pytest

from jaxpipe.measure import timing


class Result:
    """What a step brings that ends at a time of the clock."""

    def __init__(self, clock: list[float], ends: float):
        self.clock, self.ends = clock, ends

    def block_until_ready(self) -> "Result":
        self.clock[0] = max(self.clock[0], self.ends)
        return self


@pytest.mark.parametrize(("ends", "num_steps", "wall_s"), [([5.0], 1, 5.0), ([5.0, 6.0, 8.0], 2, 1.5)])
def test_the_first_step_of_several_is_not_counted(monkeypatch, ends, num_steps, wall_s):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    found = timing.timed(lambda: [Result(clock, end) for end in ends], num_steps=num_steps)
    assert found.wall_s == wall_s
