"""Compiled programs from every side: gradients of plain `jax.grad`, the table's permutes, nothing big written whole.

The programs cover what the round body has: messages over one permute and several, an inbox, pages that travel in one
lane and in several, gradients that travel, chunks, split backwards with deferred arrays in the slot and apart,
parameters over `data` and `tensor`. The bound of gradients is that of `tiny_gpt`.
"""

import hashlib
import importlib
import json
import re
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from collectives_of_programs import permute_pairs, unordered_collectives
from programs import Spec, expected, program, results, traced
from tiers import tiers
from tiny_gpt import LARGEST_ERROR
from tiny_models import relative_errors

from jaxpipe.compile.hlo import (
    EXCHANGE,
    PAGE_TRANSFER,
    computations,
    whole_writes,
)
from jaxpipe.lowering import lower
from jaxpipe.measure.step_pair import gradient_shapes, pool_shapes
from jaxpipe.mesh import AXES
from jaxpipe.program.channels import CHANNELS
from jaxpipe.program.held_bytes import link_bytes
from jaxpipe.schedules import build

GOLDEN = Path(__file__).parents[1] / "golden" / "programs.json"
EARLY_FORWARDING = (("scaling", "early_forwarding"),)
WHOLE = (("unit", "microbatch"),)

BITPIPE = Spec("bitpipe", 4, 8, 16)
FEW = [
    Spec("1f1b", 2, 5, 4, data=2, tensor=2, family="llama"),
    Spec("bpipe", 4, 9, 4),
]
MORE = [
    BITPIPE,
    Spec("v_half", 2, 4, 16, recompute="full"),  # what I defers has most of its room apart
    Spec("1f1b", 2, 8, 7, family="bert", tensor=2),
    Spec("interleaved_1f1b", 4, 8, 16, data=2),  # gathers and sums in pieces
    Spec("zb_h1", 4, 6, 4),
]
TRACED = [  # and run in the third tier
    Spec("1f1b", 4, 6, 16, layers_per_stage=(3, 5, 4, 4)),
    Spec("bpipe", 4, 9, 28, tensor=2),  # seven pages a microbatch: two lanes
]
ALL = [
    *TRACED,
    Spec("bpipe", 4, 9, 16, WHOLE),  # whole microbatches of four pages: two lanes
    Spec("1f1b", 4, 6, 4),
    Spec("1f1b", 8, 16, 16, family="llama"),
    Spec("bitpipe", 4, 8, 16, EARLY_FORWARDING, family="llama", data=2),
    Spec("gpipe", 4, 6, 4),
    Spec("bpipe", 8, 17, 24, family="llama"),
    Spec("bitpipe", 8, 16, 32),
    Spec("1f1b", 4, 6, 7),
    Spec("1f1b", 2, 4, 2),
    Spec("1f1b", 8, 16, 8),
    Spec("1f1b", 2, 8, 7, data=2, tensor=2),
    Spec("1f1b", 2, 8, 8, family="llama", data=2, tensor=2),
    Spec("gpipe", 4, 6, 8, family="llama"),
    Spec("bpipe", 4, 9, 16, WHOLE, family="llama", data=2),
    Spec("bpipe", 4, 9, 28, family="llama"),
    Spec("bpipe", 8, 17, 16),
    Spec("zb_h1", 4, 6, 7, family="llama"),
    Spec("v_half", 2, 4, 8, recompute="full"),
    Spec("dualpipe", 4, 8, 8, recompute="full"),
]


def cases(*schedules: str) -> list:
    """The programs of some schedules, or all, each in its tier."""
    chosen = ([spec for spec in specs if not schedules or spec.schedule in schedules] for specs in (FEW, MORE, ALL))
    few, ci, slow = chosen
    return tiers(few, ci=ci, slow=slow)


every_program = pytest.mark.parametrize("spec", cases(), ids=str)


@every_program
def test_loss_and_every_gradient_are_those_of_plain_grad(spec):
    (loss, grads), (wanted_loss, wanted) = results(spec), expected(spec)
    assert loss == pytest.approx(wanted_loss, rel=LARGEST_ERROR)
    errors = relative_errors(grads, wanted)
    assert max(errors.values()) <= LARGEST_ERROR, errors


def by_stage(devices):
    """[device of `pipe`, all others]."""
    return np.moveaxis(devices, AXES.index("pipe"), 0).reshape(devices.shape[AXES.index("pipe")], -1)


