"""One entry of a schedule's row: what a device does, for which stage, microbatch and replica.

The text form is PyTorch's: `2F0` is the forward of stage 2 for microbatch 0; an action of another
replica than 0 ends in `@replica`; an action of no single microbatch (SYNC) has no microbatch number.
"""

import enum
import re
from typing import NamedTuple

from jaxpipe.errors import ScheduleError

NO_MICROBATCH = -1


class Kind(enum.IntEnum):
    """What an action does.

    B is the whole backward; I (input gradient) followed by W (weight gradient) is the same in two
    parts (zero-bubble papers write B for our I).
    """

    F = 0
    B = 1
    I = 2  # noqa: E741
    W = 3
    EVICT = 4
    LOAD = 5
    SYNC = 6


COMPUTE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
MOVE_KINDS = frozenset({Kind.EVICT, Kind.LOAD})  # transfers between the two devices of a pair

_TEXT = re.compile(r"(\d+)(EVICT|LOAD|SYNC|F|B|I|W)(\d*)(?:@(\d+))?")


class Action(NamedTuple):
    """One action; a plain tuple of integers, so that a schedule of 10^5 actions builds at once.

    Example:
        >>> str(Action(Kind.F, stage=2, microbatch=0))
        '2F0'
        >>> parse_action("3SYNC@1")
        Action(kind=<Kind.SYNC: 6>, stage=3, microbatch=-1, replica=1)
    """

    kind: Kind
    stage: int
    microbatch: int = NO_MICROBATCH
    replica: int = 0

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == NO_MICROBATCH else self.microbatch
        replica = f"@{self.replica}" if self.replica else ""
        return f"{self.stage}{self.kind.name}{microbatch}{replica}"


def parse_action(text: str) -> Action:
    """The action that `text` writes.

    Raises:
        ScheduleError: `text` is not stage, kind, microbatch as in `2F0`.
    """
    match = _TEXT.fullmatch(text.strip())
    kind = Kind[match[2]] if match else None
    if match is None or kind is None or (match[3] == "") != (kind is Kind.SYNC):
        kinds = " ".join(kind.name for kind in Kind)
        raise ScheduleError(
            f"{text.strip()!r} is not an action.\n"
            f"  rule action-text: stage, kind, microbatch, as in 2F0; kinds are {kinds}; "
            "SYNC has no microbatch; @1 at the end names replica 1\n"
            "  repair: write for example 2F0, 3B11, 0EVICT4, 3SYNC@1"
        )
    microbatch = int(match[3]) if match[3] else NO_MICROBATCH
    return Action(kind, int(match[1]), microbatch, int(match[4] or 0))
