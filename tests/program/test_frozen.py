"""Frozen parameters have no gradient and nothing that follows from one; adapters' gradients are those of `jax.grad`."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors, stream_of

from jaxpipe.errors import CompileError, ConfigError
from jaxpipe.mesh import TensorAxis, is_masked, make_mesh, trained, with_trained
from jaxpipe.models import LanguageModel
from jaxpipe.models.lora import Lora, base_of, merged
from jaxpipe.models.parameters import adapted_columns
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.held_bytes import held_bytes
from jaxpipe.schedules import build
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.training.step import init_state, make_train_step, name_losses

LORA = Lora(2, 6.0, ("all",))
NUM_MICROBATCHES = 4
LARGEST_ERROR = 1e-5  # float32: sums of 4 x 2 x 8 tokens in another order


def merged_params(config: Any, params: Any) -> Any:
    """Parameters of the model into which the adapters of `params` are merged."""
    model = LanguageModel(config)

    def of_linear(path: str, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        columns = adapted_columns(model.config).get(path)
        inner = {name: of_linear(f"{path}.{name}", value) for name, value in node.items()}
        if columns is None:
            return inner
        pairs = {name: (inner[name]["lora_a"], inner[name]["lora_b"]) for name in columns.names if name in inner}
        kernel = jax.vmap(lambda kernel, pairs: merged(kernel, columns, pairs))(inner["kernel"], pairs)
        return {name: kernel if name == "kernel" else inner[name] for name in inner if name not in pairs}

    return {"shared": params["shared"], "layers": of_linear("layers", params["layers"])}


def expected(config: Any, params: Any, batch: Any, scale: float) -> tuple[Any, Any]:
    """Loss, and gradients of the adapters of the merged model, microbatch by microbatch."""
    model = LanguageModel(base_of(config))

    def loss(adapters: Any) -> Any:
        whole = merged_params(config, with_trained(params, adapters))
        of_each = [
            name_losses(model.loss_sum(whole, jax.tree.map(lambda leaf, i=i: leaf[i], batch)))["loss"]
            for i in range(NUM_MICROBATCHES)
        ]
        return scale * sum(of_each)

    is_trained = LanguageModel(config).is_trained
    return jax.jit(jax.value_and_grad(loss))(trained(params, is_trained))


def assert_gradients(name: str, family: str, pipe: int, lora: Lora = LORA, num_layers: int = 4, **options: Any) -> None:
    schedule = build(name, num_devices=pipe, num_microbatches=NUM_MICROBATCHES)
    config = config_of(family, num_layers=num_layers, lora=lora)
    params, batch = random_params(config), random_batch(NUM_MICROBATCHES, seed=1, family=family)
    if options.pop("over_pipe", False):
        model = LanguageModel(config, TensorAxis.of(num_pipe=pipe))
        mesh = make_mesh(data=1, pipe=pipe, tensor=1)
        pipeline = Pipeline(vocabulary(schedule), mesh, StageFunctions.of(model), num_layers=num_layers)
    else:
        pipeline = pipeline_of(schedule, config, **options)
    staged = jax.jit(pipeline.to_stages)(params)
    staged = jax.device_put(staged, pipeline.shardings(staged))
    loss, grads = pipeline.loss_and_grads(staged, batch, 0.1)
    wanted_loss, wanted = expected(config, params, batch, 0.1)
    found = jax.jit(pipeline.from_stages)(grads)
    np.testing.assert_allclose(name_losses(loss)["loss"], wanted_loss, rtol=LARGEST_ERROR)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    errors = relative_errors(found, wanted)
    assert errors
    assert max(errors.values()) < LARGEST_ERROR, errors


ONE = Lora(1, 3.0, ("all",))  # so few that I makes all gradients
MANY = Lora(12, 4.0, ("all",))  # W has some
CASES = tiers(
    [("1f1b", "gpt", {"pipe": 2, "num_layers": 2})],
    slow=[
        ("zb_h1", "llama", {"pipe": 2, "data": 2, "tensor": 2, "shard": "weights", "lora": ONE, "num_layers": 2}),
        ("bitpipe", "llama", {"pipe": 2, "data": 2, "shard": "gradients"}),
        ("zb_h1", "llama", {"pipe": 2, "data": 2, "shard": "weights", "lora": MANY}),
        ("1f1b", "gpt", {"pipe": 2, "data": 2, "tensor": 2}),
        ("bpipe", "llama", {"pipe": 4, "tensor": 2}),
        ("zb_v", "qwen3", {"pipe": 2, "tensor": 2, "lora": Lora(1, 1.0, ("query", "value"))}),
        ("1f1b", "mixtral", {"pipe": 2, "tensor": 2}),
        ("1f1b", "bert", {"pipe": 2, "over_pipe": True}),
        ("gpipe", "bert", {"pipe": 2, "data": 2, "shard": "none"}),
        ("interleaved_1f1b", "gpt", {"pipe": 2, "tensor": 2, "shard": "gradients", "data": 2}),
        ("chimera", "llama", {"pipe": 2, "data": 2, "shard": "weights"}),
        ("hanayo", "llama", {"pipe": 2, "lora": Lora(2, 4.0, ("down",))}),
        ("dualpipe_v", "llama", {"pipe": 2, "data": 2}),
        ("v_half", "gpt", {"pipe": 4, "num_layers": 8}),
        ("v_min", "llama", {"pipe": 2, "tensor": 2}),
        ("zb_h2", "gpt", {"pipe": 2, "data": 2, "shard": "gradients"}),
        ("gems", "llama", {"pipe": 2, "tensor": 2, "lora": ONE}),
        ("dualpipe", "gpt", {"pipe": 2, "data": 2, "shard": "weights"}),
        ("mixpipe", "llama", {"pipe": 2}),
        ("breadth_first", "qwen3", {"pipe": 2, "data": 2, "shard": "weights"}),
    ],
)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_adapters_are_those_of_the_merged_model(case):
    name, family, options = case
    assert_gradients(name, family, **options)


def products_of(text: str, shape: tuple[int, ...]) -> int:
    """Matrix products with results of `shape` in a program's StableHLO."""
    dims = "x".join(map(str, shape))
    return len(re.findall(rf"dot_general.*-> tensor<{dims}x(?:f32|bf16)>", text))