def pairs_by_scope(pipeline, name: str) -> dict[str, set[tuple[int, int]]]:
    """Of a transfer's pairs of `pipe` devices, by scope the pairs of ids on the mesh."""
    ids = by_stage(np.vectorize(lambda device: device.id)(pipeline.mesh.devices))
    return {
        CHANNELS[name].scope(round_type, k): {
            (source, target) for a, b in pairs for source, target in zip(ids[a].tolist(), ids[b].tolist(), strict=True)
        }
        for round_type, of_round in enumerate(pipeline.table.permutes_of(name))
        for k, pairs in enumerate(of_round)
    }


@every_program
def test_messages_pages_and_gradients_travel_between_the_pairs_of_the_table(spec):
    pipeline, text = program(spec).pipeline, program(spec).text
    messages, pages, grads = (
        pairs_by_scope(pipeline, name) for name in ("messages", "parked_pages", "replica_gradients")
    )
    assert messages
    assert bool(pages) == (spec.schedule == "bpipe")
    assert bool(grads) == (pipeline.schedule.num_replicas == 2)
    assert permute_pairs(text) == messages
    assert permute_pairs(text, scope=PAGE_TRANSFER) == pages
    assert permute_pairs(text, scope=EXCHANGE) == grads


@every_program
def test_data_orders_every_collective_in_a_loop_against_all_others(spec):
    """XLA executes what nothing orders at once on a CPU, where such collectives meet under one key: wrong sums."""
    assert unordered_collectives(program(spec).text) == []


@every_program
def test_no_array_without_elements_is_passed_to_the_devices(spec):
    """Passed and used, they crash the compiler of jax 0.11.2."""
    arguments = re.findall(
        r"sdy\.manual_computation.*manual_axes=\{.*?\} \((.*)\) \{$", traced(spec)[2].as_text(), re.M
    )
    shapes = re.findall(r"tensor<([^>]*)>", " ".join(arguments))
    assert len(shapes) > 10  # that the pattern matches
    assert [shape for shape in shapes if "0" in shape.split("x")] == []


ITEM_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1}


@every_program
def test_bytes_of_a_link_are_those_of_the_compiled_permutes(spec):
    """Each permute carries its operand in every round of its type, on the first index of data and tensor."""
    found = program(spec)
    table, mesh = found.pipeline.table, found.pipeline.mesh
    ids = {device.id: position for position, device in enumerate(by_stage(mesh.devices)[:, 0])}
    sent = np.zeros((mesh.shape["pipe"],) * 2, dtype=int)
    for computation in computations(found.text)[0].values():
        for instruction in computation.instructions:
            round_type = re.search(r"type(\d+)_", instruction.rest)
            if instruction.opcode != "collective-permute" or not round_type:
                continue
            ((dtype, dims),) = re.findall(r"(\w+)\[([\d,]*)\]", instruction.shape)
            num_bytes = ITEM_BYTES[dtype] * int(np.prod([int(dim) for dim in dims.split(",") if dim]))
            (listed,) = re.findall(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.rest)
            for source, target in re.findall(r"(\d+),(\d+)", listed):
                if int(source) in ids:
                    sent[ids[int(source)], ids[int(target)]] += table.rounds_of_type[int(round_type[1])] * num_bytes
    asked, ours = link_bytes(found.shapes)
    np.testing.assert_array_equal(ours, sent)
    assert (asked <= ours).all()
    assert asked.any()


@every_program
def test_pools_and_gradient_sums_are_never_written_whole_in_the_loops(spec):
    """With one layer on a device, adding its gradient writes all of the sum; such sums are not looked at."""
    found = program(spec)
    pipeline, storage = found.pipeline, found.shapes.storage
    table = pipeline.table
    apart = (table.schedule.has_split_backward and spec.recompute == "full") or spec.schedule == "zb_h1"
    assert len(storage.pools) == 1 + apart
    shapes = pool_shapes(storage) | gradient_shapes(pipeline, found.params)
    assert all(shape in found.text for shape in shapes)
    assert whole_writes(found.text, shapes) == []


@pytest.mark.parametrize("spec", cases("bpipe"), ids=str)
def test_at_most_four_permutes_are_in_a_round_of_bpipe(spec):
    found = program(spec)
    table, num_rows = found.pipeline.table, len(found.shapes.storage.pools[0].rows)
    in_round = Counter(
        re.findall(r"type\d+_", instruction.rest)[-1]
        for computation in computations(found.text)[0].values()
        for instruction in computation.instructions
        if instruction.opcode in ("collective-permute", "collective-permute-start")
    )
    assert in_round == Counter(
        {
            f"type{round_type}_": len(permutes) + num_rows * len(lanes)
            for round_type, (permutes, lanes) in enumerate(
                zip(table.permutes["messages"], table.permutes_of("parked_pages"), strict=True)
            )
        }
    )
    assert max(in_round.values()) <= 4


