"""The compiled program beyond `test_programs`: its size is flat in N and D, and nothing big is written whole.

Gradients of layers are reduced in the loop, right where they are complete.
"""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_mlp
from jax import lax
from tiers import tiers
from tiny_models import pipeline_of

from jaxpipe.compile.hlo import computations, num_instructions, whole_writes
from jaxpipe.measure.step_pair import gradient_shapes, pool_shapes
from jaxpipe.models import BertConfig, GPTConfig, LanguageModel, LlamaConfig, MixtureConfig
from jaxpipe.program.partition import Part
from jaxpipe.schedules import Schedule, build
from jaxpipe.sharding import KeptChunks

SHAPE = re.compile(r"f32\[[\d,]*\]")


def compile_step(schedule, *, num_layers, family="gpt", hidden=16, seq_len=8, recompute="none", choices=(), **mesh):
    """The pipeline, shapes of its staged parameters, its storage, and the optimized HLO."""
    sizes = {"num_layers": num_layers, "hidden": hidden, "num_heads": 4, "vocab_size": 48, "recompute": recompute}
    if family in ("gpt", "bert"):
        config = {"gpt": GPTConfig, "bert": BertConfig}[family](**sizes, num_positions=seq_len)
    else:
        sizes |= {"num_kv_heads": 2, "feed_forward": hidden * 3 // 2}
        config = {"llama": LlamaConfig, "mixtral": MixtureConfig}[family](**sizes, **dict(choices))
    pipeline = pipeline_of(schedule, config, **mesh)
    params = jax.eval_shape(lambda: pipeline.to_stages(LanguageModel(config).init(jax.random.key(0))))
    leading = (schedule.num_microbatches, 2)
    tokens = jax.ShapeDtypeStruct((*leading, seq_len), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    if family == "bert":
        batch |= dict.fromkeys(("token_types", "padding_mask", "predicted"), tokens)
        batch["sentence_order"] = jax.ShapeDtypeStruct(leading, jnp.int32)
    scale = 1.0
    if family == "mixtral":
        scale = dict.fromkeys(("words", *config.routing.losses, *config.routing.measures), 1.0)
    compiled: Any = pipeline.loss_and_grads.lower(params, batch, scale).compile()
    return pipeline, params, pipeline.shapes(params, batch).storage, compiled.as_text()


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches"),
    [
        pytest.param("1f1b", 8, 16, marks=pytest.mark.ci),
        pytest.param("bpipe", 8, 17, marks=pytest.mark.slow),
    ],
)
def test_nor_do_larger_layers_write_the_whole_pool_or_gradient_sums_in_the_loops(name, num_devices, num_microbatches):
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    sizes = {"family": "llama" if name == "1f1b" else "gpt", "hidden": 64, "seq_len": 32}
    pipeline, params, storage, text = compile_step(schedule, num_layers=16, **sizes)
    shapes = pool_shapes(storage) | gradient_shapes(pipeline, params)
    assert all(shape in text for shape in shapes)
    assert whole_writes(text, shapes) == []


@pytest.mark.parametrize(
    ("name", "dispatch", "expert"),
    [
        pytest.param("1f1b", "dropless", 1, marks=pytest.mark.slow),
        pytest.param("1f1b", "capacity", 2, marks=pytest.mark.slow),
        pytest.param("zb_v", "dropless", 2, marks=pytest.mark.slow),
        pytest.param("zb_v", "capacity", 1, marks=pytest.mark.slow),
    ],
)
def test_nor_do_experts(name, dispatch, expert):
    """Neither their saved rows nor the gradient sums of their kernels, the most of a layer's."""
    schedule = build(name, num_devices=4, num_microbatches=8)
    choices = {"num_experts": 6, "dispatch": dispatch, "balance_loss": 0.1, "bias_rate": 0.1}
    pipeline, params, storage, text = compile_step(
        schedule, num_layers=16, family="mixtral", choices=choices, expert=expert
    )
    sums = gradient_shapes(pipeline, params)
    assert f"f32[{schedule.num_stages // 4},{16 // schedule.num_stages},{6 // expert},16,24]" in sums
    shapes = pool_shapes(storage) | sums
    assert all(shape in text for shape in shapes)
    assert whole_writes(text, shapes) == []


@pytest.mark.parametrize("name", tiers([], ci=["1f1b"], slow=["breadth_first", "interleaved_1f1b", "zb_v"]))
def test_nor_are_all_slots_of_kept_weights_and_sums_written(name):
    """A layer is gathered, or added, in the place of the one that has just been read."""
    schedule = build(name, num_devices=2, num_microbatches=4)
    sizes = {"hidden": 32, "data": 2, "shard": "weights", "kept": KeptChunks(1, 1)}
    *_, text = compile_step(schedule, num_layers=2 * schedule.num_stages, **sizes)
    slots = {f"f32[1,2,{rows},{columns}]" for rows, columns in ((32, 96), (32, 128), (128, 32), (32, 32))}
    assert all(shape in text for shape in slots)
    assert whole_writes(text, slots) == []


@pytest.mark.ci
def test_nor_where_slots_have_room_for_all_that_waits():
    schedule = build("zb_h1", num_devices=4, num_microbatches=6)
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=7)
    params, batch = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(7))), tiny_mlp.make_batch(6)
    storage = pipeline.shapes(params, batch).storage
    assert len(storage.pools) == 1
    compiled: Any = pipeline.loss_and_grads.lower(params, batch).compile()
    shapes = pool_shapes(storage) | gradient_shapes(pipeline, params)
    assert all(shape in compiled.as_text() for shape in shapes)
    assert whole_writes(compiled.as_text(), shapes) == []


