"""A schedule is a value: for every device, an ordered row of actions.

Built and compared without JAX and without a model. The text form of an action is PyTorch's: `2F0` is the forward of
stage 2 for microbatch 0; an action of another replica than 0 ends in `@replica`; SYNC, which belongs to no single
microbatch, has no microbatch number. A pair, `(2F3;3B1)OVERLAP_F_B`, is one action in two entries of its row.
"""

import enum
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, wraps
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.placement import Devices, Placement

if TYPE_CHECKING:
    import numpy as np


# Where EVICT takes activations: to the paired device, or to the memory of the device's own host.
PARTNER = "partner"
HOST = "host"

# In `Action.microbatch` of a kind that is not numbered. Never an index: -1 would read the last entry.
NO_MICROBATCH = -1


class Kind(enum.IntEnum):
    """The kind of an action.

    F is the forward and B the whole backward; I (input gradient) followed by W (weight gradient) is the backward in two
    parts (zero-bubble papers write B for our I). EVICT sends activations of a stage to the paired device or the host,
    LOAD brings them back. SYNC says that a stage's gradients are complete. S and T are the head after the last stage,
    of which every device has some rows of the vocabulary: S finds the statistics of its softmax, T its gradients.
    UPDATE is the optimizer's step of a stage for one batch; rows of several batches have it, without a flush between.

    The last three are made of a pair where rounds are (`jaxpipe.lowering.pairs`), and stand in no file: TAKE keeps what
    its F reads, PAIR computes both halves and leaves what the backward does, PUT leaves what the F does.
    """

    F = 0
    B = 1
    I = 2  # noqa: E741
    W = 3
    EVICT = 4
    LOAD = 5
    SYNC = 6
    S = 7
    T = 8
    UPDATE = 9
    TAKE = 10
    PAIR = 11
    PUT = 12


class Traits(NamedTuple):
    """The properties that all actions of a kind share."""

    computes: bool = True  # whether it takes the device, and not only a link
    layers: bool = False  # whether it computes with the layers of its stage
    # The transfer that carries what it leaves for another stage, as `messages`; empty if it leaves nothing.
    leaves: str = ""
    backward: bool = False  # whether it takes the gradient of its stage's output
    # Whether it adds to the gradients of its stage's weights, and reads the residuals for the last time.
    gradients: bool = False
    head: bool = False  # whether it belongs to the split head: one of each microbatch in every device's row
    moves: bool = False  # whether it moves activations away from their device, or back
    whole_batch: bool = False  # whether it is of a batch, whose number is its microbatch
    numbered: bool = True  # whether its text has a microbatch
    in_rounds: bool = False  # whether only rounds have it, and no row of a schedule


TRAITS = {
    Kind.F: Traits(layers=True, leaves="messages"),
    Kind.B: Traits(layers=True, leaves="messages", backward=True, gradients=True),
    Kind.I: Traits(layers=True, leaves="messages", backward=True),
    Kind.W: Traits(layers=True, gradients=True),
    Kind.EVICT: Traits(computes=False, moves=True),
    Kind.LOAD: Traits(computes=False, moves=True),
    Kind.SYNC: Traits(computes=False, numbered=False),
    Kind.S: Traits(head=True),
    Kind.T: Traits(head=True),
    Kind.UPDATE: Traits(whole_batch=True),
    Kind.TAKE: Traits(computes=False, in_rounds=True),
    Kind.PAIR: Traits(computes=False, layers=True, leaves="messages", in_rounds=True),
    Kind.PUT: Traits(computes=False, leaves="messages", in_rounds=True),
}


def _with(trait: str) -> frozenset[Kind]:
    return frozenset(kind for kind, traits in TRAITS.items() if getattr(traits, trait))


def kinds_that_leave(transfer: str) -> frozenset[Kind]:
    """The kinds of action whose payload a transfer carries to the action that reads it."""
    return frozenset(kind for kind, traits in TRAITS.items() if traits.leaves == transfer)


COMPUTE_KINDS = _with("computes")
LAYER_KINDS = _with("layers")
MESSAGE_KINDS = kinds_that_leave("messages")
BACKWARD_KINDS = _with("backward")
GRADIENT_KINDS = _with("gradients")
HEAD_KINDS = _with("head")
PARKING_KINDS = _with("moves")
WHOLE_BATCH_KINDS = _with("whole_batch")
NUMBERED_KINDS = _with("numbered")
WRITTEN_KINDS = frozenset(Kind) - _with("in_rounds")

