"""Steps of a schedule without flush are those of its delayed rule, computed plainly on one device.

PipeDream-2BW: W(t+1) = W(t) - lr grad f_t(W(t-1)), where W(-1) = W(0) (Narayanan et al., ICML 2021, section 3.1).
WPipe: of two halves W0 and W1 of the model, W(t+1) = W(t) - lr grad f_t(W0(t-1), W1(t)) (Yang et al., ICLR 2022).
Both clipped by the norm of the gradient before. The bound is that of plain gradients, `tiny_gpt` explains it.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import tiers
from tiny_models import config_of, random_batch, random_params, relative_errors, stream_of
from tiny_training import mean_loss_and_grads

from jaxpipe.compile.hlo import num_instructions, whole_writes
from jaxpipe.config.muon import scale_by_muon
from jaxpipe.config.optimizers import is_kernel, labels_of_muon
from jaxpipe.errors import CompileError
from jaxpipe.measure.step_pair import gradient_shapes, pool_shapes
from jaxpipe.mesh import make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.models.anatomy import LOAD_BIAS
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.optimizer_step import DeviceOptimizer, StagedOptimizer
from jaxpipe.program.without_flush import Stream, one_batch
from jaxpipe.schedules import build
from jaxpipe.training.optimizer import error_feedback, is_load_bias
from jaxpipe.training.run_step import StepWithFlush
from jaxpipe.training.step import init_state
from jaxpipe.training.without_flush import StepWithoutFlush

LARGEST_ERROR, OF_CHANGE = 1e-5, 1e-3
MAX_GRAD_NORM = 0.5  # less than most norms here: nearly every step clips
SEED = 7
ADAMW = optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.1, mask=is_kernel)
OPTIMIZERS = {
    "sgd": optax.sgd(0.05),
    "muon": optax.multi_transform(
        {
            "muon": optax.chain(
                scale_by_muon(config_of("gpt", num_layers=1).anatomy, beta=0.9), optax.scale_by_learning_rate(1e-2)
            ),
            "adamw": optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-3),
        },
        labels_of_muon,
    ),
    "adamw": ADAMW,
    "feedback": optax.chain(error_feedback(), ADAMW),
}


def batch_of(step: int, num_microbatches: int, family: str = "gpt") -> Any:
    return random_batch(num_microbatches, seed=step, family=family)


def plain_steps(
    config, optimizer, num_microbatches: int, num_steps: int, *, delays=(1, 1), num_first=None, family: str = "gpt"
):
    """Losses, norms and parameters of the delayed rule, from the equation alone.

    Args:
        delays: of embedding and first layers, and of the other layers and the head.
        num_first: number of the first layers; by default all.
    """
    versions, losses, norms = [random_params(config)], [], [0.0]
    state = optimizer.init(versions[0])
    num_first = config.num_layers if num_first is None else num_first
    for step in range(num_steps):
        first, last = (versions[max(step - delay, 0)] for delay in delays)
        used = {
            "shared": {**first["shared"], "head": last["shared"]["head"]},
            "layers": jax.tree.map(
                lambda *halves: np.concatenate([halves[0][:num_first], halves[1][num_first:]]),
                first["layers"],
                last["layers"],
            ),
        }
        key = jax.random.fold_in(jax.random.key(SEED), step) if config.anatomy.has_dropout else None
        loss, grads = mean_loss_and_grads(config, used, batch_of(step, num_microbatches, family), key)
        shrink = MAX_GRAD_NORM / norms[-1] if norms[-1] > MAX_GRAD_NORM else 1.0
        grads = jax.tree.map(lambda leaf, shrink=shrink: np.float32(shrink * leaf), grads)
        updates, state = optimizer.update(grads, state, versions[-1])
        versions.append(optax.apply_updates(versions[-1], updates))
        losses.append(float(loss))
        norms.append(float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(grads)))) / shrink)
    return losses, norms[1:], versions[-1]


def start(stream, config, name, *, num_steps: int):
    optimizer = OPTIMIZERS[name]
    random_model: Any = SimpleNamespace(init=lambda _: random_params(config))
    step = StepWithoutFlush(
        LanguageModel(config),
        stream,
        optimizer,
        lambda num_updates: 1.0 + num_updates,
        MAX_GRAD_NORM,
        SEED if config.anatomy.has_dropout else None,
        num_steps,
        reads_matrices=name == "muon",
    )
    return step.init(init_state(random_model, stream.pipeline, optimizer, seed=0)), step


def pipelined_steps(stream, config, name, num_steps: int, *, family: str = "gpt"):
    state, step = start(stream, config, name, num_steps=num_steps)
    batches = iter(batch_of(each, stream.schedule.batch_size, family) for each in range(num_steps))
    rows = []
    for _ in range(num_steps):
        state, metrics = step(state, lambda: next(batches))
        rows.append({name: float(metrics[name]) for name in ("loss", "grad_norm")})
    params = jax.tree.map(np.asarray, jax.jit(stream.pipeline.from_stages)(state.params))
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows], params


WPIPE = {"method": "wpipe", "tie_embeddings": False}
# D, N, data, tensor, layers per stage, optimizer, further choices
CASES = tiers(
    [],
    ci=[(2, 2, 1, 1, (1, 2, 1, 1), "sgd", WPIPE)],
    slow=[
        (2, 3, 1, 1, (1, 1), "sgd", {"family": "mixtral", "expert": 2}),
        (8, 8, 1, 1, (1,) * 8, "adamw", {}),  # the first stage does a backward while the head is collected
        (2, 2, 1, 1, (1, 1), "sgd", {}),
        (4, 4, 1, 1, (1,) * 8, "feedback", WPIPE),
        (4, 5, 2, 1, (1, 2, 2, 1), "feedback", {}),
        (2, 7, 2, 2, (2, 1), "muon", {"tie_embeddings": False}),
        (2, 2, 2, 2, (1, 1, 1, 1), "muon", WPIPE),
        (4, 4, 2, 1, (1, 1, 1, 1), "sgd", {}),
        (4, 8, 1, 2, (1, 1, 1, 1), "adamw", {"family": "llama"}),
        (4, 13, 1, 2, (1, 1, 1, 2), "sgd", {"shard": "none"}),
        (8, 16, 1, 1, (1,) * 8, "sgd", {}),
        (8, 25, 1, 1, (1,) * 8, "muon", {}),
        (3, 6, 2, 1, (1, 2, 1), "sgd", {"family": "llama"}),
        (2, 4, 2, 1, (1, 1), "sgd", {"dropout": 0.2}),
        (2, 3, 1, 2, (1, 2), "sgd", {"family": "llama", "attention": "chunked", "context": 2}),
        (2, 2, 1, 1, (1, 1, 1, 1), "sgd", {"family": "bert", "attention": "chunked", "context": 4} | WPIPE),
        (2, 3, 1, 2, (2, 1), "sgd", {"family": "bert"}),
        (2, 2, 1, 2, (1, 1), "sgd", {"family": "qwen3_moe", "expert": 2}),
        (2, 2, 1, 1, (1, 1, 1, 1), "sgd", {"family": "mixtral", "expert": 2} | WPIPE),
        (2, 3, 2, 2, (1, 2), "feedback", {}),
        (3, 3, 1, 2, (1, 1, 2, 1, 1, 1), "adamw", {"family": "llama"} | WPIPE),
        (4, 4, 2, 1, (1,) * 8, "sgd", WPIPE),
        (8, 8, 1, 1, (1,) * 16, "adamw", WPIPE),
        (2, 2, 1, 1, (1, 1, 1, 1), "feedback", {"family": "bert", "tie_embeddings": True} | WPIPE),
        (2, 2, 2, 1, (1, 1, 1, 2), "sgd", {"dropout": 0.2, "shard": "none"} | WPIPE),
    ],
)
NUM_STEPS = 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_steps_are_those_of_the_delayed_rule(case):
    num_devices, size, data, tensor, layers, name, choices = case
    choices = dict(choices)
    family, dropout = choices.pop("family", "gpt"), choices.pop("dropout", 0.0)
    method = choices.pop("method", "pipedream_2bw")
    of_model = {key: choices.pop(key) for key in ("tie_embeddings", "attention") if key in choices}
    of_model |= {"num_experts": 4} if "expert" in choices else {}
    config = config_of(family, num_layers=sum(layers), dropout=dropout, **of_model)
    schedule = build(method, num_devices=num_devices, num_microbatches=size)
    stream = stream_of(schedule, config, data=data, tensor=tensor, layers_per_stage=layers, **choices)
    rule = {"num_first": sum(layers[:num_devices]), "delays": (schedule.delays[0], schedule.delays[-1])}
    of_family = "bert" if family == "bert" else "gpt"
    losses, norms, params = pipelined_steps(stream, config, name, NUM_STEPS, family=of_family)
    wanted_losses, wanted_norms, wanted = plain_steps(
        config, OPTIMIZERS[name], size, NUM_STEPS, family=of_family, **rule
    )
    np.testing.assert_allclose(losses, wanted_losses, rtol=LARGEST_ERROR)
    # With AdamW first parameters that differ by 1e-7 move a norm of the rule itself by up to 5e-4.
    np.testing.assert_allclose(norms, wanted_norms, rtol=10 * LARGEST_ERROR if name == "sgd" else OF_CHANGE)
    if name == "sgd":
        errors = relative_errors(params, wanted)
        assert max(errors.values()) <= LARGEST_ERROR, errors
    else:
        change, wanted_change = (
            jax.tree.map(lambda leaf, first: leaf - first, tree, random_params(config)) for tree in (params, wanted)
        )
        errors = relative_errors(change, wanted_change)
        assert max(errors.values()) <= OF_CHANGE, errors


@pytest.mark.ci
def test_a_run_that_goes_on_uses_both_versions_that_were_saved():
    config = config_of("gpt", num_layers=2)
    stream = stream_of(build("pipedream_2bw", num_devices=2, num_microbatches=2), config, layers_per_stage=(1, 1))
    state, step = start(stream, config, "sgd", num_steps=6)
    losses = []
    for first, stop in ((0, 3), (3, 6)):  # an odd step, at which the two versions have changed places
        batches = (batch_of(each, 2, "gpt") for each in range(first, 6))
        for _ in range(first, stop):
            state, metrics = step(state, lambda batches=batches: next(batches))
            losses.append(float(metrics["loss"]))
        state, (_, step) = step.flush(state), start(stream, config, "sgd", num_steps=6)
    np.testing.assert_allclose(losses, plain_steps(config, OPTIMIZERS["sgd"], 2, 6)[0], rtol=LARGEST_ERROR)


def test_a_state_gets_the_weights_of_the_step_before_where_a_schedule_needs_them():
    config = config_of("gpt", num_layers=2)
    stream = stream_of(build("pipedream_2bw", num_devices=2, num_microbatches=2), config)
    state, step = start(stream, config, "sgd", num_steps=2)
    assert step.init(state) is state
    assert step.flush(state) is state  # nothing is in flight yet
    for param, older in zip(*map(jax.tree.leaves, (state.params, state.older.weights)), strict=True):
        np.testing.assert_array_equal(older, param)
        for shards in zip(older.addressable_shards, param.addressable_shards, strict=True):
            pointers = {shard.data.unsafe_buffer_pointer() for shard in shards}
            assert len(pointers) == 2  # the first call donates both
    with_flush = StepWithFlush(stream.pipeline, None)
    assert with_flush.init(state).older is None
    assert with_flush.flush(state) is with_flush.between_calls(state) is state
    assert step.between_calls(state).older.weights is None


@pytest.mark.ci
def test_a_version_taken_one_step_wrong_would_be_seen():
    config = config_of("gpt", num_layers=2)
    losses, _, params = plain_steps(config, OPTIMIZERS["sgd"], 2, NUM_STEPS)
    for delays in ((0, 0), (2, 2), (1, 0), (0, 1)):
        other_losses, _, other = plain_steps(config, OPTIMIZERS["sgd"], 2, NUM_STEPS, delays=delays, num_first=1)
        assert max(relative_errors(other, params).values()) > 50 * LARGEST_ERROR
        assert max(abs(np.array(other_losses) / losses - 1)) > 50 * LARGEST_ERROR


def compiled_call(schedule, *, layers, data: int = 1):
    """The pipeline, its storage's and arrays' shapes in HLO by what they are, and the text of a compiled call."""
    config = config_of("gpt", num_layers=sum(layers), tie_embeddings=schedule.name != "wpipe")
    stream = stream_of(schedule, config, data=data, layers_per_stage=layers)
    state, step = start(stream, config, "adamw", num_steps=4)
    pipeline = stream.pipeline
    sharding = pipeline.batch_sharding
    state, batch = (
        jax.tree.map(lambda leaf, on=on: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on or leaf.sharding), of)
        for of, on in ((state, None), (batch_of(0, schedule.batch_size), sharding))
    )
    step.lower(state, batch).compile()
    parts, num_layers = jax.tree.leaves(pipeline.parts(state.params)["layers"]), max(layers)
    copies = stream.table.copies_of_chunk
    shapes = {
        "pools": pool_shapes(stream.shapes(state.params, batch).storage),
        "gradients": gradient_shapes(pipeline, state.params),
        "copies": {hlo_shape(sum(copies), num_layers, *part.compute_shape) for part in parts},
        "masters and moments": {hlo_shape(len(copies), num_layers, *part.master_shape) for part in parts},
    }
    return step, shapes


def hlo_shape(*dims: int) -> str:
    return f"f32[{','.join(map(str, dims))}]"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "of_size"), [("pipedream_2bw", (5, 12)), ("wpipe", (4,))])
def test_nothing_big_is_written_whole_and_the_program_does_not_grow(method, of_size):
    sizes = []
    for size in of_size:
        schedule = build(method, num_devices=4, num_microbatches=size)
        step, shapes = compiled_call(schedule, layers=(3,) * schedule.num_stages, data=2)
        text = step.as_text()
        for of_kind in shapes.values():
            assert all(shape in text for shape in of_kind)
            assert whole_writes(text, of_kind) == []
        sizes.append(num_instructions(text))
    assert sizes[-1] == pytest.approx(sizes[0], rel=0.02)


def steps_from(params, config, num_steps: int, *, optimizer: str = "sgd"):
    """Parameters before and after the first of the steps of PipeDream-2BW on two devices, and metrics of all.

    What the optimizer holds at the end is finite, and it has counted all steps.
    """
    stream = stream_of(build("pipedream_2bw", num_devices=2, num_microbatches=2), config)
    state, step = start(stream, config, optimizer, num_steps=num_steps)
    pipeline = stream.pipeline
    staged = jax.device_put(pipeline.to_stages(params), pipeline.shardings(state.params))
    older = jax.tree.map(lambda leaf: leaf + 0, staged)
    state = replace(state, params=staged, older=replace(state.older, weights=older))
    batches, rows, after = iter(batch_of(each, 2) for each in range(num_steps)), [], None
    for _ in range(num_steps):
        state, metrics = step(state, lambda: next(batches))
        rows.append(jax.tree.map(float, metrics))
        if after is None:
            after = jax.tree.map(np.asarray, jax.jit(pipeline.from_stages)(state.params))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.optimizer))
    assert int(state.num_skipped) == 0  # a step of another schedule has the rate of this count
    assert [row["learning_rate"] for row in rows] == [1.0 + number for number in range(num_steps)]
    return params, after, rows


def is_changed(before, after) -> bool:
    return any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), before, after)))


@pytest.mark.parametrize("optimizer", tiers([], ci=["adamw"], slow=["sgd"]))
def test_a_layer_without_a_finite_gradient_is_left_out_and_all_others_are_updated(optimizer):
    config = config_of("gpt", num_layers=2)
    broken = jax.tree.map(np.copy, random_params(config))
    up, down = (broken["layers"]["feed_forward"][name] for name in ("up", "down"))
    for kernel, factor in ((up["kernel"], 1e-25), (up["bias"], 1e-25), (down["kernel"], 1e25)):
        kernel[0] *= factor  # the forward stays as it is, the square of the gradient of `up` is not finite
    before, after, (metrics, _, _) = steps_from(broken, config, 3, optimizer=optimizer)
    assert metrics["skipped"] == metrics["num_skipped_in_row"] == 1
    assert metrics["bad_parameter"] >= 0
    first, second = (
        is_changed(*(jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]) for tree in (before, after)))
        for i in (0, 1)
    )
    assert not first
    assert second


def test_clipping_leaves_the_loads_of_experts_as_they_are():
    transform, grads = optax.sgd(1.0), {"shared": {}, "layers": {LOAD_BIAS: jnp.ones(2), "kernel": jnp.ones(2)}}
    optimizer = StagedOptimizer(transform, lambda node: False, None, is_load_bias)
    on_device = DeviceOptimizer(optimizer, jnp.float32(0.5), None, None, deterministic=False)
    nodes, structure = jax.tree.flatten(transform.init(grads))
    after, _ = on_device.apply(grads, jax.tree.map(jnp.zeros_like, grads), nodes, structure)
    assert {name: leaf.tolist() for name, leaf in after["layers"].items()} == {
        LOAD_BIAS: [-1.0, -1.0],
        "kernel": [-0.5, -0.5],
    }


@pytest.mark.ci
def test_embedding_and_head_without_a_finite_gradient_are_left_out_and_the_next_batches_use_what_they_were():
    config = config_of("gpt", num_layers=2, tie_embeddings=False)
    broken = jax.tree.map(np.copy, random_params(config))
    head = broken["shared"]["head"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        leaf *= 1e-25 if "kernel" in jax.tree_util.keystr(path) else 1e25  # as above: large features
    before, after, rows = steps_from(broken, config, 4)
    assert [row["skipped"] for row in rows] == [1, 1, 1, 1]
    assert not is_changed(before["shared"], after["shared"])
    assert is_changed(before["layers"], after["layers"])
    np.testing.assert_allclose([row["loss"] for row in rows], rows[0]["loss"], rtol=0.5)


def test_an_embedding_that_is_not_linear_is_refused():
    config = config_of("gpt", num_layers=2)
    model = LanguageModel(config)

    def embed(shared, microbatch, random):
        x = model.embed(shared, microbatch, random)
        return x * shared["embedding"]["token"][0]

    functions = StageFunctions(embed, model.layer, model.head, specs=StageFunctions.of(model).specs)
    schedule = build("pipedream_2bw", num_devices=2, num_microbatches=2)
    pipeline = Pipeline(one_batch(schedule), make_mesh(pipe=2), functions, num_layers=2)
    with pytest.raises(CompileError, match="rule one-shared-copy") as error:
        Stream(schedule, pipeline).shapes(pipeline.to_stages(random_params(config)), batch_of(0, 2))
    assert "token" in str(error.value)


@pytest.mark.parametrize("changes", [{"delays": (2, 2)}, {"delays": (1, 2)}])
def test_other_delays_are_refused(changes):
    config = config_of("gpt", num_layers=2)
    schedule = replace(build("pipedream_2bw", num_devices=2, num_microbatches=2), **changes)
    with pytest.raises(CompileError, match="rule run-of-delay-one"):
        stream_of(schedule, config)
