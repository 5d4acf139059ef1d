"""Layers of all kinds, and what I and W of each one's backward should be: counted by hand.

Of `x @ k` the backward has two products, dy k' for the input and x' dy for the kernel. I has the first
kind, of every product that the input goes through, and what a checkpoint recomputes; W has the second kind.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.mesh import Randomness
from jaxpipe.models.dropout import drop

TOKENS, HIDDEN, WIDTH, TURNS = 6, 4, 10, 3
X, WIDE = (TOKENS, HIDDEN), (TOKENS, WIDTH)  # shapes of activations
RANDOM = Randomness(jnp.array([3, 7], jnp.uint32), jnp.int32(5))
IDS = jnp.array([2, 0, 2, 1, 2, 0], jnp.int32)
MASK = jnp.array([1, 0, 1, 1, 0, 1], jnp.int32)

Shapes = list[tuple[int, ...]]


class Layer(NamedTuple):
    """A layer, and what its I and W should have.

    Attributes:
        function: of params, x "token hidden" and `given`.
        now, later: matrix products of I and of W.
        deferred: shapes of what I defers to W, in any order; None: not checked.
        shared: shapes of the residuals that W reads, in any order; None: not checked.
        early: names of parameters whose gradients I computes.
        given: what the function is given besides.
        dtype: of parameters and input.
    """

    function: Callable
    params: dict[str, Any]
    now: int
    later: int
    deferred: Shapes | None = None
    shared: Shapes | None = None
    early: tuple[str, ...] = ()
    given: Any = None
    dtype: str = "float32"


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(scale=0.6, size=shape), jnp.float32)


KERNEL = {"kernel": normal(HIDDEN, HIDDEN)}
UP_DOWN = {"up": normal(HIDDEN, WIDTH), "down": normal(WIDTH, HIDDEN)}
STACK = {"kernel": normal(TURNS, HIDDEN, HIDDEN), "bias": normal(TURNS, HIDDEN)}


def product(params, x, _):
    return x @ params["kernel"]


def feed_forward(params, x, _, activation: Callable = jnp.tanh):
    return x + activation(x @ params["up"]) @ params["down"]


def checkpoint_in_a_checkpoint(params, x, _):
    def both(params, x):
        return x + checkpoint(lambda x: jnp.tanh(x @ params["up"]))(x) @ params["down"]

    return checkpoint(both)(params, x)


def normed(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale + shift


def normed_product(params, x, _):
    return x + normed(x, params["scale"], params["shift"]) @ params["kernel"] + params["bias"]


def twice(params, x, _):
    return jnp.tanh(x @ params["kernel"]) @ params["kernel"]


def as_kernel_and_scale(params, x, _):
    return (x * params["kernel"][0]) @ params["kernel"]


def low_rank(params, x, _):
    return x @ (params["a"] @ params["b"])


def low_rank_squashed(params, x, _):
    return x @ jnp.tanh(params["a"] @ params["b"])


@jax.custom_vjp
def own_product(x, kernel):
    return x @ kernel


own_product.defvjp(
    lambda x, kernel: (x @ kernel, (x, kernel)), lambda kept, dy: (dy @ kept[1].T, jnp.einsum("ti,to->io", kept[0], dy))
)


def own_rule(params, x, _):
    return jnp.tanh(own_product(x, params["kernel"]))


def turns(params, x, _, fn: Callable = lambda f: f):
    """A loop over layers, each with parameters of its own."""

    def turn(x, of_turn):
        return x + jnp.tanh(x @ of_turn["kernel"] + of_turn["bias"]), None

    return lax.scan(fn(turn), x, params)[0]


def turns_of_one(params, x, _):
    """A loop whose turns share a kernel: its gradient is summed in the carry of the loop."""
    return lax.scan(lambda x, _: (jnp.tanh(x @ params["kernel"]), None), x, length=TURNS)[0]


def turns_that_count(params, x, _):
    return lax.fori_loop(0, TURNS, lambda i, x: jnp.tanh(x @ params["kernel"]) * (1.0 + i), x)


def turns_with_outputs(params, x, _):
    """A loop of which every turn gives something to what comes after it."""
    _, each = lax.scan(lambda x, k: (jnp.tanh(x @ k), x), x, params["kernel"])
    return each.sum(0)


def turns_of_two(params, x, _):
    """A loop with two carries that feed each other, of which only one is an output."""

    def turn(carries, kernel):
        x, y = carries
        return (x + jnp.tanh(y), jnp.tanh(x * (y @ kernel))), None

    return lax.scan(turn, (x, jnp.ones(X)), params["kernel"])[0][0]


def turns_of_turns(params, x, _):
    return lax.scan(lambda x, _: (turns(params, x, None), None), x, length=2)[0]


def branch(params, x, given):
    return lax.cond(given[0] == 1, lambda x: x @ params["kernel"], lambda x: 2.0 * x, x)


def scale_found_by_a_loop(x):
    """As many halvings as bring the largest number below a half."""
    return lax.while_loop(lambda s: jnp.abs(x).max() * s > 0.5, lambda s: s / 2, jnp.float32(1))


def scaled_product(params, x, _):
    return (x * scale_found_by_a_loop(lax.stop_gradient(x))) @ params["kernel"]


def by_heads(params, x, _):
    return jnp.einsum("thd,hde->the", x.reshape(TOKENS, 2, -1), params["kernel"]).reshape(X)


def looked_up(params, x, ids):
    return x + params["table"][ids]


def looked_up_product(params, x, ids):
    return x + params["table"][ids] @ params["kernel"]


def convolution(params, x, _):
    return lax.conv_general_dilated(x[None], params["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0]


def dropped(params, x, random):
    """The mask is drawn again for the backward."""
    y = jnp.tanh(x @ params["up"])
    return x + drop(y[None], random, rate=0.5, site=0, positions=jnp.arange)[0] @ params["down"]


def dropped_by_jax(params, x, random):
    kept = jax.random.bernoulli(jax.random.wrap_key_data(random.words), 0.5, WIDE)
    return x + jnp.where(kept, jnp.tanh(x @ params["up"]), 0.0) @ params["down"]


def dropped_on_both_ways(params, x, random):
    """Two masks from two keys, of which the second's numbers go into a product that the input does not go through."""
    first, second = jax.random.split(jax.random.wrap_key_data(random.words))
    y = jnp.where(jax.random.bernoulli(first, 0.5, X), jnp.tanh(x @ params["kernel"]), 0.0)
    return x + y + jnp.where(jax.random.bernoulli(second, 0.5, X), params["bias"], 0.0) @ params["kernel"]