def test_a_program_makes_no_gradient_of_a_frozen_kernel_and_keeps_nothing_for_one():
    schedule = build("1f1b", num_devices=2, num_microbatches=NUM_MICROBATCHES)
    shape = 24, 16  # of the kernel that goes down, and of no activation
    programs, bytes_of = {}, {}
    for lora in (None, LORA):
        config = config_of("llama", num_layers=4, lora=lora)
        pipeline = pipeline_of(schedule, config)
        params = jax.eval_shape(lambda pipeline=pipeline, config=config: pipeline.to_stages(random_params(config)))
        batch = random_batch(NUM_MICROBATCHES, seed=0)
        programs[lora] = pipeline.loss_and_grads.lower(params, batch, 1.0).as_text()
        bytes_of[lora] = held_bytes(pipeline.shapes(params, batch, random=False))
        grads = jax.eval_shape(pipeline.loss_and_grads, params, batch, 1.0)[1]
        kernels = grads["layers"]["feed_forward"]["gate"]["kernel"], grads["shared"]["embedding"]["token"]
        assert [is_masked(leaf) for leaf in kernels] == [lora is not None] * 2
        num_trained = sum(leaf.size for leaf in jax.tree.leaves(grads["layers"])) // 2  # of a device
        shared = sum(leaf.size for leaf in jax.tree.leaves(grads["shared"]))
        assert bytes_of[lora]["gradients"] == 4 * (num_trained + shared)
    assert products_of(programs[None], shape) > 0
    assert products_of(programs[LORA], shape) == 0
    assert bytes_of[LORA]["pages"] == bytes_of[None]["pages"]
    assert bytes_of[LORA]["gradients"] < bytes_of[None]["gradients"] / 4


def test_i_makes_all_gradients_where_few_parameters_are_trained():
    schedule = build("zb_h1", num_devices=2, num_microbatches=NUM_MICROBATCHES)
    deferred = {}
    for rank in (1, 12):
        config = config_of("llama", num_layers=4, lora=Lora(rank, 1.0, ("all",)))
        pipeline = pipeline_of(schedule, config)
        params = jax.eval_shape(lambda pipeline=pipeline, config=config: pipeline.to_stages(random_params(config)))
        shapes = pipeline.shapes(params, random_batch(NUM_MICROBATCHES, seed=0), random=False)
        assert shapes.split is not None
        deferred[rank] = len(shapes.split.deferred), sum(shapes.split.is_of_w), len(shapes.split.is_of_w)
    assert deferred[1] == (0, 0, 14)
    assert deferred[12][0] > 0
    assert deferred[12][1:] == (14, 14)


@pytest.mark.slow
def test_frozen_weights_stay_bit_for_bit_and_have_no_moments():
    config = config_of("llama", num_layers=4, lora=LORA)
    pipeline = pipeline_of(
        build("1f1b", num_devices=2, num_microbatches=NUM_MICROBATCHES), config, data=2, dtype="bfloat16"
    )
    model: Any = SimpleNamespace(init=lambda _: random_params(config))
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    state = init_state(model, pipeline, optimizer, seed=0)
    before = jax.tree.map(np.asarray, state.params)
    step = make_train_step(LanguageModel(config), pipeline, optimizer, None, max_grad_norm=1.0)
    for seed in range(5):
        state, metrics = step(state, random_batch(NUM_MICROBATCHES, seed=seed))
        assert metrics["skipped"] == 0
    after = jax.tree.map(np.asarray, state.params)
    for wanted, old, new in zip(*map(jax.tree.leaves, (LanguageModel(config).is_trained, before, after)), strict=True):
        assert old.dtype == new.dtype == ("float32" if wanted else "bfloat16")
        assert np.array_equal(old, new) == (not wanted)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(pipeline.trained(state.params)))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer)) == 2 * num_trained + 1  # and a count


