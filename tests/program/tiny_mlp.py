"""A user's own model, no GPT: float inputs, a layer of one matrix, gated by the batch, a squared error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import Schedule

MICROBATCH_SIZE, NUM_INPUTS, HIDDEN = 2, 3, 8


def embed(shared, microbatch, random):
    return microbatch["x"] @ shared["in"]


def layer(params, x, microbatch, random):
    return x + microbatch["gate"][..., None] * jnp.tanh(x @ params["kernel"] + params["bias"])


def head(shared, x, microbatch):
    return ((x @ shared["out"] - microbatch["y"]).astype(jnp.float32) ** 2).sum()


FUNCTIONS = StageFunctions(embed=embed, layer=layer, head=head, layer_again=jax.checkpoint(layer, prevent_cse=False))


def make_params(num_layers: int, dtype: str = "float32"):
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(scale=0.3, size=shape), dtype)

    return {
        "shared": {"in": normal(NUM_INPUTS, HIDDEN), "out": normal(HIDDEN)},
        "layers": {"kernel": normal(num_layers, HIDDEN, HIDDEN), "bias": normal(num_layers, HIDDEN)},
    }


def make_batch(num_microbatches: int, dtype: str = "float32"):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(num_microbatches, MICROBATCH_SIZE, NUM_INPUTS))
    gate = generator.integers(0, 2, (num_microbatches, MICROBATCH_SIZE))
    return {
        "x": jnp.asarray(x, dtype),
        "y": jnp.asarray(np.sin(x).sum(-1), dtype),
        "gate": jnp.asarray(gate, jnp.int32),
    }


def make_pipeline(schedule: Schedule, *, num_layers: int, data: int = 1, **options) -> Pipeline:
    mesh = make_mesh(data=data, pipe=schedule.num_devices)
    return Pipeline(schedule, mesh, FUNCTIONS, num_layers=num_layers, **options)


def loss_and_grads(pipeline: Pipeline):
    """The pipeline's loss and its gradients in canonical layer order."""
    params = jax.jit(pipeline.to_stages)(make_params(pipeline.layout.num_layers))
    loss, grads = pipeline.loss_and_grads(params, make_batch(pipeline.schedule.num_microbatches))
    return loss, jax.jit(pipeline.from_stages)(grads)


@functools.cache
def expected_loss_and_grads(num_layers: int, num_microbatches: int):
    """The same by plain `jax.grad`, the layers one after the other."""

    def loss(params, batch):
        x = embed(params["shared"], batch, None)
        x, _ = jax.lax.scan(lambda x, params: (layer(params, x, batch, None), None), x, params["layers"])
        return head(params["shared"], x, batch)

    arguments = make_params(num_layers), make_batch(num_microbatches)
    return jax.jit(jax.value_and_grad(loss))(*arguments)


def assert_equivalent(pipeline: Pipeline) -> None:
    """float32 sums in another order: eps = 6e-8 times the root of a few hundred terms is 1e-6.

    Every layer adds its rounding to that of those before it, so the bound grows with depth: 49 layers have 1.4e-5 here,
    and plain float32 itself 4e-6, against float64 (how much depends on the machine's instructions).
    """
    num_layers = pipeline.layout.num_layers
    largest = 1e-5 * max(1, num_layers / 16)
    found = loss_and_grads(pipeline)
    expected = expected_loss_and_grads(num_layers, pipeline.schedule.num_microbatches)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        leaf, wanted = np.asarray(leaf), np.asarray(wanted)
        assert np.linalg.norm(leaf - wanted) <= largest * np.linalg.norm(wanted)
