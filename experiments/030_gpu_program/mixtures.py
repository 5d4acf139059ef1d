"""Compiles layers of experts for absent H100s and adds up what each kernel reads and writes, by class.

python experiments/030_gpu_program/mixtures.py           # needs the extra gpu-aot; five minutes
"""

import re
from collections import Counter
from collections.abc import Iterator

import jax
import kernels
import run
import stand_in
from ml_collections import ConfigDict

from jaxpipe.compile import Computation, Instruction, computations
from jaxpipe.models.dispatch import Dropless

PRESETS = ("qwen3_30b_a3b", "mixtral_8x7b")
SCHEDULES = ("1f1b", "zb_v")
EXPERTS, ROWS, ACTIVATION, ROUTER = "products of experts", "rows spread and collected", "activation", "router, sorting"
CLASSES = (kernels.SLICES, kernels.SUMS, kernels.PAGES, kernels.COPIES, ROWS, ACTIVATION, ROUTER, kernels.REST)


class Layer:
    """The sizes of a layer of experts, by which its kernels are told apart."""

    def __init__(self, config: ConfigDict):
        model = config.model
        self.num_experts = model.num_experts
        self.needed = run.NUM_TOKENS * model.experts_per_token
        self.dispatch = Dropless(model.num_experts, model.experts_per_token)
        self.tiles, self.size = self.dispatch.shape(run.NUM_TOKENS // config.data.seq_len, config.data.seq_len)
        self.hidden = model.hidden
        self.width = model.feed_forward

    def class_of(self, of_name: dict[str, Computation], instruction: Instruction, here: dict[str, Instruction]) -> str:
        """The class of a kernel."""
        told = kernels.class_of(of_name, instruction)
        if told == kernels.REST and instruction.opcode == "custom-call":
            return EXPERTS if {self.hidden, self.width} & {*_dims(instruction.shape)} else ROUTER
        if told in (kernels.REST, kernels.PAGES, kernels.SLICES) and self._is_of_rows(instruction, here):
            # A fusion that writes pages alone is one; one that does more is told by what it computes.
            if told == kernels.PAGES:
                return told
            shapes = _shapes(instruction, here)
            return ACTIVATION if any(self.width in shape for shape in shapes) else ROWS
        shapes = _shapes(instruction, here)
        if told == kernels.REST and not any(self.hidden in shape for shape in shapes):
            is_of_choices = any(self.num_experts in shape or self.needed in shape for shape in shapes)
            return ROUTER if is_of_choices or instruction.opcode in ("sort", "scatter") else told
        return told

    def _is_of_rows(self, instruction: Instruction, here: dict[str, Instruction]) -> bool:
        rows = self.tiles * self.size
        shapes = _shapes(instruction, here)
        return any(rows in shape or (self.tiles in shape and self.size in shape) for shape in shapes)

    def moved(self, of_name: dict[str, Computation], instruction: Instruction, here: dict[str, Instruction]) -> int:
        """Bytes that a kernel reads and writes; of a stack of kernels the layer's part."""
        if instruction.opcode != "custom-call" or kernels.class_of(of_name, instruction) != kernels.REST:
            return kernels.moved(of_name, instruction, here)
        operands = [here[name].shape for name in kernels.operands(instruction) if name in here]
        return sum(map(self._part, re.findall(r"\w+\[[\d,]*\]", " ".join([instruction.shape, *operands]))))

    def _part(self, shape: str) -> int:
        dims = _dims(shape)
        is_stack = len(dims) == 3 and {*dims[1:]} == {self.hidden, self.width}
        return kernels.num_bytes(shape) * self.num_experts // dims[0] if is_stack else kernels.num_bytes(shape)


def _dims(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(dim) for dim in found[1].split(",") if dim] if found else []


def _shapes(instruction: Instruction, here: dict[str, Instruction]) -> list[list[int]]:
    """The dims of results and operands, but of pools."""
    operands = [here[name].shape for name in kernels.operands(instruction) if name in here]
    return [_dims(shape) for shape in re.findall(r"\w+\[[\d,]+\]", " ".join([instruction.shape, *operands]))]


def totals(layer: Layer, text: str) -> Iterator[tuple[str, Counter[str], int]]:
    """(action, class -> bytes, kernels) of each loop over layers."""
    of_name, _ = computations(text)
    for action, bodies in kernels.layer_bodies(text):
        of_action: Counter[str] = Counter()
        number = 0
        for body in bodies:
            counted, more = account(layer, of_name, body)
            of_action += counted
            number += more
        yield action, of_action, number


def account(layer: Layer, of_name: dict[str, Computation], body: Computation) -> tuple[Counter[str], int]:
    """Class -> bytes of a computation, and its kernels."""
    here = {i.name: i for i in body.instructions}
    counted: Counter[str] = Counter()
    number = 0
    for instruction in body.instructions:
        if not kernels.is_kernel(instruction):
            continue
        counted[layer.class_of(of_name, instruction, here)] += layer.moved(of_name, instruction, here)
        number += not instruction.opcode.endswith("-done")
    return counted, number


def main() -> None:
    """Prints a table for each preset."""
    jax.nn.dot_product_attention = stand_in.dot_product_attention
    for preset in PRESETS:
        layer = Layer(run.config_of("1f1b", preset))
        print(f"| {preset}, MiB a layer and microbatch, jax {jax.__version__} | action |", end=" ")
        print(" | ".join([*CLASSES, "no products", EXPERTS, kernels.PRODUCTS, "kernels"]), "|")
        print("|---" * (len(CLASSES) + 6) + "|")
        for schedule in SCHEDULES:
            seen = set()
            for action, counted, number in totals(layer, run.pipelined(schedule, preset)[0]):
                if action != "head" and action not in seen:
                    print(row(schedule, action, counted, number), flush=True)
                seen.add(action)
        of_name, _ = computations(text := run.plain(run._unrolled, is_stacked=False, preset=preset))
        body = kernels.body_of_loop(text, run.NUM_MICROBATCHES)
        counted, number = account(layer, of_name, of_name[body])
        mean = Counter({kind: size // run.NUM_LAYERS for kind, size in counted.items()})
        print(row("jax.vjp, unrolled", "F + B", mean, number // run.NUM_LAYERS))
        rows = layer.tiles * layer.size
        print(f"\nrows: {layer.needed:,} needed, {rows:,} in arrays, {rows / layer.needed:.3f}\n", flush=True)


def row(name: str, action: str, counted: Counter[str], number: int) -> str:
    """A row of the table."""
    mib = {kind: round(size / kernels.MIB) for kind, size in counted.items()}
    apart = [mib.get(kind, 0) for kind in CLASSES]
    cells = [*apart, sum(apart), mib.get(EXPERTS, 0), mib.get(kernels.PRODUCTS, 0), number]
    return f"| {name} | {action} | " + " | ".join(f"{cell:,}" for cell in cells) + " |"


if __name__ == "__main__":
    main()
