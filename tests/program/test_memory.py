"""What the compiled program takes: all state aliased, nothing but tables and batch sized by N, BPipe's slots saved."""

import dataclasses
import functools
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_gpt
import tiny_mlp
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch

from jaxpipe.compile.hlo import num_instructions
from jaxpipe.mesh import make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.held_bytes import held_bytes, travelling_sums_bytes
from jaxpipe.program.start import table_operands
from jaxpipe.schedules import build
from jaxpipe.sharding import KeptChunks
from jaxpipe.training.step import init_state, make_train_step

ONE_PRODUCT = dataclasses.replace(tiny_mlp.FUNCTIONS, layer=lambda params, x, microbatch, random: x @ params["kernel"])


def bytes_per_device(tree) -> int:
    return sum(
        leaf.dtype.itemsize * int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in jax.tree.leaves(tree)
    )


@pytest.mark.slow
def test_the_train_step_aliases_all_of_the_state_which_two_replicas_have_once():
    config, optimizer = config_of("gpt", num_layers=8), optax.adamw(1e-3)
    states, pipeline = {}, None
    for name in ("1f1b", "bitpipe"):
        pipeline = pipeline_of(build(name, num_devices=2, num_microbatches=3), config, data=2)
        states[name] = init_state(LanguageModel(config), pipeline, optimizer, seed=0)
    assert pipeline is not None
    state, state_bytes = states["bitpipe"], bytes_per_device(states["1f1b"])
    assert bytes_per_device(state) == state_bytes
    batch = jax.device_put(random_batch(3, seed=0), pipeline.batch_sharding)
    step = make_train_step(LanguageModel(config), pipeline, optimizer, optax.constant_schedule(1e-3), max_grad_norm=1.0)
    compiled: Any = step.lower(state, batch).compile()
    # All leaves of the state come back, every one in the buffer that it came in; only tokens and targets come besides.
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == state_bytes
    assert memory.argument_size_in_bytes == state_bytes + bytes_per_device(batch)
    new_state, metrics = compiled(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for new, old in zip(jax.tree.leaves(new_state), jax.tree.leaves(state), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    assert int(new_state.step) == 1
    assert np.isfinite(metrics["loss"])


@functools.cache
def compiled(name: str, num_microbatches: int, *, num_devices: int = 4):
    pipeline = tiny_gpt.make_pipeline(
        build(name, num_devices=num_devices, num_microbatches=num_microbatches), num_layers=num_devices
    )
    shape = (num_microbatches, tiny_gpt.MICROBATCH_SIZE, tiny_gpt.SEQ_LEN)
    return pipeline, *compile_for(pipeline, lambda: tiny_gpt.make_params(num_devices), shape)


def compile_for(pipeline: Pipeline, make_params, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The compiled step, and shapes of its staged parameters and of its batch of tokens [`shape`]."""
    shapes = jax.eval_shape(lambda: pipeline.to_stages(make_params()))
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        pipeline.shardings(shapes),
    )
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=pipeline.batch_sharding)
    batch = {"tokens": tokens, "targets": tokens}
    return pipeline.loss_and_grads.lower(params, batch).compile(), params, batch


def bytes_sized_by_n(name: str, num_microbatches: int) -> int:
    """Of the tables, for all devices, and of token ids and targets."""
    pipeline, _, *arguments = compiled(name, num_microbatches)
    rows = table_operands(pipeline.shapes(*arguments, random=False))
    tables = sum(leaf.nbytes for leaf in jax.tree.leaves(rows))
    return tables + 2 * 4 * num_microbatches * tiny_gpt.MICROBATCH_SIZE * tiny_gpt.SEQ_LEN


@pytest.mark.parametrize("name", tiers([], slow=["bpipe", "1f1b"]))
def test_only_tables_and_tokens_grow_with_the_number_of_microbatches(name):
    few, many = (compiled(name, n)[1].memory_analysis().temp_size_in_bytes for n in (16, 64))
    assert many - few <= bytes_sized_by_n(name, 64) - bytes_sized_by_n(name, 16)
    # 48 microbatches of anything with a hidden dim would be more: one message of each is 48 x 2 x 8 x 16 floats.
    assert many - few < 48 * 2 * 8 * 16 * 4


@pytest.mark.slow
def test_bpipe_saves_slots_less_what_is_in_transit():
    num_devices, num_layers, seq_len = 8, 4, 32
    config = GPTConfig(
        num_layers=num_devices * num_layers, hidden=64, num_heads=4, vocab_size=48, num_positions=seq_len
    )
    temp_bytes, slot_bytes = {}, 0
    for name in ("1f1b", "bpipe"):
        pipeline = pipeline_of(build(name, num_devices=num_devices, num_microbatches=16), config)
        step, params, batch = compile_for(
            pipeline, lambda: LanguageModel(config).init(jax.random.key(0)), (16, 2, seq_len)
        )
        temp_bytes[name] = step.memory_analysis().temp_size_in_bytes
        slot_bytes = pipeline.shapes(params, batch).storage.slot_bytes
    # 1F1B holds 8 slots, BPipe ceil((8 + 2) / 2) = 5 (Obscura, USENIX ATC 2025, section 9.3). The first stage parks
    # half of the 4 pages: one at a time is in transit, on both devices, which is half a slot.
    saved = (temp_bytes["1f1b"] - temp_bytes["bpipe"]) / slot_bytes
    # Tables are larger, by half of themselves and by the columns of transfers: less than a hundredth of a slot here.
    assert saved == pytest.approx(8 - 5 - 0.5, abs=0.05)


@pytest.mark.ci
def test_an_unrolled_program_grows():
    """That a rolled one does not, `test_hlo` shows; the count can tell."""
    nums = []
    for num_microbatches in (2, 4):
        schedule = build("1f1b", num_devices=2, num_microbatches=num_microbatches)
        pipeline = tiny_mlp.make_pipeline(schedule, num_layers=2, rolled=False)
        params = pipeline.to_stages(tiny_mlp.make_params(2))
        lowered = pipeline.loss_and_grads.lower(params, tiny_mlp.make_batch(num_microbatches))
        compiled: Any = lowered.compile()
        nums.append(num_instructions(compiled.as_text()))
    assert nums[1] > 1.3 * nums[0]


def test_pages_messages_and_slots_have_the_sizes_of_the_model():
    schedule = build("1f1b", num_devices=2, num_microbatches=3)
    mesh = make_mesh(data=2, pipe=2)
    pipeline = Pipeline(schedule, mesh, ONE_PRODUCT, num_layers=4, layers_per_stage=(1, 3))
    params, batch = pipeline.to_stages(tiny_mlp.make_params(4)), tiny_mlp.make_batch(3)
    local_x = jax.ShapeDtypeStruct((tiny_mlp.MICROBATCH_SIZE // 2, tiny_mlp.HIDDEN), np.float32)
    assert pipeline.shapes(params, batch).message == local_x
    # The gradient of x @ kernel needs x; the kernel is no residual.
    assert [(leaf.shape, leaf.dtype) for leaf in pipeline.shapes(params, batch).storage.saved.residuals] == [
        (local_x.shape, local_x.dtype)
    ]
    assert pipeline.shapes(params, batch).storage.slot_bytes == 3 * local_x.size * 4


def test_held_bytes_are_pages_copies_gradients_and_messages():
    schedule = build("1f1b", num_devices=2, num_microbatches=3)
    found = {}
    for shard, dtype, *num_kept in (
        ("optimizer", None),
        ("gradients", None),
        ("weights", None),
        ("weights", None, 1),
        ("gradients", None, 0, 1),
        ("none", None),
        ("none", "bfloat16"),
    ):
        mesh = make_mesh(data=1 if shard == "none" else 2, pipe=2)
        options = {"num_layers": 4, "layers_per_stage": (1, 3), "dtype": dtype, "shard": shard}
        pipeline = Pipeline(schedule, mesh, ONE_PRODUCT, **options, kept=KeptChunks(*num_kept))
        params, batch = pipeline.to_stages(tiny_mlp.make_params(4)), tiny_mlp.make_batch(3, dtype or "float32")
        shapes = pipeline.shapes(params, batch)
        found[shard, dtype, *num_kept] = held_bytes(shapes)
        # Kernel and bias of the layer that is summed behind the next one, once a step.
        summed_once = {"optimizer": tiny_mlp.HIDDEN * (tiny_mlp.HIDDEN + 1)}.get(shard, 0)
        assert travelling_sums_bytes(shapes) == 4 * summed_once
    h, x = tiny_mlp.HIDDEN, tiny_mlp.MICROBATCH_SIZE * tiny_mlp.HIDDEN
    kernels, others = 3 * h * h, 3 * h + tiny_mlp.NUM_INPUTS * h + h  # of the longest stage; biases, and the ends
    num_params = kernels + others
    # A layer keeps its input. 1F1B has two microbatches in flight on the first of two devices, of 1 layer each, and
    # one on the last, of 3. A message is at work, one is sent, one is nobody's, and one travels:
    # both devices send at once, in one permute.
    num_pages, num_messages = 3, 4
    assert found == {
        ("optimizer", None): held(4, num_pages * x // 2, num_params, num_params, num_messages * x // 2),
        # Half of the kernels' sums, and the gradients of two layers: one that the next action sums, and one on its way.
        ("gradients", None): held(
            4, num_pages * x // 2, num_params, kernels // 2 + others, num_messages * x // 2, left=2 * h * h
        ),
        # No copies of kernels, but that of the layer with which the next action begins, and one on its way.
        ("weights", None): held(
            4, num_pages * x // 2, others, kernels // 2 + others, num_messages * x // 2, left=4 * h * h
        ),
        # All kernels of the only chunk, and the copy on its way.
        ("weights", None, 1): held(
            4, num_pages * x // 2, num_params, kernels // 2 + others, num_messages * x // 2, left=3 * h * h
        ),
        # Whole sums of kernels beside parts of them.
        ("gradients", None, 0, 1): held(
            4, num_pages * x // 2, num_params, kernels + kernels // 2 + others, num_messages * x // 2, left=2 * h * h
        ),
        ("none", None): held(4, num_pages * x, 0, num_params, num_messages * x),
        ("none", "bfloat16"): held(2, num_pages * x, num_params, 2 * num_params, num_messages * x),
    }


def test_held_bytes_of_bpipe_are_fewer_pages_and_those_in_transit():
    found = {}
    for num_layers in (2, 8):
        schedule = build("bpipe", num_devices=4, num_microbatches=9)
        pipeline = Pipeline(schedule, make_mesh(pipe=4), ONE_PRODUCT, num_layers=4 * num_layers, shard="none")
        params, batch = pipeline.to_stages(tiny_mlp.make_params(4 * num_layers)), tiny_mlp.make_batch(9)
        found[num_layers] = held_bytes(pipeline.shapes(params, batch))
    h, x = tiny_mlp.HIDDEN, tiny_mlp.MICROBATCH_SIZE * tiny_mlp.HIDDEN
    ends = tiny_mlp.NUM_INPUTS * h + h
    # Three slots instead of four. Half of a microbatch's pages travel in three rounds: one of two layers in one of
    # them, four of eight layers two at a time; each is held twice meanwhile.
    assert found == {
        2: held(4, 3 * 2 * x, 0, 2 * (h * h + h) + ends, 4 * x, transit=2 * x),
        8: held(4, 3 * 8 * x, 0, 8 * (h * h + h) + ends, 4 * x, transit=2 * 2 * x),
    }


def test_held_bytes_of_two_replicas_are_twice_the_weights_and_gradients():
    found = {}
    for name, num_layers in product(("bitpipe", "1f1b"), (1, 4)):
        schedule = build(name, num_devices=4, num_microbatches=4)
        pipeline = Pipeline(schedule, make_mesh(pipe=4), ONE_PRODUCT, num_layers=8 * num_layers, shard="none")
        params, batch = pipeline.to_stages(tiny_mlp.make_params(8 * num_layers)), tiny_mlp.make_batch(4)
        found[name, num_layers] = held_bytes(pipeline.shapes(params, batch))
    h, x = tiny_mlp.HIDDEN, tiny_mlp.MICROBATCH_SIZE * tiny_mlp.HIDDEN
    ends = tiny_mlp.NUM_INPUTS * h + h
    # Both store D Ma, four microbatches of an eighth of the layers, twice (BitPipe, arXiv 2410.19367, Table 2).
    # Weights of the other direction are copies of what the partner owns, and so are, in one array, the own ones.
    # A layer's gradients are held twice while they travel. In BitPipe messages wait: one, or two behind four layers.
    travelling = 2 * (h * h + h)
    assert found == {
        ("bitpipe", n): held(
            4, 4 * 2 * n * x, n * 2 * travelling, n * 2 * travelling + ends, (4 + num_waiting) * x, transit=travelling
        )
        for n, num_waiting in ((1, 1), (4, 2))
    } | {("1f1b", n): held(4, 4 * 2 * n * x, 0, 2 * n * (h * h + h) + ends, 4 * x) for n in (1, 4)}


def test_held_bytes_of_split_backwards_are_slots_and_the_deferred_gradient():
    found = {}
    h, x = tiny_mlp.HIDDEN, tiny_mlp.MICROBATCH_SIZE * tiny_mlp.HIDDEN
    for num_layers in (1, 2):
        schedule = build("zb_h1", num_devices=2, num_microbatches=5)
        pipeline = Pipeline(schedule, make_mesh(pipe=2), ONE_PRODUCT, num_layers=2 * num_layers, shard="none")
        params, batch = pipeline.to_stages(tiny_mlp.make_params(2 * num_layers)), tiny_mlp.make_batch(5)
        found[num_layers] = held_bytes(pipeline.shapes(params, batch))
        assert (
            pipeline.shapes(params, batch).storage.slot_bytes == 4 * num_layers * x
        )  # x alone: what waits for W is in no slot
    ends = tiny_mlp.NUM_INPUTS * h + h
    # W of x @ k + b reads x and the gradient of the product, as large: of each layer both are kept, x from F to W, and
    # the gradient from I to W, on either device of up to D = 2 microbatches. One layer's is held besides, while I
    # computes. One message more than with 1F1B waits.
    num_messages = 4 + pipeline.table.grids["messages"].num_inbox
    assert found == {n: held(4, 2 * 2 * n * x, 0, n * (h * h + h) + ends, num_messages * x, left=x) for n in (1, 2)}


def held(itemsize: int, *numbers: int, transit: int = 0, left: int = 0) -> dict[str, int]:
    kinds = ("pages", "weights", "gradients", "messages", "transit", "left")
    return {kind: itemsize * number for kind, number in zip(kinds, (*numbers, transit, left), strict=True)}


@pytest.mark.ci
def test_a_layer_of_one_s_own_is_recomputed_by_jax_checkpoint():
    """It keeps its input, not five times its width, for the same gradients: docs/own_model.md."""

    def layer(params, x, batch, random):
        del batch, random
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    def head(shared, x, batch):
        return ((x * shared["scale"] - batch["x"]) ** 2).sum()

    shapes = {"up": (4, 64, 256), "down": (4, 256, 64)}
    kernels = {name: 0.1 * jax.random.normal(jax.random.key(0), shape) for name, shape in shapes.items()}
    params = {"shared": {"scale": jnp.ones(64)}, "layers": kernels}
    batch = {"x": jax.random.normal(jax.random.key(1), (8, 4, 64, 64))}
    temp_bytes, grads = [], []
    for function in (layer, jax.checkpoint(layer)):
        functions = StageFunctions(lambda shared, batch, random: batch["x"], function, head)
        pipeline = Pipeline(
            build("1f1b", num_devices=2, num_microbatches=8), make_mesh(pipe=2), functions, num_layers=4
        )
        staged = pipeline.to_stages(params)
        step = jax.jit(pipeline.loss_and_grads).lower(staged, batch, 1.0).compile()
        temp_bytes.append(step.memory_analysis().temp_size_in_bytes)
        grads.append(pipeline.from_stages(step(staged, batch, 1.0)[1]))
    kept, recomputed = temp_bytes
    # Of two microbatches on the first device, two layers each keep x and two results of four times its width, at least.
    assert kept - recomputed > 2 * 2 * 2 * 4 * (4 * 64 * 64) * 4
    for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
