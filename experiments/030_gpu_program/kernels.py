"""The bytes that each kernel of a layer reads and writes, from the optimized HLO of a program for GPUs, by class.

A slice counts as its own bytes, and so does the slice that is written in place. Loops with a known length and a product
in them are layers.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import stand_in

from jaxpipe.compile import Computation, Instruction, computations

MIB = 2**20
PRODUCTS, ATTENTION = "products", "attention"
PAGES, SUMS, SLICES, COPIES, REST = "page writes", "sums", "slices copied", "copies", "elementwise and norms"
CLASSES = (PAGES, SUMS, SLICES, COPIES, REST)  # kernels that are no products

_ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "f64": 8, "s64": 8}
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "opt-barrier"}
_ALLOCATION = 'custom_call_target="AllocateBuffer"'  # of `jax.lax.empty`: nothing is written
_NAMES = re.compile(r"%([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_STACK_OF_SUMS = re.compile(r"\(?f32\[\d+,\d+,\d+,\d+\]")  # [chunk, layer, ...] of a kernel
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def num_bytes(shape: str) -> int:
    """Bytes of a shape as HLO writes it; those of all parts of a tuple."""
    return sum(
        _ITEM_BYTES.get(dtype, 0) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape)
    )


def operands(instruction: Instruction) -> list[str]:
    """The names of what an instruction reads."""
    depth = 1
    for end, letter in enumerate(instruction.rest):
        depth += (letter in "([{") - (letter in ")]}")
        if not depth:
            return _NAMES.findall(instruction.rest[:end])
    raise ValueError(f"no end of the operands of {instruction.name}")


def moved(of_name: dict[str, Computation], instruction: Instruction, here: dict[str, Instruction]) -> int:
    """Bytes that an instruction reads and writes."""
    if instruction.opcode.endswith("-done") or _ALLOCATION in instruction.rest:
        return 0
    if instruction.opcode in ("fusion", "fusion-start", "async-start") and instruction.called:
        return _moved_by_fusion(of_name[instruction.called[0]])
    if instruction.opcode == "dynamic-slice":
        return 2 * num_bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * num_bytes(here[operands(instruction)[1]].shape)
    return num_bytes(instruction.shape) + sum(
        num_bytes(here[name].shape) for name in operands(instruction) if name in here
    )


def _moved_by_fusion(fused: Computation) -> int:
    inside = {i.name: i for i in fused.instructions}
    readers: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
    for instruction in fused.instructions:
        for place, name in enumerate(operands(instruction)):
            readers[name].append((instruction, place))

    def read(name: str) -> int:
        """Of a parameter: its slices, if nothing else is read of it; nothing if it is written in place."""
        whole = num_bytes(inside[name].shape)
        total = 0
        for reader, place in readers[name]:
            if reader.opcode in ("dynamic-slice", "slice", "gather") and not place:
                total += num_bytes(reader.shape)
            elif reader.opcode == "bitcast":
                total += read(reader.name)
            elif not (reader.opcode == "tuple" or (reader.opcode == "dynamic-update-slice" and not place)):
                total += whole
        return min(whole, total)

    def written(name: str) -> int:
        instruction = inside[name]
        if instruction.opcode == "dynamic-update-slice":
            return num_bytes(inside[operands(instruction)[1]].shape)
        if instruction.opcode == "bitcast" and operands(instruction)[0] in inside:
            return written(operands(instruction)[0])
        return 0 if instruction.opcode == "parameter" else num_bytes(instruction.shape)

    root = fused.root
    assert root
    outs = operands(root) if root.opcode == "tuple" else [root.name]
    return sum(read(i.name) for i in fused.instructions if i.opcode == "parameter") + sum(map(written, outs))


def class_of(of_name: dict[str, Computation], instruction: Instruction) -> str:
    """The class of a kernel."""
    inside = [i for name in instruction.called for i in of_name[name].instructions] if instruction.called else []
    text = " ".join([instruction.rest, *(i.rest for i in inside)])
    if instruction.opcode == "custom-call" and stand_in.NAME in text:
        return ATTENTION
    if re.search(r"__cublas|__triton_\w*gemm", text) or any(i.opcode == "dot" for i in inside):
        return PRODUCTS
    if instruction.opcode.startswith("copy"):
        return COPIES
    updated = [i for i in inside if i.opcode == "dynamic-update-slice"]
    if updated:
        return SUMS if updated[0].shape.startswith("f32") and len(updated[0].shape.split(",")) > 2 else PAGES
    computed = {i.opcode for i in inside} - _FREE - {"dynamic-slice", "copy", "transpose", "reshape"}
    if instruction.opcode == "dynamic-slice" or (inside and not computed):
        return SLICES
    return REST


def layers(text: str) -> Iterator[tuple[str, Counter[str]]]:
    """(action, class -> bytes) of each loop over layers of a program; the action is told by what is in the loop.

    Args:
        text: optimized HLO.
    """
    of_name, _ = computations(text)
    for action, bodies in layer_bodies(text):
        yield action, sum((_account(of_name, body) for body in bodies), Counter())


def layer_bodies(text: str) -> Iterator[tuple[str, list[Computation]]]:
    """(action, bodies) of each loop over layers; of a layer in two loops, as of I, both bodies."""
    of_name, _ = computations(text)
    for computation in of_name.values():
        for body, trips in _loops(computation):
            bodies = _with_loops_of_one_turn(of_name, body)
            totals = sum((_account(of_name, each) for each in bodies), Counter())
            if trips > 1 and totals[PRODUCTS]:
                yield _action(totals, [i for each in bodies for i in each.instructions]), bodies


def _with_loops_of_one_turn(of_name: dict[str, Computation], name: str) -> list[Computation]:
    """The body of a layer, and those of the loops in it whose length is not known: `once`, as I reads, has one turn."""
    inner = [i for i in of_name[name].instructions if i.opcode == "while" and not _TRIPS.search(i.rest)]
    return [of_name[name], *(of_name[_BODY.findall(i.rest)[0]] for i in inner)]


def of_loop(text: str, num_turns: int) -> Counter[str]:
    """Class -> bytes of a turn of the loop of so many turns, with those of the loops in it.

    Args:
        text: optimized HLO.
        num_turns: the loop's known length.
    """
    of_name, _ = computations(text)

    def account(body: str) -> Counter[str]:
        totals = _account(of_name, of_name[body])
        for inner, trips in _loops(of_name[body]):
            for kind, size in account(inner).items():
                totals[kind] += trips * size
        return totals

    return account(body_of_loop(text, num_turns))


def body_of_loop(text: str, num_turns: int) -> str:
    """The name of the body of the loop of so many turns, of which there is one."""
    of_name, _ = computations(text)
    (body,) = {body for of in of_name.values() for body, trips in _loops(of) if trips == num_turns}
    return body


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction is a kernel, and no loop of kernels."""
    return instruction.opcode not in (*_FREE, "while", "conditional", "call")


