"""Permutes and collectives of a compiled program, as its text has them."""

import re

from jaxpipe.compile.hlo import COLLECTIVES, MESSAGE, Computation, Instruction, computations, executed

_NESTED = ("while", "conditional", "call")


def permute_pairs(text: str, *, scope: re.Pattern[str] = MESSAGE) -> dict[str, set[tuple[int, int]]]:
    """The (source, target) pairs of each permute whose scope's name matches `scope`, by that name."""
    pairs: dict[str, set[tuple[int, int]]] = {}
    for computation in computations(text)[0].values():
        for instruction in computation.instructions:
            named = scope.search(instruction.rest)
            if instruction.opcode in ("collective-permute", "collective-permute-start") and named:
                listed = re.search(r"source_target_pairs=\{(?:\{\d+,\d+\},?)*\}", instruction.rest)
                numbers = re.findall(r"\{(\d+),(\d+)\}", listed[0] if listed else "")
                pairs.setdefault(named[1], set()).update((int(s), int(t)) for s, t in numbers)
    return pairs


def unordered_collectives(text: str) -> list[tuple[str, str]]:
    """Pairs of instructions with collectives that no data orders, of which at least one is a loop or a branch.

    XLA executes such a pair at once on a CPU device, in an order of its own, where its collectives meet under one key
    or take each other's threads. Collectives of one computation it executes one after another.
    """
    of_name, _ = computations(text)
    pairs = []
    for computation in of_name.values():
        before: dict[str, set[str]] = {}  # instruction -> the instructions with collectives that it waits for
        nested: dict[str, bool] = {}  # instruction with collectives -> whether it is a loop or a branch
        for instruction in computation.instructions:
            operands = [name for name in re.findall(r"%([\w.\-]+)", instruction.rest) if name in before]
            waits_for = {name for operand in operands for name in before[operand]} | nested.keys() & set(operands)
            if _has_collective(of_name, instruction):
                is_nested = instruction.opcode in _NESTED
                free = [name for name in nested if name not in waits_for and (is_nested or nested[name])]
                # Two plain collectives are ordered by XLA itself, so that one of a pair must be nested.
                pairs += [(name, instruction.name) for name in free]
                nested[instruction.name] = is_nested
            # Waiting passes on: who waits for this one waits for all that it waits for.
            before[instruction.name] = waits_for
    return pairs


def _has_collective(of_name: dict[str, Computation], instruction: Instruction) -> bool:
    """Whether it is a collective, or a loop or branch with one."""
    run = executed(of_name, instruction, _NESTED)
    return any(inner.opcode.removesuffix("-start") in COLLECTIVES for inner in run)
