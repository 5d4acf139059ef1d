"""Facts read off a compiled program: permutes and what overlaps with them, writes of whole buffers in its loops.

Reads the text of optimized HLO (`compiled.as_text()`); knows nothing of schedules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# Name, shape (a tuple in brackets, or a word), opcode, operands.
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
MESSAGE = re.compile(r"(type\d+_permute\d+)")  # scopes that `jaxpipe.program.rounds` gives to its permutes
PAGE_TRANSFER = re.compile(r"(type\d+_transfer\d*)")
HOST_COPY = re.compile(r"(on_host/dynamic_(?:update_)?slice)")  # `jaxpipe.program.channels.host_pages`: of blocks
EXCHANGE = re.compile(r"(type\d+_exchange\d+)")
EXPERTS = re.compile(r"(layer_over_expert)")  # and `jaxpipe.mesh.collectives` to the collectives of an axis
ENDS_OVER_DATA = re.compile(r"(ends_over_data)")  # of embedding and head: the same files
OVER_DATA = re.compile(r"((?:gather|sum)_over_data)")  # of layers: `jaxpipe.program.weight_copies`, `device_sums`
BY_DATA = ("all-gather", "reduce-scatter", "all-reduce")
IN_PAIRS = {  # half of a pair -> scope of its layers' collectives, and scope of all that the other one does
    half: (re.compile(rf"(pair_{half}/.*layer_over_\w+)"), re.compile(rf"pair_{other}"))
    for half, other in (("forward", "backward"), ("backward", "forward"))
}
OF_LAYERS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
OF_EXPERTS = ("all-gather", "reduce-scatter", "all-to-all")  # by which rows go to the devices of experts, and back
# On GPUs a matmul is a call of cuBLAS or a fusion of Triton, no `dot`; those of experts are kernels of Pallas.
_MATRIX_PRODUCT = re.compile(r"__cublas|__triton_\w*gemm|__gpu\$xla\.gpu\.triton")

COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"}

# Operations that name a buffer or pass it on; what a while or a call writes is counted inside it.
_PASSES = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "opt-barrier"),
    *("while", "call", "conditional", "dynamic-update-slice"),
}


@dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    shape: str  # as written, without layout: f32[8,2,256]
    opcode: str
    rest: str  # operands and attributes

    @property
    def called(self) -> list[str]:
        """The computations that the instruction calls."""
        branches = _BRANCHES.search(self.rest)
        listed = [name.strip().lstrip("%") for name in branches[1].split(",")] if branches else []
        return _CALLED.findall(self.rest) + listed


@dataclass
class Computation:
    """A named list of instructions."""

    instructions: list[Instruction] = field(default_factory=list)
    root: Instruction | None = None


def computations(text: str) -> tuple[dict[str, Computation], str]:
    """All computations of an HLO module by name, and the name of its entry."""
    by_name: dict[str, Computation] = {}
    # Set by the line that begins with ENTRY, which may come anywhere.
    entry = ""
    current = Computation()
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = by_name[header[2]] = Computation()
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            # Layouts are left out: the same buffer has several.
            instruction = Instruction(match[2], re.sub(r"\{[^}]*\}", "", match[3]), match[4], match[5])
            current.instructions.append(instruction)
            if match[1]:
                current.root = instruction
    return by_name, entry


def collectives_in(text: str) -> set[str]:
    """The kinds of collectives in a program, as "all-reduce"."""
    opcodes = (i.opcode for computation in computations(text)[0].values() for i in computation.instructions)
    return {opcode.removesuffix("-start") for opcode in opcodes} & COLLECTIVES


def whole_writes(text: str, shapes: Iterable[str]) -> list[Instruction]:
    """Instructions inside loops that write all of a buffer of one of `shapes`.

    Every instruction, copy or fusion whose result has such a shape is counted, except those that pass a
    buffer on and those that write one slice of it in place.

    Args:
        shapes: the shapes as HLO writes them: `f32[8,2,256]`.

    Raises:
        ValueError: the program has no loop.
    """
    by_name, entry = computations(text)
    shapes = set(shapes)
    outside = [i for name in _reachable(by_name, [entry]) for i in by_name[name].instructions]
    loops = _reachable(by_name, [c for i in outside if i.opcode == "while" for c in i.called])
    if not loops:
        raise ValueError("the program has no loop, so there is nothing to count in")
    return [
        instruction
        for name in sorted(loops)
        for instruction in by_name[name].instructions
        if shapes.intersection(re.findall(r"\w+\[[\d,]*\]", instruction.shape))
        and instruction.opcode not in _PASSES
        and not _updates_in_place(by_name, instruction)
    ]


def overlapped_permutes(
    text: str, *, scope: re.Pattern[str] | None = None, opcode: str = "collective-permute"
) -> tuple[int, int]:
    """The number of permutes of a scheduled GPU program, and of those that overlap with an action.

    A permute overlaps if it is asynchronous and a matmul, or a loop with one, runs between its start and its
    end: the guard of an action is a loop.

    Args:
        scope: pattern of the scopes to count; None counts all. Permutes that XLA has combined count as one.
        opcode: of other collectives, as "all-reduce".
    """
    by_name, _ = computations(text)
    permutes = list(_collectives(by_name, scope, opcode))
    return len(permutes), sum(permute.is_hidden for permute in permutes)


def overlapped_bytes(
    text: str, *, scope: re.Pattern[str], opcodes: Iterable[str], behind: re.Pattern[str] | None = None
) -> tuple[int, int]:
    """Bytes of a device's collectives, and of those that overlap with a matmul, as `overlapped_permutes` says.

    Of each the whole arrays are counted, what is gathered or is to be scattered, as often as loops around it turn, up
    to the first loop that XLA knows no number of turns of: the guard of an action, which is so counted once.

    Args:
        scope: pattern of the scopes to count.
        opcodes: of the collectives.
        behind: pattern of the scopes whose matmuls count; None: all do.
    """
    by_name, _ = computations(text)
    # Name of a body -> the computation in which its loop stands, and the loop.
    loops = {name: (outer, i) for outer in by_name for i in by_name[outer].instructions for name in _bodies(i)}
    num_bytes = num_hidden = 0
    for opcode in opcodes:
        for computation, instruction, is_hidden in _collectives(by_name, scope, opcode, behind):
            size = _whole_bytes(by_name[computation], instruction)
            while computation in loops:
                computation, loop = loops[computation]
                turns = _TURNS.search(loop.rest)
                if turns is None:
                    break
                size *= int(turns[1])
            num_bytes += size
            num_hidden += size * is_hidden
    return num_bytes, num_hidden


def overlapped_in_pairs(text: str) -> dict[str, tuple[int, int]]:
    """Opcode -> bytes of the collectives of layers in pairs, and of those with a matmul of the other half beside them.

    Bytes are as of `overlapped_bytes`; a kind that pairs do not have is left out.
    """
    of_kinds = {}
    for opcode in OF_LAYERS:
        halves = [
            overlapped_bytes(text, scope=scope, opcodes=[opcode], behind=other) for scope, other in IN_PAIRS.values()
        ]
        of_kinds[opcode] = sum(num for num, _ in halves), sum(hidden for _, hidden in halves)
    return {opcode: counts for opcode, counts in of_kinds.items() if counts[0]}


class _Collective(NamedTuple):
    computation: str
    instruction: Instruction
    is_hidden: bool


def _collectives(
    by_name: dict[str, Computation],
    scope: re.Pattern[str] | None,
    opcode: str,
    behind: re.Pattern[str] | None = None,
) -> Iterator[_Collective]:
    """Those of the opcode and scope; hidden are asynchronous ones with a matmul, of `behind`, between start and end."""
    for name, computation in by_name.items():
        # Name of a start -> matmuls before it, in the order in which the GPU executes them.
        started: dict[str, int] = {}
        hidden = set()
        num_actions = 0
        for instruction in computation.instructions:
            num_actions += _multiplies_matrices(by_name, instruction, behind)
            if instruction.opcode == f"{opcode}-start" and not _is_synchronous(instruction):
                started[instruction.name] = num_actions
            elif instruction.opcode == f"{opcode}-done" and not _is_synchronous(instruction):
                # The first operand of a done is its start.
                start = _OPERAND.search(instruction.rest)
                if start and num_actions > started.get(start[1], num_actions):
                    hidden.add(start[1])
        for instruction in computation.instructions:
            is_asked_for = scope is None or scope.search(instruction.rest) is not None
            if instruction.opcode in (opcode, f"{opcode}-start") and is_asked_for:
                yield _Collective(name, instruction, instruction.name in hidden)


def _bodies(loop: Instruction) -> list[str]:
    return re.findall(r"body=%?([\w.\-]+)", loop.rest) if loop.opcode == "while" else []


def _whole_bytes(computation: Computation, collective: Instruction) -> int:
    """Bytes of what a collective takes or of what it makes, whichever are more."""
    shapes = {i.name: i.shape for i in computation.instructions}
    operands = _OPERAND.findall(collective.rest.partition(")")[0])
    taken = sum(_num_bytes(shapes.get(name, "")) for name in operands)
    # A start has both in its shape.
    made = _num_bytes(collective.shape) - (taken if collective.opcode.endswith("-start") else 0)
    return max(taken, made)


def _num_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple: of what has bytes of its own."""
    arrays = re.findall(r"\b[a-z]+(\d+)\w*\[([\d,]*)\]", shape)
    return sum(int(bits) // 8 * math.prod(map(int, filter(None, dims.split(",")))) for bits, dims in arrays)


def num_instructions(text: str) -> int:
    """The number of instructions of the program, a measure of its size."""
    return sum(len(computation.instructions) for computation in computations(text)[0].values())


def _reachable(by_name: dict[str, Computation], names: list[str], *, in_fusions: bool = False) -> set[str]:
    """Computations that run when `names` run; those inside fusions, which write no buffers, only `in_fusions`."""
    # Computations may be called from several places.
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in by_name and name not in seen:
            seen.add(name)
            names += [c for i in by_name[name].instructions if in_fusions or i.opcode != "fusion" for c in i.called]
    return seen


def _is_synchronous(permute: Instruction) -> bool:
    return '"is_sync":true' in permute.rest


def executed(by_name: dict[str, Computation], instruction: Instruction, nested: Collection[str]) -> list[Instruction]:
    """The instruction, and those in it if its opcode is among the `nested` ones."""
    is_open = instruction.opcode in nested
    inside = _reachable(by_name, instruction.called, in_fusions="fusion" in nested) if is_open else ()
    return [instruction, *(inner for name in inside for inner in by_name[name].instructions)]


def _multiplies_matrices(
    by_name: dict[str, Computation], instruction: Instruction, scope: re.Pattern[str] | None = None
) -> bool:
    """Whether it is a matmul, or a loop or fusion with one; of the scope, if there is one."""
    # A matmul that reads its kernel in place is a fusion around the call of cuBLAS.
    run = executed(by_name, instruction, ("while", "fusion"))
    products = [inner for inner in run if inner.opcode == "dot" or _MATRIX_PRODUCT.search(inner.rest)]
    return any(scope is None or scope.search(inner.rest) or scope.search(instruction.rest) for inner in products)


def _updates_in_place(computed: dict[str, Computation], instruction: Instruction) -> bool:
    """Whether a fusion ends in updates of slices, one for each of its results."""
    if instruction.opcode != "fusion":
        return False
    fused = computed[instruction.called[0]]
    by_name = {i.name: i for i in fused.instructions}
    ends = [fused.root]
    if fused.root and fused.root.opcode == "tuple":
        ends = [by_name[name] for name in re.findall(r"%([\w.\-]+)", fused.root.rest) if name in by_name]
    return all(_is_update(by_name, end) for end in ends)


def _is_update(by_name: dict[str, Instruction], end: Instruction | None) -> bool:
    # A bitcast changes the shape of the updated buffer, not the buffer.
    while end is not None and end.opcode == "bitcast":
        operand = re.search(r"%([\w.\-]+)", end.rest)
        end = by_name.get(operand[1]) if operand else None
    return end is not None and end.opcode == "dynamic-update-slice"
