"""The kernels of a compiled GPU program, and how long each takes at least: a roofline.

Goes in: optimized HLO (`compiled.as_text()`). Comes out: of each kernel its FLOPs, its bytes and how often it runs. A
product is a call of cuBLAS. All else, mostly fusions, counts no FLOPs, only bytes: each array is read once and
written once, and of an array that is sliced or updated at an index only the slice counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpipe.cluster.hardware import Hardware
from jaxpipe.compile.hlo import Computation, Instruction, computations

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
_ARRAY = re.compile(rf"\b({'|'.join(_ITEM_BYTES)})\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\["(\d+)"\]')
_BETA = re.compile(r'"beta":([\d.]+)')
_WORKSPACE = re.compile(r", s8\[\d+\]")

# These name a buffer, or what the compiler holds ready.
_NO_KERNEL = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "opt-barrier", "after-all"}
_NOT_COUNTED = {"conditional", "dot", "convolution", "async-start"}
_SLICES = {"dynamic-slice", "slice", "gather"}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a program.

    Attributes:
        name: of its instruction.
        result: shape of what it writes, as HLO writes it, without the workspace of cuBLAS.
        times: how often it runs.
        flops: of a product in 16 bits, each time; 0 for all else.
        num_bytes: read and written, each time.
        adds: whether it is a product that is added to one of its operands (beta of cuBLAS is not 0).
    """

    name: str
    result: str
    times: int
    flops: int
    num_bytes: int
    adds: bool = False

    def seconds(self, hardware: Hardware) -> float:
        """Of all its runs, at the peaks of the data sheet."""
        return self.times * max(self.flops / hardware.bf16_flops_per_s, self.num_bytes / hardware.memory_bytes_per_s)

    def bound_by(self, hardware: Hardware) -> str:
        """What it waits for: "compute" or "memory"."""
        computes = self.flops / hardware.bf16_flops_per_s >= self.num_bytes / hardware.memory_bytes_per_s
        return "compute" if computes else "memory"


def kernels(text: str) -> list[Kernel]:
    """All kernels of a program, in the order of the text.

    Raises:
        ValueError: a loop without a known number of rounds, a product that is no call of cuBLAS or is not in 16 bits,
            a branch.
    """
    found, entry = computations(text)
    return list(_kernels(found, found[entry], 1))


def _kernels(found: dict[str, Computation], computation: Computation, times: int) -> Iterator[Kernel]:
    shapes = {instruction.name: instruction.shape for instruction in computation.instructions}
    for instruction in computation.instructions:
        name, opcode, result = instruction.name, instruction.opcode, instruction.shape
        operands = [shapes[operand] for operand in _operands(instruction)] if opcode not in _NO_KERNEL else []
        if opcode == "while":
            trips, body = _TRIP_COUNT.search(instruction.rest), _BODY.search(instruction.rest)
            if not trips or not body:
                raise ValueError(f"it is not known how often the loop {name} runs")
            yield from _kernels(found, found[body[1]], times * int(trips[1]))
        elif opcode == "call":
            yield from _kernels(found, found[instruction.called[0]], times)
        elif opcode == "custom-call" and "AllocateBuffer" in instruction.rest:
            continue  # room, which no kernel fills
        elif opcode == "custom-call":
            yield _product(instruction, operands, times)
        elif opcode == "fusion":
            yield Kernel(name, result, times, 0, _fused_bytes(found[instruction.called[0]]))
        elif opcode in _NOT_COUNTED:
            raise ValueError(f"{name}: {opcode} is not counted")
        elif opcode not in _NO_KERNEL:
            yield Kernel(name, result, times, 0, sum(map(_num_bytes, [*operands, result])))


def _product(call: Instruction, operands: list[str], times: int) -> Kernel:
    contracted, beta = _CONTRACTED.search(call.rest), _BETA.search(call.rest)
    if "__cublas" not in call.rest or not contracted or not beta:
        raise ValueError(f"{call.name} is no product of cuBLAS")
    dtype, left = _arrays(operands[0])[0]
    if _ITEM_BYTES[dtype] != 2:
        raise ValueError(f"{call.name}: a product in {dtype}")
    result = _WORKSPACE.sub("", call.shape).strip("()")
    flops = 2 * math.prod(_arrays(result)[0][1]) * left[int(contracted[1])]
    num_bytes = sum(map(_num_bytes, [*operands, result]))
    return Kernel(call.name, result, times, flops, num_bytes, adds=float(beta[1]) != 0)


def _fused_bytes(fused: Computation) -> int:
    """Bytes that a fusion reads and writes."""
    if fused.root is None or any(i.opcode in (*_NOT_COUNTED, "custom-call") for i in fused.instructions):
        raise ValueError("a fusion with a product or a branch in it is not counted")
    by_name = {instruction.name: instruction for instruction in fused.instructions}
    read = sum(_read_bytes(fused, i) for i in fused.instructions if i.opcode == "parameter")
    ends = [by_name[name] for name in _operands(fused.root)] if fused.root.opcode == "tuple" else [fused.root]
    return read + sum(_written_bytes(by_name, end) for end in ends)


def _read_bytes(fused: Computation, value: Instruction) -> int:
    """Bytes that a fusion reads of one of its values: all of it, or slices alone."""
    total, whole = 0, _num_bytes(value.shape)
    for user in fused.instructions:
        if user.opcode == "parameter" or value.name not in (operands := _operands(user)):
            continue
        if user.opcode == "bitcast":
            total += _read_bytes(fused, user)
        elif user.opcode in _SLICES and value.name == operands[0]:
            total += _num_bytes(user.shape)
        elif user.opcode != "dynamic-update-slice" or value.name != operands[0]:  # else: updated in place
            return whole
    return min(total, whole)


def _written_bytes(by_name: dict[str, Instruction], end: Instruction) -> int:
    """Bytes of one result of a fusion: a slice, where it updates a slice of a parameter."""
    last = _behind_bitcasts(by_name, end)
    if last.opcode == "dynamic-update-slice":
        updated, update, *_ = (by_name[name] for name in _operands(last))
        if _behind_bitcasts(by_name, updated).opcode == "parameter":
            return _num_bytes(update.shape)
    return _num_bytes(end.shape)


def _behind_bitcasts(by_name: dict[str, Instruction], instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = by_name[_operands(instruction)[0]]
    return instruction


def _operands(instruction: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", instruction.rest.split(")", 1)[0])


def _arrays(shape: str) -> list[tuple[str, list[int]]]:
    """The dtype and the sizes of each array of a shape."""
    return [(dtype, [int(size) for size in sizes.split(",") if size]) for dtype, sizes in _ARRAY.findall(shape)]


def _num_bytes(shape: str) -> int:
    return sum(_ITEM_BYTES[dtype] * math.prod(sizes) for dtype, sizes in _arrays(shape))