# The longest name first, else the S of SYNC would match.
_NAMES = "|".join(sorted((kind.name for kind in WRITTEN_KINDS), key=len, reverse=True))
# At most nine digits, so that every number fits into 32 bits.
_TEXT = re.compile(rf"([0-9]{{1,9}})({_NAMES})([0-9]{{0,9}})(?:@([0-9]{{1,9}}))?")


class Action(NamedTuple):
    """One action, or one half of a pair; a tuple of integers, so that a schedule of 10^5 actions builds at once.

    A pair is one action that computes a forward and a backward at once. In a row its halves stand one behind the other,
    the forward first: whatever reads actions finds the two that it knows.

    Example:
        >>> str(Action(Kind.F, stage=2, microbatch=0))
        '2F0'
        >>> parse_action("3SYNC@1")
        Action(kind=<Kind.SYNC: 6>, stage=3, microbatch=-1, replica=1, joined=False)
    """

    kind: Kind
    stage: int
    microbatch: int = NO_MICROBATCH
    replica: int = 0
    joined: bool = False  # whether it is a pair with the action behind it in its row

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == NO_MICROBATCH else self.microbatch
        replica = f"@{self.replica}" if self.replica else ""
        return f"{self.stage}{self.kind.name}{microbatch}{replica}"


def parse_action(text: str) -> Action:
    """Parses an action such as `2F0`.

    Raises:
        ScheduleError: `text` is not stage, kind, microbatch.
    """
    match = _TEXT.fullmatch(text.strip())
    kind = Kind[match[2]] if match else None
    # SYNC with a number is no action, and neither is an F without one.
    if match is None or kind is None or (match[3] == "") == TRAITS[kind].numbered:
        kinds = " ".join(kind.name for kind in sorted(WRITTEN_KINDS))
        raise ScheduleError(
            f"{text.strip()!r} is not an action.",
            rule=f"action-text: stage, kind, microbatch, as in 2F0; kinds are {kinds}; "
            "SYNC has no microbatch; UPDATE has the number of its batch; @1 at the end names replica 1",
            repair="write for example 2F0, 3B11, 0EVICT4, 3SYNC@1",
        )
    microbatch = int(match[3]) if match[3] else NO_MICROBATCH
    return Action(kind, int(match[1]), microbatch, int(match[4] or 0))


# ---- The schedule


Rows = tuple[tuple[Action, ...], ...]  # [device][position] -> Action


@dataclass(frozen=True)
class Columns:
    """The A actions of a schedule as integer arrays, device by device in row order."""

    kind: "np.ndarray"  # [A] Kind
    stage: "np.ndarray"  # [A]
    microbatch: "np.ndarray"  # [A]
    replica: "np.ndarray"  # [A]
    device: "np.ndarray"  # [A] the device whose row has the action
    position: "np.ndarray"  # [A] index in that row
    first: "np.ndarray"  # [D + 1] index of each device's first action; the last entry is A
    partner: "np.ndarray"  # [A] the other half of its pair; -1 for none

    def is_kind(self, *kinds: Kind) -> "np.ndarray":
        """Whether each action is of one of `kinds`, [A]."""
        is_kind = self.kind == kinds[0]
        for kind in kinds[1:]:
            is_kind |= self.kind == kind
        return is_kind