def listed(text: str) -> Iterator[tuple[str, int, int]]:
    """(result, times, bytes each time) of every kernel of a program that is no product, in order.

    Args:
        text: optimized HLO, whose loops have known lengths.
    """
    of_name, entry = computations(text)

    def kernels(body: str, times: int) -> Iterator[tuple[str, int, int]]:
        here = {i.name: i for i in of_name[body].instructions}
        for instruction in here.values():
            if instruction.opcode not in (*_FREE, "while") and class_of(of_name, instruction) != PRODUCTS:
                yield instruction.shape, times, moved(of_name, instruction, here)
        for inner, trips in _loops(of_name[body]):
            yield from kernels(inner, times * trips)

    return kernels(entry, 1)


def _loops(of: Computation) -> list[tuple[str, int]]:
    """(body, turns) of the loops of a computation whose lengths are known."""
    found = [(i, _TRIPS.search(i.rest)) for i in of.instructions if i.opcode == "while"]
    return [(_BODY.findall(i.rest)[0], int(t[1])) for i, t in found if t]


def _account(of_name: dict[str, Computation], body: Computation) -> Counter[str]:
    here = {i.name: i for i in body.instructions}
    totals: Counter[str] = Counter()
    for instruction in body.instructions:
        if is_kernel(instruction):
            totals[class_of(of_name, instruction)] += moved(of_name, instruction, here)
    return totals


def _action(totals: Counter[str], instructions: list[Instruction]) -> str:
    """The action whose layer a loop is; the head's chunks are a loop, too."""
    attention = [i for i in instructions if i.opcode == "custom-call" and stand_in.NAME in i.rest]
    if attention:
        # Of the backward's attention all that the forward's reads and saves are operands.
        return "F" if len(operands(attention[0])) == 3 else "I" if totals[PAGES] else "B"
    sums = [i for i in instructions if i.opcode not in _FREE and _STACK_OF_SUMS.match(i.shape)]
    return "W" if sums else "head"
