"""Dropout in a layer of one's own: a mask for every sequence, the same on every mesh; one key for all is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import tiers

from jaxpipe.errors import CompileError
from jaxpipe.mesh import make_mesh
from jaxpipe.models.dropout import dropout
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build

NUM_SEQUENCES, WIDTH, RATE = 8, 24, 0.5  # in two microbatches; float32 holds 24 bits exactly
DRAWS = {
    "dropout": lambda x, random: dropout(x, random, rate=RATE),
    "keys": lambda x, random: x * jax.vmap(lambda key: jax.random.bernoulli(key, RATE, (WIDTH,)))(random.keys(len(x))),
}


def functions(draw) -> StageFunctions:
    """The head returns what is kept of each sequence, as the bits of a number, beside a loss that has a gradient."""

    def embed(shared, batch, random):
        return jnp.ones((len(batch["sequence"]), WIDTH))

    def layer(params, x, batch, random):
        return x * params["scale"] if random is None else draw(x, random) * params["scale"]

    def head(shared, x, batch):
        bits = ((x > 0) * 2.0 ** jnp.arange(WIDTH)).sum(axis=-1)
        return {f"{i}": jnp.where(batch["sequence"] == i, bits, 0).sum() for i in range(NUM_SEQUENCES)} | {
            "loss": x.sum()
        }

    return StageFunctions(embed, layer, head)


def masks(draw, *, data: int, schedule: str = "1f1b") -> np.ndarray:
    """The kept columns of every sequence of the global batch as an integer, on a mesh of `data` x 2."""
    built = build(schedule, num_devices=2, num_microbatches=2)
    num_layers = 2 * built.placement.num_chunks
    mesh = make_mesh(data=data, pipe=2, tensor=1, devices=jax.devices()[: 2 * data])
    pipeline = Pipeline(built, mesh, functions(draw), num_layers=num_layers)
    params = pipeline.to_stages({"shared": {}, "layers": {"scale": jnp.ones(num_layers)}})
    batch = {"sequence": jnp.arange(NUM_SEQUENCES).reshape(2, -1)}
    losses, _ = pipeline.loss_and_grads(params, batch, 1.0, jax.random.key(5))
    return np.array([int(losses[f"{i}"]) for i in range(NUM_SEQUENCES)])


@pytest.mark.parametrize("draw", tiers([], ci=["dropout"], slow=["keys"]))
def test_every_sequence_of_the_global_batch_has_its_own_mask_on_every_mesh(draw):
    found = masks(DRAWS[draw], data=1)
    assert len(set(found.tolist())) == NUM_SEQUENCES
    np.testing.assert_array_equal(found, masks(DRAWS[draw], data=2))


@pytest.mark.ci
def test_whole_and_split_backwards_draw_the_same():
    """A split backward draws again for I and for W."""
    whole, split = (masks(DRAWS["dropout"], data=2, schedule=schedule) for schedule in ("1f1b", "zb_h1"))
    np.testing.assert_array_equal(whole, split)


@pytest.mark.ci
def test_a_split_column_has_the_mask_of_its_global_index():
    """A layer whose inner columns are split over `tensor`: the same loss as on a device alone."""
    keys = jax.random.split(jax.random.key(1), 2)
    up, down = (jax.random.normal(key, (2, WIDTH, WIDTH)) for key in keys)
    batch = {"x": jax.random.normal(jax.random.key(2), (2, 4, WIDTH))}

    def loss(tensor: int) -> float:
        def layer(params, x, batch, random):
            first = lax.axis_index("tensor") * (WIDTH // tensor)
            inner = dropout(jnp.tanh(x @ params["up"]), random, rate=RATE, first_column=first)
            return x + lax.psum(inner @ params["down"], "tensor")

        specs = {"shared": {}, "layers": {"up": P(None, "tensor"), "down": P("tensor", None)}}
        mesh = make_mesh(data=1, pipe=2, tensor=tensor, devices=jax.devices()[: 2 * tensor])
        stage_functions = StageFunctions(
            lambda shared, batch, random: batch["x"], layer, lambda shared, x, batch: (x**2).sum(), specs=specs
        )
        schedule = build("1f1b", num_devices=2, num_microbatches=2)
        pipeline = Pipeline(schedule, mesh, stage_functions, num_layers=2)
        params = pipeline.to_stages({"shared": {}, "layers": {"up": up, "down": down}})
        return float(pipeline.loss_and_grads(params, batch, 1.0, jax.random.key(5))[0])

    assert loss(2) == pytest.approx(loss(1), rel=1e-6)


@pytest.mark.parametrize("key", [lambda random: random, lambda random: random.key])
def test_one_key_for_a_whole_microbatch_is_refused(key):
    with pytest.raises(CompileError, match=r"used as a key(.|\n)*dropout\(x, random, rate=0.1\)"):
        masks(lambda x, random: x * jax.random.bernoulli(key(random), RATE, x.shape), data=2)