@pytest.mark.ci
def test_a_model_with_adapters_begins_as_the_one_without():
    with_adapters = config_of("gpt", num_layers=2, lora=LORA)
    models = LanguageModel(with_adapters), LanguageModel(base_of(with_adapters))
    params, base = (model.init(jax.random.key(3)) for model in models)
    assert jax.tree.all(jax.tree.map(np.array_equal, merged_params(with_adapters, params), base))
    batch = jax.tree.map(lambda leaf: leaf[0], random_batch(1, seed=0))
    of_params, of_base = (model.logits(tree, batch) for model, tree in zip(models, (params, base), strict=True))
    np.testing.assert_array_equal(of_params, of_base)
    a = params["layers"]["attention"]["query_key_value"]["query"]["lora_a"]
    assert a.shape == (2, 16, 2)
    assert 0.8 / 4 < np.abs(a).max() <= 1 / 4  # Kaiming-uniform: at most 1 / sqrt(16)
    assert not np.array_equal(a[0], a[1])


@pytest.mark.ci
def test_some_parameters_of_a_model_of_ones_own_are_frozen():
    def layer(params, x, batch, random):
        return x + jnp.tanh(x @ params["frozen"]) @ params["trained"]

    def embed(shared, batch, random):
        return batch["x"] @ shared["into"]

    def head(shared, x, batch):
        return jnp.sum((x @ shared["out"]) ** 2)

    is_trained = {"shared": {"into": False, "out": True}, "layers": {"frozen": False, "trained": True}}
    generator = np.random.default_rng(0)
    shapes = {"shared": {"into": (4, 8), "out": (8, 3)}, "layers": {"frozen": (4, 8, 8), "trained": (4, 8, 8)}}
    params = jax.tree.map(
        lambda shape: generator.normal(0, 0.3, shape).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    batch = {"x": generator.normal(size=(4, 2, 5, 4)).astype(np.float32)}
    functions = StageFunctions(embed, layer, head, is_trained=is_trained)
    schedule = build("zb_h1", num_devices=2, num_microbatches=4)
    pipeline = Pipeline(schedule, make_mesh(data=2, pipe=2, tensor=1), functions, num_layers=4, shard="gradients")

    def loss(part):
        whole = with_trained(params, part)
        x = embed(whole["shared"], batch, None)
        for i in range(4):
            x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], whole["layers"]), x, batch, None)
        return head(whole["shared"], x, batch)

    found = pipeline.loss_and_grads(pipeline.to_stages(params), batch, 1.0)
    wanted_loss, wanted = jax.value_and_grad(loss)(trained(params, is_trained))
    np.testing.assert_allclose(found[0], wanted_loss, rtol=LARGEST_ERROR)
    grads = pipeline.from_stages(found[1])
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    assert max(relative_errors(grads, wanted).values()) < LARGEST_ERROR
    broken = dataclasses.replace(functions, is_trained={"shared": {"into": False}, "layers": True})
    other = Pipeline(schedule, make_mesh(data=2, pipe=2, tensor=1), broken, num_layers=4)
    with pytest.raises(CompileError, match=r"rule is_trained: one bool for every parameter"):
        other.parts(other.to_stages(params))


def test_frozen_parameters_need_a_flush():
    with pytest.raises(CompileError, match=r"frozen-need-flush.*\n.*repair: take a schedule with a flush"):
        stream_of(build("pipedream_2bw", num_devices=2, num_microbatches=4), config_of("gpt", num_layers=2, lora=LORA))


@pytest.mark.parametrize(
    ("family", "target", "why"),
    [
        ("llama", "q_proj", "is no matmul of a layer"),
        ("llama", "querry", "Did you mean 'query'"),
        ("gpt", "gate", "gated feed forwards alone"),
        ("mixtral", "up", "has no adapters in a mixture"),
    ],
)
def test_targets_that_no_layer_has_are_refused(family, target, why):
    with pytest.raises(ConfigError, match=rf"{target}.*{why}[^\n]*\n *rule lora-targets") as told:
        config_of(family, num_layers=2, lora=Lora(2, 4.0, ("query", target)))
    assert "repair: set model.lora_targets='all'" in str(told.value)
