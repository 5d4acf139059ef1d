"""A tiny GPT, a batch for it, and its gradients by plain `jax.grad`, without a pipeline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.mesh import make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import Schedule

MICROBATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 2, 8, 32
MOST_LAYERS, MOST_MICROBATCHES = 15, 17


@functools.cache
def make_model(tie_embeddings: bool = True) -> LanguageModel:
    """One model for all numbers of layers: its functions do not depend on them."""
    return LanguageModel(
        GPTConfig(
            num_layers=MOST_LAYERS,
            hidden=16,
            num_heads=2,
            vocab_size=VOCAB_SIZE,
            seq_len=SEQ_LEN,
            tie_embeddings=tie_embeddings,
        )
    )


def make_params(num_layers: int, *, tie_embeddings: bool = True):
    params = _all_params(tie_embeddings)
    return {**params, "layers": jax.tree.map(lambda leaf: leaf[:num_layers], params["layers"])}


@functools.cache
def _all_params(tie_embeddings: bool):
    """Random numbers everywhere: initial biases are 0 and norms 1, where a mistake in them would hide."""
    generator = np.random.default_rng(0)

    def fill(path, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return generator.normal(mean, 0.2, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(make_model(tie_embeddings).init, jax.random.key(0)))


def make_batch(num_microbatches: int) -> dict[str, np.ndarray]:
    """The first of always the same microbatches; a fifth of the targets and all of one sequence are not valid."""
    generator = np.random.default_rng(1)
    shape = (MOST_MICROBATCHES, MICROBATCH_SIZE, SEQ_LEN + 1)
    tokens = generator.integers(VOCAB_SIZE, size=shape, dtype=np.int32)
    targets = np.where(generator.random(shape) < 0.2, -1, tokens)[..., 1:]
    targets[2, 0] = -1
    return {"tokens": tokens[:num_microbatches, :, :-1], "targets": targets[:num_microbatches]}


def make_pipeline(
    schedule: Schedule,
    *,
    num_layers: int,
    tie_embeddings: bool = True,
    layers_per_stage: tuple[int, ...] | None = None,
    data: int = 1,
) -> Pipeline:
    model = make_model(tie_embeddings)
    return Pipeline(
        schedule,
        make_mesh(data=data, pipe=schedule.num_devices),
        StageFunctions.of(model),
        num_layers=num_layers,
        layers_per_stage=layers_per_stage,
    )


def loss_and_grads(pipeline: Pipeline, *, tie_embeddings: bool = True):
    """The pipeline's loss and its gradients in canonical layer order, a mean over the valid tokens."""
    batch = make_batch(pipeline.schedule.num_microbatches)
    params = make_params(pipeline.layout.num_layers, tie_embeddings=tie_embeddings)
    loss, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch, 1 / num_valid(batch))
    return float(loss), jax.jit(pipeline.from_stages)(grads)


def num_valid(batch) -> int:
    return int((batch["targets"] >= 0).sum())


def expected_loss_and_grads(num_layers: int, num_microbatches: int, *, tie_embeddings: bool = True):
    """The same by plain `jax.grad` of the model in float32, one microbatch at a time, added up in float64."""
    scale = 1 / num_valid(make_batch(num_microbatches))
    each = [_of_microbatch(m, num_layers, tie_embeddings) for m in range(num_microbatches)]
    return jax.tree.map(lambda *leaves: scale * sum(np.asarray(leaf, np.float64) for leaf in leaves), *each)


@functools.cache
def _value_and_grad(tie_embeddings: bool):
    return jax.jit(jax.value_and_grad(make_model(tie_embeddings).loss_sum))


@functools.cache
def _of_microbatch(microbatch: int, num_layers: int, tie_embeddings: bool):
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf[microbatch]), make_batch(MOST_MICROBATCHES))
    return _value_and_grad(tie_embeddings)(make_params(num_layers, tie_embeddings=tie_embeddings), batch)


def relative_errors(grads, expected) -> dict[str, float]:
    """Norm of the difference over norm, for every parameter, layer by layer."""
    errors = {}
    for part, per_layer in (("shared", False), ("layers", True)):
        found = jax.tree_util.tree_leaves_with_path(grads[part])
        for (path, leaf), wanted in zip(found, jax.tree.leaves(expected[part]), strict=True):
            assert (leaf.shape, leaf.dtype) == (wanted.shape, np.float32)
            axes = tuple(range(per_layer, leaf.ndim))
            difference = np.sqrt(np.square(np.asarray(leaf, np.float64) - wanted).sum(axes))
            errors[part + jax.tree_util.keystr(path)] = (difference / np.sqrt(np.square(wanted).sum(axes))).max()
    return errors
