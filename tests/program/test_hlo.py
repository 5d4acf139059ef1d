"""The compiled program: permutes as the table says, nothing big written whole in its loops, size flat in N and D.

And gradients of layers reduced in the loop, right where they are complete.
"""

import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_mlp
from jax import lax
from tiny_models import QUICKLY, pipeline_of

from jaxpipe.compile.hlo import EXCHANGE, PAGE_TRANSFER, computations, num_instructions, permute_pairs, whole_writes
from jaxpipe.measure.memory import gradient_shapes, pool_shapes
from jaxpipe.models import BertConfig, GPTConfig, LanguageModel, LlamaConfig
from jaxpipe.program.channels import grads_scope, message_scope, page_scope
from jaxpipe.program.partition import Part
from jaxpipe.schedules import Kind, Schedule, build

SHAPE = re.compile(r"f32\[[\d,]*\]")


def compile_step(schedule, *, num_layers, family="gpt", hidden=16, seq_len=8, data=1, tensor=1, recompute="none"):
    """The pipeline, shapes of its staged parameters, its storage, and the optimized HLO."""
    sizes = {"num_layers": num_layers, "hidden": hidden, "num_heads": 4, "vocab_size": 48, "recompute": recompute}
    if family != "llama":
        config = {"gpt": GPTConfig, "bert": BertConfig}[family](**sizes, num_positions=seq_len)
    else:
        config = LlamaConfig(**sizes, num_kv_heads=2, feed_forward=hidden * 3 // 2)
    pipeline = pipeline_of(schedule, config, data=data, tensor=tensor)
    params = jax.eval_shape(lambda: pipeline.to_stages(LanguageModel(config).init(jax.random.key(0))))
    leading = (schedule.num_microbatches, 2)
    tokens = jax.ShapeDtypeStruct((*leading, seq_len), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    if family == "bert":
        batch |= dict.fromkeys(("token_types", "padding_mask", "predicted"), tokens)
        batch["sentence_order"] = jax.ShapeDtypeStruct(leading, jnp.int32)
    compiled: Any = pipeline.loss_and_grads.lower(params, batch, 1.0).compile(compiler_options=QUICKLY)
    return pipeline, params, pipeline.shapes(params, batch).storage, compiled.as_text()


def pairs_by_scope(pipeline, permutes, scope) -> dict[str, set[tuple[int, int]]]:
    """Of [position][permute] -> pairs of `pipe` devices, by scope the pairs of ids on a data x pipe x tensor mesh."""
    ids = np.vectorize(lambda device: device.id)(pipeline.mesh.devices)
    return {
        scope(position, k): {
            (source, target)
            for a, b in pairs
            for source, target in zip(ids[:, a].ravel().tolist(), ids[:, b].ravel().tolist(), strict=True)
        }
        for position, of_position in enumerate(permutes)
        for k, pairs in enumerate(of_position)
    }


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches"), [("1f1b", 8, 16), ("1f1b", 2, 4), ("gpipe", 4, 6)]
)
def test_pairs_of_each_position_are_those_that_the_clock_replays(name, num_devices, num_microbatches):
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    pipeline, _, _, text = compile_step(schedule, num_layers=num_devices)
    expected = pairs_by_scope(pipeline, pipeline.table.permutes, message_scope)
    assert expected
    assert permute_pairs(text) == expected


# Schedule, devices of pipe, microbatches, layers, and sizes. With one layer a stage, adding its gradient writes
# all of the running sum; such sums are not looked at.
PROGRAMS = [
    ("1f1b", 4, 6, 4, {}),
    ("1f1b", 4, 6, 7, {}),
    pytest.param(("gpipe", 4, 6, 8, {"family": "llama"}), marks=pytest.mark.slow),
    ("1f1b", 8, 16, 16, {"family": "llama", "hidden": 64, "seq_len": 32}),
    ("1f1b", 2, 8, 7, {"data": 2, "tensor": 2}),
    pytest.param(("1f1b", 2, 8, 8, {"family": "llama", "data": 2, "tensor": 2}), marks=pytest.mark.slow),
    ("1f1b", 2, 8, 7, {"family": "bert", "tensor": 2}),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_no_writes_of_the_whole_pool_or_gradient_sums_in_the_loops(program):
    name, num_devices, num_microbatches, num_layers, sizes = program
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    pipeline, params, storage, text = compile_step(schedule, num_layers=num_layers, **sizes)
    shapes = pool_shapes(storage)
    if max(pipeline.layers_per_stage) > 1:
        shapes |= gradient_shapes(pipeline, params)
    assert all(shape in text for shape in shapes)
    assert whole_writes(text, shapes) == []


# Backwards in two parts: with one layer a stage and several, and with recomputation, where what I leaves has most of
# its room apart.
HALVED_PROGRAMS = [
    ("zb_h1", 4, 6, 4, {}),
    ("v_half", 2, 4, 8, {"recompute": "full"}),
    pytest.param(("zb_h1", 4, 6, 7, {"family": "llama"}), marks=pytest.mark.slow),
    pytest.param(("dualpipe", 4, 8, 8, {"recompute": "full"}), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("program", HALVED_PROGRAMS, ids=str)
def test_nor_are_there_where_weight_gradients_come_later(program):
    name, num_devices, num_microbatches, num_layers, sizes = program
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    pipeline, params, storage, text = compile_step(schedule, num_layers=num_layers, **sizes)
    assert Kind.W in set().union(*pipeline.table.kinds)
    assert len(storage.pools) == 2
    shapes = pool_shapes(storage)
    if max(pipeline.layers_per_stage) > 1:
        shapes |= gradient_shapes(pipeline, params)
    assert all(shape in text for shape in shapes)
    assert whole_writes(text, shapes) == []


def test_nor_where_slots_have_room_for_all_that_waits():
    schedule = build("zb_h1", num_devices=4, num_microbatches=6)
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=7)
    params, batch = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(7))), tiny_mlp.make_batch(6)
    storage = pipeline.shapes(params, batch).storage
    assert len(storage.pools) == 1
    compiled: Any = pipeline.loss_and_grads.lower(params, batch).compile(compiler_options=QUICKLY)
    shapes = pool_shapes(storage) | gradient_shapes(pipeline, params)
    assert all(shape in compiled.as_text() for shape in shapes)
    assert whole_writes(compiled.as_text(), shapes) == []


# Microbatches, what travels, and layers: one, three and seven a stage, the last with two lanes, as whole microbatches
# of four layers.
BPIPE_PROGRAMS = [
    (4, 9, "page", 4, {}),
    (4, 9, "page", 28, {"family": "llama"}),
    (4, 9, "microbatch", 16, {"family": "llama", "data": 2}),
    (4, 9, "page", 28, {"tensor": 2}),
    (8, 17, "page", 16, {"hidden": 64, "seq_len": 32}),
    (8, 17, "page", 24, {"family": "llama"}),
]


@functools.cache
def compile_bpipe(index: int):
    num_devices, num_microbatches, unit, num_layers, sizes = BPIPE_PROGRAMS[index]
    schedule = build("bpipe", num_devices=num_devices, num_microbatches=num_microbatches, unit=unit)
    return compile_step(schedule, num_layers=num_layers, **sizes)


bpipe_programs = pytest.mark.parametrize("index", range(len(BPIPE_PROGRAMS)), ids=lambda i: str(BPIPE_PROGRAMS[i]))


@bpipe_programs
def test_pages_travel_between_the_pairs_of_the_table(index):
    pipeline, _, _, text = compile_bpipe(index)
    table = pipeline.table
    transfers = pairs_by_scope(pipeline, table.page_permutes, page_scope)
    assert transfers
    assert permute_pairs(text, scope=PAGE_TRANSFER) == transfers
    assert permute_pairs(text) == pairs_by_scope(pipeline, table.permutes, message_scope)


@bpipe_programs
def test_at_most_four_permutes_are_in_a_round(index):
    pipeline, _, storage, text = compile_bpipe(index)
    table, num_rows = pipeline.table, len(storage.pools[0].rows)
    in_round = Counter(
        re.findall(r"position\d+_", instruction.rest)[-1]
        for computation in computations(text)[0].values()
        for instruction in computation.instructions
        if instruction.opcode in ("collective-permute", "collective-permute-start")
    )
    assert in_round == Counter(
        {
            f"position{position}_": len(permutes) + num_rows * len(lanes)
            for position, (permutes, lanes) in enumerate(zip(table.permutes, table.page_permutes, strict=True))
        }
    )
    assert max(in_round.values()) <= 4


@bpipe_programs
def test_pages_leave_and_land_without_writes_of_the_whole_pool_or_gradient_sums(index):
    pipeline, params, storage, text = compile_bpipe(index)
    shapes = pool_shapes(storage)
    if max(pipeline.layers_per_stage) > 1:
        shapes |= gradient_shapes(pipeline, params)
    assert all(shape in text for shape in shapes)
    assert whole_writes(text, shapes) == []


def test_one_and_several_lanes_are_among_these():
    nums = {compile_bpipe(index)[0].table.num_page_lanes for index in range(len(BPIPE_PROGRAMS))}
    assert 1 in nums
    assert max(nums) > 1


# Several chunks on a device: schedule, options, devices of pipe, microbatches, layers, of which each stage has two.
CHUNKED_PROGRAMS = [
    ("bitpipe", {}, 8, 16, 32, {}),
    ("bitpipe", {"scaling": "early_forwarding"}, 4, 8, 16, {"family": "llama", "data": 2}),
    ("interleaved_1f1b", {}, 4, 8, 16, {"tensor": 2}),
]


@functools.cache
def compile_chunked(index: int):
    name, options, num_devices, num_microbatches, num_layers, sizes = CHUNKED_PROGRAMS[index]
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
    return compile_step(schedule, num_layers=num_layers, **sizes)


chunked_programs = pytest.mark.parametrize(
    "index", range(len(CHUNKED_PROGRAMS)), ids=lambda i: str(CHUNKED_PROGRAMS[i])
)


@chunked_programs
def test_messages_and_gradients_travel_between_the_pairs_of_the_table(index):
    pipeline, _, _, text = compile_chunked(index)
    table = pipeline.table
    exchanges = pairs_by_scope(pipeline, table.gradient_permutes, grads_scope)
    assert bool(exchanges) == (pipeline.schedule.num_replicas == 2)
    assert permute_pairs(text, scope=EXCHANGE) == exchanges
    assert permute_pairs(text) == pairs_by_scope(pipeline, table.permutes, message_scope)


@chunked_programs
def test_chunks_of_both_replicas_are_summed_without_writes_of_all_of_them(index):
    pipeline, params, storage, text = compile_chunked(index)
    sums, schedule = gradient_shapes(pipeline, params), pipeline.schedule
    num_rows = schedule.num_replicas * pipeline.layout.num_layers // schedule.num_devices
    layer = [part.compute_shape for part in jax.tree.leaves(pipeline.parts(params)["layers"])]
    matrix_sizes = {math.prod(shape) for shape in layer if len(shape) > 1}
    assert {math.prod(map(int, re.findall(r"\d+", shape)[1:])) for shape in sums} == {
        num_rows * size for size in matrix_sizes
    }
    shapes = pool_shapes(storage) | sums
    assert all(shape in text for shape in shapes)
    assert whole_writes(text, shapes) == []


def test_the_turn_of_a_v_is_no_permute():
    """From one chunk to the next a V stays on its device, at either end; looped chunks begin at the other end."""
    in_a_v, looped = (permute_pairs(compile_chunked(index)[-1]) for index in (0, 2))
    assert {abs(a - b) for pairs in in_a_v.values() for a, b in pairs} == {1}
    last, first = 3, 0
    ends = {(2 * last + t, 2 * first + t) for t in range(2)}  # ids on four devices of pipe with two of tensor
    assert ends <= set().union(*looped.values())


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_gradients_of_layers_are_reduced_in_the_loop_where_a_chunk_completes(family):
    schedule = build("1f1b", num_devices=2, num_microbatches=5)
    pipeline, params, _, text = compile_step(schedule, num_layers=4, family=family, data=2, tensor=2)
    table, parts = pipeline.table, pipeline.parts(params)
    num_positions = len(np.unique(table.body_round[table.completes.any(axis=1)]))
    assert 1 < num_positions < table.num_body_rounds
    found, entry = computations(text)
    # Once for each of these positions; activations, which `tensor` sums, have other shapes.
    of_layers = Counter(reduced_shape(part, 2) for part in jax.tree.leaves(parts["layers"]))
    in_loops = Counter(
        instruction.shape
        for name, computation in found.items()
        for instruction in computation.instructions
        if name != entry and instruction.opcode == "reduce-scatter" and instruction.shape in of_layers
    )
    assert in_loops == {shape: num_positions * count for shape, count in of_layers.items()}
    # What is left for the end: shared parameters, over `data` and `pipe`, and the loss.
    at_the_end = Counter(i.shape for i in found[entry].instructions if i.opcode == "reduce-scatter")
    assert at_the_end == Counter(reduced_shape(part, 4) for part in jax.tree.leaves(parts["shared"]))
    sums = [shape for i in found[entry].instructions if i.opcode == "all-reduce" for shape in SHAPE.findall(i.shape)]
    partial = [part for part in jax.tree.leaves(parts["shared"]) if part.partial_axes]
    assert Counter(sums) == Counter(["f32[]", *(hlo_shape(part.compute_shape) for part in partial)])


def reduced_shape(part: Part, num_copies: int) -> str:
    shape = list(part.compute_shape)
    assert part.master_dim is not None
    shape[part.master_dim] //= num_copies
    return hlo_shape(shape)


def hlo_shape(shape) -> str:
    return f"f32[{','.join(map(str, shape))}]"


def test_a_three_way_switch_writes_the_pool():
    """The form that the program avoids (XLA copies what passes beside a branch) is seen by the count."""
    pool = jnp.zeros((5, 64, 64))

    def round_(carry, kind):
        pool, x = carry

        def idle(pool, x):
            return pool, x

        def write(pool, x):
            return lax.dynamic_update_index_in_dim(pool, x, kind % 5, 0), x

        def read(pool, x):
            return pool, x @ pool[kind % 5]

        return lax.switch(kind % 3, [idle, write, read], pool, x), None

    step = jax.jit(lambda pool, x: lax.scan(round_, (pool, x), jnp.arange(12)))
    compiled: Any = step.lower(pool, pool[0]).compile()
    text = compiled.as_text()
    assert len(whole_writes(text, {"f32[5,64,64]"})) > 0


def num_instructions_of(schedule: Schedule, *, layers_of_stage: int) -> int:
    """Of a small model's program."""
    num_layers, num_microbatches = layers_of_stage * schedule.num_stages, schedule.num_microbatches
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=num_layers)
    params = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(num_layers)))
    lowered = pipeline.loss_and_grads.lower(params, tiny_mlp.make_batch(num_microbatches))
    compiled: Any = lowered.compile(compiler_options=QUICKLY)
    return num_instructions(compiled.as_text())


SCALED = [
    ("1f1b", {}),
    ("bpipe", {}),
    ("bitpipe", {}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("bitpipe", {"scaling": "early_forwarding"}),
            ("breadth_first", {}),
            ("chimera", {}),
            ("chimera", {"forward_doubling": True}),
            ("gems", {}),
            ("gpipe", {}),
            ("hanayo", {}),
            ("interleaved_1f1b", {}),
            ("mixpipe", {}),
        )
    ),
]


@pytest.mark.parametrize(("name", "options"), SCALED, ids=str)
def test_program_size_depends_on_neither_microbatches_nor_devices(name, options):
    """With seven layers a stage, of which half travel, BPipe's do so in every round that they may.

    On more devices other rounds may be the best: forward doubling has one in its body on four devices, two on eight.
    """
    layers_of_stage = 7 if name == "bpipe" else 2
    few, many, on_more_devices = (
        num_instructions_of(build(name, num_devices=d, num_microbatches=n, **options), layers_of_stage=layers_of_stage)
        for d, n in ((4, 16), (4, 64), (8, 32))
    )
    assert many == pytest.approx(few, rel=0.01)
    assert on_more_devices == pytest.approx(few, rel=0.1 if name in ("chimera", "gems") else 0.02)