def dropped_by_a_key_of_the_input(params, x, random):
    key = jax.random.wrap_key_data(random.words)
    for token in x[:2]:
        key = jax.random.fold_in(key, jnp.argmax(token))
    return x + jnp.where(jax.random.bernoulli(key, 0.5, X), params["bias"], 0.0) @ params["kernel"]


def masked(params, x, mask):
    return jnp.where(mask[:, None] == 1, jnp.tanh(x @ params["kernel"]), x)


def summed_in_float32(params, x, _):
    y = lax.dot(x, params["kernel"], preferred_element_type=jnp.float32)
    return x + jnp.tanh(y).astype(jnp.bfloat16)


def input_without_gradient(params, x, _):
    return lax.stop_gradient(x) @ params["kernel"]


checkpoint = partial(jax.checkpoint, prevent_cse=False)
saves_products = partial(checkpoint, policy=jax.checkpoint_policies.dots_saveable)
AGAIN = Layer(checkpoint(feed_forward), UP_DOWN, 3, 2, deferred=[X, WIDE, WIDE], shared=[X])

LAYERS = {
    "one product": Layer(product, KERNEL, 1, 1, deferred=[X], shared=[X]),
    "two products": Layer(feed_forward, UP_DOWN, 2, 2, deferred=[X, WIDE], shared=[X, WIDE]),
    "norm and bias": Layer(
        normed_product,
        KERNEL | dict.fromkeys(("scale", "shift", "bias"), normal(HIDDEN)),
        *(1, 1),
        deferred=[X],
        shared=[X],
        early=("scale", "shift", "bias"),
    ),
    "norm alone": Layer(
        lambda params, x, _: normed(x, **params),
        {"scale": normal(HIDDEN), "shift": normal(HIDDEN)},
        *(0, 0),
        deferred=[],
        shared=[],
        early=("scale", "shift"),
    ),
    "a kernel used twice": Layer(twice, KERNEL, 2, 2, deferred=[X, X], shared=[X, X]),
    "a kernel that is a scale too": Layer(as_kernel_and_scale, KERNEL, 1, 1, deferred=[X, (HIDDEN,)], shared=[X]),
    "a parameter that is not used": Layer(
        product, KERNEL | {"other": normal(WIDTH)}, 1, 1, deferred=[X], shared=[X], early=("other",)
    ),
    "a parameter as large as the input": Layer(
        lambda params, x, _: jnp.tanh(x * params["gate"]),
        {"gate": normal(*X)},
        *(0, 0),
        deferred=[],
        shared=[],
        early=("gate",),
    ),
    "a product of parameters": Layer(
        low_rank, {"a": normal(HIDDEN, 2), "b": normal(2, HIDDEN)}, 1, 3, deferred=[X], shared=[X]
    ),
    # Recomputed for the input's gradient, and read again for the parameters': W is given it, though it has a and b.
    "a product of parameters in a checkpoint": Layer(
        checkpoint(low_rank_squashed),
        {"a": normal(HIDDEN, 2), "b": normal(2, HIDDEN)},
        2,
        3,
        deferred=[X, (HIDDEN,) * 2],
    ),
    "checkpoint": AGAIN,
    "checkpoint behind a barrier": AGAIN._replace(function=jax.checkpoint(feed_forward)),
    # The outer one computes again what goes into `down`, which its gradient alone needs, the inner one for the input's:
    # I does both.
    "checkpoint in a checkpoint": Layer(checkpoint_in_a_checkpoint, UP_DOWN, 4, 2),
    # W computes the activation again from the product that is saved.
    "checkpoint that saves products": AGAIN._replace(
        function=saves_products(feed_forward), now=2, deferred=[X, WIDE], shared=[X, WIDE]
    ),
    "jit in jit": Layer(jax.jit(jax.jit(feed_forward)), UP_DOWN, 2, 2, deferred=[X, WIDE], shared=[X, WIDE]),
    "custom_vjp": Layer(own_rule, KERNEL, 1, 1, deferred=[X], shared=[X]),
    "custom_vjp in a checkpoint": Layer(checkpoint(own_rule), KERNEL, 2, 1, deferred=[X], shared=[X]),
    "custom_jvp": Layer(
        partial(feed_forward, activation=jax.nn.silu), UP_DOWN, 2, 2, deferred=[X, WIDE], shared=[X, WIDE]
    ),
    "custom_jvp in a checkpoint": AGAIN._replace(function=checkpoint(partial(feed_forward, activation=jax.nn.silu))),
    "gelu": Layer(partial(feed_forward, activation=jax.nn.gelu), UP_DOWN, 2, 2, deferred=[X, WIDE], shared=[X, WIDE]),
    "a loop": Layer(turns, STACK, 3, 3, deferred=[(TURNS, *X)], shared=[(TURNS, *X)], early=("bias",)),
    "a loop with a kernel for all": Layer(turns_of_one, KERNEL, 3, 3, deferred=[(TURNS, *X)], shared=[(TURNS, *X)]),
    "a loop that counts": Layer(turns_that_count, KERNEL, 3, 3, deferred=[(TURNS, *X)], shared=[(TURNS, *X)]),
    "a loop with outputs": Layer(
        turns_with_outputs, {"kernel": STACK["kernel"]}, 3, 3, deferred=[(TURNS, *X)], shared=[(TURNS, *X)]
    ),
    "a loop of two": Layer(
        turns_of_two, {"kernel": STACK["kernel"]}, 3, 3, deferred=[(TURNS, *X)], shared=[(TURNS, *X)]
    ),
    "a loop in a checkpoint": Layer(
        checkpoint(turns), STACK, 6, 3, deferred=[(TURNS, *X)] * 2, shared=[], early=("bias",)
    ),
    "checkpoints in a loop": Layer(
        partial(turns, fn=checkpoint), STACK, 6, 3, deferred=[(TURNS, *X)], shared=[(TURNS, *X)], early=("bias",)
    ),
    "a loop in a loop": Layer(
        turns_of_turns, STACK, 6, 6, deferred=[(2, TURNS, *X)], shared=[(2, TURNS, *X)], early=("bias",)
    ),
    "a branch": Layer(branch, KERNEL, 2, 0, deferred=[], shared=[], early=("kernel",), given=MASK),
    # The loop makes a number; W multiplies the input by it again.
    "a while loop in a checkpoint": Layer(checkpoint(scaled_product), KERNEL, 1, 1, deferred=[(), X], shared=[X]),
    "batched products": Layer(
        by_heads, {"kernel": normal(2, HIDDEN // 2, HIDDEN // 2)}, 1, 1, deferred=[X], shared=[(TURNS * 2, 2, 2)]
    ),
    "a table": Layer(
        looked_up, {"table": normal(5, HIDDEN)}, 0, 0, deferred=[], shared=[], early=("table",), given=IDS
    ),
    "a product of a table": Layer(
        looked_up_product, KERNEL | {"table": normal(5, HIDDEN)}, 0, 2, deferred=[X], given=IDS
    ),
    "a convolution": Layer(convolution, {"kernel": normal(3, HIDDEN, HIDDEN)}, 1, 1, deferred=[X], shared=[(1, *X)]),
    "dropout": Layer(dropped, UP_DOWN, 2, 2, deferred=[X, WIDE], given=RANDOM),
    "dropout in a checkpoint": AGAIN._replace(
        function=checkpoint(dropped), deferred=[X, WIDE, (1, *WIDE)], given=RANDOM
    ),
    "dropout by jax": Layer(dropped_by_jax, UP_DOWN, 2, 2, deferred=[X, WIDE], shared=[X, WIDE], given=RANDOM),
    "dropout by jax in a checkpoint": AGAIN._replace(function=checkpoint(dropped_by_jax), given=RANDOM),
    # W draws the second mask, and makes the key for it again: a key is nothing that a page can hold.
    "dropout by jax that W alone needs, in a checkpoint": Layer(
        checkpoint(dropped_on_both_ways),
        KERNEL | {"bias": normal(HIDDEN)},
        2,
        3,
        deferred=[X, X],
        shared=[X],
        given=RANDOM,
    ),
    "dropout by a key of the input": Layer(
        checkpoint(dropped_by_a_key_of_the_input),
        KERNEL | {"bias": normal(HIDDEN)},
        *(0, 2),
        deferred=[X, (), ()],
        shared=[],
        given=RANDOM,
    ),
    "a mask": Layer(masked, KERNEL, 1, 1, deferred=[X], shared=[X], given=MASK),
    "bfloat16, summed in float32": Layer(summed_in_float32, KERNEL, 1, 1, deferred=[X], shared=[X], dtype="bfloat16"),
    "an input without gradient": Layer(input_without_gradient, KERNEL, 0, 1, deferred=[X], shared=[X]),
    "an input that is not used": Layer(
        lambda params, x, _: params["bias"] * jnp.ones(X), {"bias": normal(HIDDEN)}, 0, 0, deferred=[], early=("bias",)
    ),
}