@pytest.mark.parametrize("spec", cases("bitpipe", "dualpipe"), ids=str)
def test_all_of_a_layer_travels_in_one_permute_to_the_other_holder(spec):
    """Its gradients in each lane of a type of rounds, and its parameters once a step."""
    found = program(spec)
    permutes = Counter(
        (re.findall(r"type\d+_[a-z]+\d+", instruction.rest) or ["parameters"])[-1]
        for computation in computations(found.text)[0].values()
        for instruction in computation.instructions
        if instruction.opcode == "collective-permute"
    )
    lanes = [
        CHANNELS["replica_gradients"].scope(round_type, lane)
        for round_type, lanes in enumerate(found.pipeline.table.permutes_of("replica_gradients"))
        for lane in range(len(lanes))
    ]
    assert {name: number for name, number in permutes.items() if "_permute" not in name} == dict.fromkeys(
        [*lanes, "parameters"], 1
    )


def test_one_and_several_lanes_are_among_these():
    nums = {num_page_lanes(spec) for spec in (*FEW, *TRACED) if spec.schedule == "bpipe"}
    assert 1 in nums
    assert max(nums) > 1


def num_page_lanes(spec: Spec) -> int:
    schedule = build(spec.schedule, num_devices=spec.pipe, num_microbatches=spec.num_microbatches, **dict(spec.options))
    return lower(schedule, layers_per_stage=(spec.num_layers // spec.pipe,) * spec.pipe).num_lanes("parked_pages")


@pytest.mark.parametrize("spec", cases("bitpipe", "interleaved_1f1b"), ids=str)
def test_matrices_of_all_chunks_are_among_the_gradient_sums(spec):
    """That the check of whole writes looks at sums of every chunk, of both replicas if there are two."""
    found = program(spec)
    schedule = found.pipeline.schedule
    num_rows = schedule.num_replicas * spec.num_layers // schedule.num_devices
    layer = [part.compute_shape for part in jax.tree.leaves(found.shapes.parts["layers"])]
    sizes = {np.prod(shape) for shape in layer if len(shape) > 1}
    sums = gradient_shapes(found.pipeline, found.params)
    assert {np.prod([int(n) for n in re.findall(r"\d+", shape)[1:]]) for shape in sums} == {num_rows * n for n in sizes}


@pytest.mark.ci
def test_the_turn_of_a_v_is_no_permute():
    """From one chunk to the next a V stays on its device, at either end."""
    assert {abs(a - b) for pairs in permute_pairs(program(BITPIPE).text).values() for a, b in pairs} == {1}


@pytest.mark.ci
def test_the_turn_of_looped_chunks_is_one():
    """From the last device the next chunk begins at the first."""
    spec = Spec("interleaved_1f1b", 4, 8, 16, data=2)
    last, first = 3, 0
    turns = {(4 * d + last, 4 * d + first) for d in range(2)}  # ids of two replicas on four devices of pipe
    assert turns <= set().union(*permute_pairs(program(spec).text).values())


def digest(spec: Spec) -> str:
    """Of the traced program without the names of its functions."""
    return hashlib.sha256(re.sub(r"@[\w.]+", "@", traced(spec)[2].as_text()).encode()).hexdigest()[:16]


@pytest.mark.ci
@pytest.mark.parametrize("spec", [*FEW, *MORE, *TRACED], ids=str)
def test_the_traced_program_is_unchanged(spec):
    """A program that changes on purpose gets a new digest: `PYTHONPATH=tests python tests/program/test_programs.py`."""
    golden = json.loads(GOLDEN.read_text())
    if golden["jax"] != jax.__version__:
        pytest.skip(f"the digests are of jax {golden['jax']}")
    assert digest(spec) == golden["programs"][str(spec)]


if __name__ == "__main__":
    importlib.import_module("conftest")  # eight devices
    digests = {str(spec): digest(spec) for spec in (*FEW, *MORE, *TRACED)}
    GOLDEN.write_text(json.dumps({"jax": jax.__version__, "programs": digests}, indent=1) + "\n")