@pytest.mark.parametrize("name", tiers([], slow=["zb_v", "interleaved_1f1b"]))
def test_tables_of_rotations_are_computed_once_in_a_stage_of_one_layer(name):
    """Else in every element of every head: XLA takes the cosines into the loop that rotates, or moves them out."""
    _, _, _, text = compile_step(build(name, num_devices=2, num_microbatches=4), num_layers=4, family="llama")
    inside = [
        {each.opcode for each in computation.instructions}
        for computation in computations(text)[0].values()
        if any(each.opcode == "cosine" for each in computation.instructions)
    ]
    assert inside
    assert not any("concatenate" in opcodes for opcodes in inside)


@pytest.mark.parametrize("name", tiers([], ci=["interleaved_1f1b"], slow=["zb_v"]))
def test_gradients_of_kernels_read_no_transposed_copies(name):
    """A product sums over one dim of tokens; of [batch, seq, features] XLA would copy [features, batch, seq]."""
    _, _, _, text = compile_step(build(name, num_devices=2, num_microbatches=4), num_layers=4, hidden=48, seq_len=32)
    copied = [
        instruction
        for computation in computations(text)[0].values()
        for instruction in computation.instructions
        if instruction.opcode == "transpose" and re.fullmatch(r"f32\[\d+,2,32\]", instruction.shape)
    ]
    assert copied == []


@pytest.mark.parametrize("family", tiers([], ci=["gpt"], slow=["llama"]))
def test_gradients_of_layers_are_reduced_in_the_loop_where_a_chunk_completes(family):
    schedule = build("1f1b", num_devices=2, num_microbatches=5)
    pipeline, params, _, text = compile_step(
        schedule, num_layers=4, family=family, data=2, tensor=2, behind_layers=False
    )
    table, parts = pipeline.table, pipeline.parts(params)
    followed = np.flatnonzero(table.completes.any(axis=1)) + 1
    # In the rounds after those that complete a chunk, and after the last round.
    num_sums = len(np.unique(table.round_type[followed[followed < table.num_rounds]])) + bool(table.completes[-1].any())
    assert 1 < num_sums < table.num_types
    found, _ = computations(text)
    (at_the_end,) = (name for name, each in found.items() if "f32[]" in reduced(each, "all-reduce"))  # with the loss
    # Once for each of these; activations, which `tensor` sums, have other shapes.
    of_layers = Counter(reduced_shape(part, 2) for part in jax.tree.leaves(parts["layers"]))
    in_loops = sum((reduced(each, "reduce-scatter") for name, each in found.items() if name != at_the_end), Counter())
    in_loops = Counter({shape: count for shape, count in in_loops.items() if shape in of_layers})
    assert in_loops == {shape: num_sums * count for shape, count in of_layers.items()}
    # What is left for the end: shared parameters, over `data` and `pipe`, and the loss.
    shared = jax.tree.leaves(parts["shared"])
    assert reduced(found[at_the_end], "reduce-scatter") == Counter(reduced_shape(part, 4) for part in shared)
    sums = ["f32[]", *(hlo_shape(part.compute_shape) for part in shared if part.partial_axes)]
    assert reduced(found[at_the_end], "all-reduce") == Counter(sums)


def reduced(computation, opcode: str) -> Counter[str]:
    return Counter(shape for i in computation.instructions if i.opcode == opcode for shape in SHAPE.findall(i.shape))


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
    compiled: Any = lowered.compile()
    return num_instructions(compiled.as_text())


SCALED = tiers(
    [],
    ci=[("1f1b", {})],
    slow=[
        ("bitpipe", {}),
        ("bpipe", {}),
        ("bitpipe", {"scaling": "early_forwarding"}),
        ("breadth_first", {}),
        ("chimera", {}),
        ("chimera", {"forward_doubling": True}),
        ("gems", {}),
        ("gpipe", {}),
        ("hanayo", {}),
        ("interleaved_1f1b", {}),
        ("mixpipe", {}),
    ],
)


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_program_size_depends_on_neither_microbatches_nor_devices(case):
    """With seven layers a stage, of which half travel, BPipe's do so in every round that they may.

    Types of rounds are bounded, but where fill and drain are most of the step more of them are worth their size.
    """
    name, options = case
    layers_of_stage = 7 if name == "bpipe" else 2
    few, many, on_more_devices = (
        num_instructions_of(build(name, num_devices=d, num_microbatches=n, **options), layers_of_stage=layers_of_stage)
        for d, n in ((4, 16), (4, 64), (8, 32))
    )
    sizes = few, many, on_more_devices
    assert max(sizes) <= 2.5 * min(sizes)