@dataclass(frozen=True)
class Schedule:
    """Rows of actions on a placement.

    Attributes:
        name: name in the registry, or of the file that it was read from.
        placement: the device of each stage.
        num_microbatches: microbatches of all rows, over all replicas: those of one step, or of `num_batches` steps.
        rows: [device][position] -> Action.
        parked: [stage] -> the fraction, in (0, 1], of a microbatch's pages that EVICT moves; empty: whole microbatches.
        delays: [stage] -> d: the microbatches of batch k use the weights W(k-d), of which UPDATE k makes W(k+1), and
            those before the first are W(0). Empty for a schedule of one step, whose weights change after it.
        num_batches: batches of `delays`, of equally many microbatches each.
        parked_on: [stage] -> where EVICT moves pages, `PARTNER` or `HOST`; empty if all go to the paired device.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    parked: tuple[Fraction, ...] = ()
    delays: tuple[int, ...] = ()
    num_batches: int = 1
    parked_on: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices on the `pipe` axis."""
        return self.placement.num_devices

    @property
    def num_stages(self) -> int:
        """Stages of one replica of the model."""
        return self.placement.num_stages

    @property
    def num_replicas(self) -> int:
        """Full copies of the model's stages."""
        return self.placement.num_replicas

    def parked_of(self, stage: int) -> Fraction:
        """The fraction of a microbatch's pages of `stage` that EVICT and LOAD move."""
        return self.parked[stage] if self.parked else Fraction(1)

    @property
    def batch_size(self) -> int:
        """Microbatches of one batch."""
        return self.num_microbatches // self.num_batches

    @cached_property
    def parks_pages(self) -> bool:
        """Whether activations leave their device and come back: EVICT and LOAD."""
        return bool(self.columns.is_kind(*PARKING_KINDS).any())

    @property
    def parks_on_host(self) -> bool:
        """Whether they go to the memory of the device's host, in place of the paired device's."""
        return HOST in self.parked_on

    @property
    def parks_with_partner(self) -> bool:
        """Whether they go to the paired device, which meets their own for it."""
        return self.parks_pages and not self.parks_on_host

    def keeper_of(self, device: Devices) -> Devices:
        """The device that parked activations of `device` are with: itself, if its host has them."""
        return device if self.parks_on_host else self.placement.partner_of(device)

    @cached_property
    def has_split_backward(self) -> bool:
        """Whether any backward is in two parts, I and W."""
        return bool(self.columns.is_kind(Kind.W).any())

    @cached_property
    def has_pairs(self) -> bool:
        """Whether any forward and backward are one action."""
        return bool((self.columns.partner >= 0).any())

    @cached_property
    def has_head_actions(self) -> bool:
        """Whether the head is split over all devices: S and T."""
        return bool(self.columns.is_kind(*HEAD_KINDS).any())

    @cached_property
    def replica_of_microbatch(self) -> "np.ndarray":
        """[microbatch] the replica of its forwards."""
        import numpy as np

        columns = self.columns
        replica = np.zeros(self.num_microbatches, int)
        # Rules ask this of illegal schedules too, whose numbers may be out of range.
        forward = columns.is_kind(Kind.F) & (columns.microbatch >= 0) & (columns.microbatch < self.num_microbatches)
        replica[columns.microbatch[forward]] = columns.replica[forward]
        return replica

    @cached_property
    def columns(self) -> Columns:
        """All actions as integer arrays, device by device in row order, for code that looks at all at once."""
        import numpy as np

        num_actions = sum(map(len, self.rows))
        fields = itertools.chain.from_iterable(itertools.chain.from_iterable(self.rows))
        try:
            # Flat, since `np.array` would look at each tuple and enum by itself; a field that is no number raises.
            table = np.fromiter(fields, np.int64, 5 * num_actions).reshape(num_actions, 5)
        except (TypeError, ValueError):
            raise self._no_action() from None
        lengths = [len(row) for row in self.rows]
        # The last entry is A, so that row d is first[d]:first[d + 1] for every d.
        first = np.cumsum([0, *lengths])
        device = np.repeat(np.arange(self.num_devices), lengths)
        index = np.arange(num_actions)
        is_joined = (table[:, 4] > 0) & (index + 1 < first[device + 1])
        partner = np.where(is_joined, index + 1, -1)
        partner[1:][is_joined[:-1]] = index[:-1][is_joined[:-1]]
        return Columns(
            kind=table[:, 0],
            stage=table[:, 1],
            microbatch=table[:, 2],
            replica=table[:, 3],
            device=device,
            position=index - first[device],
            first=first,
            partner=partner,
        )

    def _no_action(self) -> ScheduleError:
        """The error for the first entry of the rows that is no Action."""
        device, position, entry = next(
            (device, position, entry)
            for device, row in enumerate(self.rows)
            for position, entry in enumerate(row)
            # A plain tuple would compare equal to an Action, but has no names.
            if not (isinstance(entry, Action) and all(isinstance(field, int) for field in entry))
        )
        return ScheduleError(
            f"{self.name!r}: device {device}, position {position}: {entry!r} is no Action",
            rule="action: the rows of a schedule hold Actions",
            repair="write parse_action('2F0') for a text, or read all rows with from_csv or from_json",
        )


Found = TypeVar("Found")


def once(function: Callable[[Schedule], Found]) -> Callable[[Schedule], Found]:
    """`function` of a schedule, called once for each: the schedule keeps the result with its cached properties."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def known(schedule: Schedule) -> Found:
        # The dataclass is frozen: its dictionary takes values all the same, as `cached_property` does.
        values = vars(schedule)
        if name not in values:
            values[name] = function(schedule)
        return values[name]

    return known
