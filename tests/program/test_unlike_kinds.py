"""Layers of several kinds with parameters of their own: stacks of each kind, gradients, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_mlp
from tiers import tiers

from jaxpipe.layer_kinds import Pattern
from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build, split_backward

HIDDEN = tiny_mlp.HIDDEN
NUM_EXPERTS, WIDTH = 3, 12


def normed(params, x):
    return x * params["norm"] / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)


def mixed(params, x, microbatch, random):
    """Kind 0: all experts, weighted."""
    own = params["experts"]
    of_each = jnp.tanh(jnp.einsum("...h,ehf->...ef", normed(params, x), own["up"]))
    weights = jax.nn.softmax(x @ own["router"])
    return x + jnp.einsum("...ef,efh,...e->...h", of_each, own["down"], weights)


def dense(params, x, microbatch, random):
    """Kind 1: one matrix there and one back, and a bias."""
    own = params["dense"]
    return x + jnp.sin(normed(params, x) @ own["up"] + own["bias"]) @ own["up"].T * microbatch["gate"][..., None]


ALL = (mixed, dense)
NAMES = (("experts",), ("dense",))
THREE_FIRST = Pattern(first=(1, 1, 1), only=NAMES)
IN_TURN = Pattern(unit=(0, 1), only=NAMES)
FUNCTIONS = {
    pattern: StageFunctions(
        embed=tiny_mlp.embed, layer=mixed, head=tiny_mlp.head, other_layers=(dense,), pattern=pattern
    )
    for pattern in (THREE_FIRST, IN_TURN)
}


def make_params(pattern: Pattern, num_layers: int):
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(scale=0.3, size=shape), jnp.float32)

    num = [pattern.kinds(num_layers).count(kind) for kind in (0, 1)]
    layers = {
        "norm": 1 + normal(num_layers, HIDDEN),
        "experts": {
            "up": normal(num[0], NUM_EXPERTS, HIDDEN, WIDTH),
            "down": normal(num[0], NUM_EXPERTS, WIDTH, HIDDEN),
            "router": normal(num[0], HIDDEN, NUM_EXPERTS),
        },
        "dense": {"up": normal(num[1], HIDDEN, 2 * HIDDEN), "bias": normal(num[1], 2 * HIDDEN)},
    }
    return {**tiny_mlp.make_params(1), "layers": layers}


def expected(pattern: Pattern, num_layers: int, num_microbatches: int):
    """Loss and gradients by plain `jax.grad`, the layers one after the other."""

    def loss(params, batch):
        x = tiny_mlp.embed(params["shared"], batch, None)
        num_done = [0, 0]
        for place, kind in enumerate(pattern.kinds(num_layers)):
            layers, name = params["layers"], NAMES[kind][0]
            own = jax.tree.map(lambda leaf, row=num_done[kind]: leaf[row], layers[name])
            x = ALL[kind]({"norm": layers["norm"][place], name: own}, x, batch, None)
            num_done[kind] += 1
        return tiny_mlp.head(params["shared"], x, batch)

    arguments = make_params(pattern, num_layers), tiny_mlp.make_batch(num_microbatches)
    return jax.jit(jax.value_and_grad(loss))(*arguments)


def pipeline_of(name: str, num_devices: int, num_layers: int, pattern: Pattern, data: int = 1, **options):
    *split, name = name.split()
    schedule = build(name, num_devices=num_devices, num_microbatches=2 * num_devices)
    schedule = split_backward(schedule) if split else schedule
    mesh = make_mesh(data=data, pipe=num_devices)
    return Pipeline(schedule, mesh, FUNCTIONS[pattern], num_layers=num_layers, **options)


# schedule, devices, layers, pattern, options of the pipeline
CASES = tiers(
    [("1f1b", 2, 7, THREE_FIRST, {}), ("split 1f1b", 2, 9, IN_TURN, {"layers_per_stage": (4, 5)})],
    ci=[
        ("1f1b", 4, 9, THREE_FIRST, {"layers_per_stage": (2, 2, 3, 2)}),
        ("1f1b", 2, 8, THREE_FIRST, {"data": 2}),
        ("1f1b", 2, 8, IN_TURN, {"data": 2, "shard": "none"}),
        ("zb_v", 2, 9, THREE_FIRST, {"layers_per_stage": (2, 3, 2, 2)}),
        ("zb_v", 2, 11, IN_TURN, {}),
        ("bpipe", 4, 11, THREE_FIRST, {"layers_per_stage": (3, 2, 3, 3)}),
        ("bpipe", 4, 10, IN_TURN, {}),
        ("bitpipe", 2, 9, THREE_FIRST, {}),
        ("bitpipe", 4, 17, IN_TURN, {}),
        ("bitpipe", 2, 9, THREE_FIRST, {"data": 2}),
        ("interleaved_1f1b", 2, 11, THREE_FIRST, {"layers_per_stage": (2, 4, 2, 3)}),
        ("interleaved_1f1b", 2, 15, IN_TURN, {"layers_per_stage": (3, 5, 4, 3)}),
    ],
    slow=[
        (name, devices, layers, pattern, {"data": data})
        for name, devices in (("zb_h1", 4), ("chimera", 2), ("gpipe", 2), ("dualpipe_v", 2), ("hanayo", 2))
        for pattern, layers in ((IN_TURN, 14), (THREE_FIRST, 13))
        for data in (1, 2)
    ],
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_plain_grad(case):
    name, num_devices, num_layers, pattern, options = case
    pipeline = pipeline_of(name, num_devices, num_layers, pattern, **options)
    params = jax.jit(pipeline.to_stages)(make_params(pattern, num_layers))
    loss, grads = pipeline.loss_and_grads(params, tiny_mlp.make_batch(pipeline.schedule.num_microbatches))
    found = loss, jax.jit(pipeline.from_stages)(grads)
    wanted = expected(pattern, num_layers, pipeline.schedule.num_microbatches)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(ours - plain) <= 1e-5 * np.linalg.norm(plain)
