"""A feed forward of experts: a router sends each token to a few of many feed forwards.

Backward saves the stream, the rows before the activation, the routing as integers, and the weights. The choice of
the router is saved, since choosing again may choose otherwise.
Source: Shazeer et al., Outrageously Large Neural Networks, ICLR 2017; Jiang et al., Mixtral of Experts, 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.mesh import TensorAxis
from jaxpipe.mesh.collectives import gather_over, only_on_the_first
from jaxpipe.models.anatomy import LOAD_BIAS, Anatomy
from jaxpipe.models.dispatch import Dispatch, Tiles, collect, spread, spread_weights
from jaxpipe.models.linear import Linear, RMSNorm, from_stream, initial_deviation, to_stream
from jaxpipe.models.routing import Routing

CHOSEN = "chosen"  # the name of what even a layer that is computed again in backward saves


class Kernels(nnx.Module):
    """A kernel of every expert, "expert in out", split over `expert`; `split` is the dim split over `tensor`.

    With biases, "expert out", of which that of a kernel split along `in` is added on the first device of `tensor`.
    """

    def __init__(
        self,
        num: int,
        num_inputs: int,
        num_outputs: int,
        *,
        split: int,
        deviation: float,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        kernel = deviation * jax.random.normal(rngs.params(), (num, num_inputs, num_outputs))
        self.kernel = nnx.Param(kernel, split=split, split_experts=0)
        if bias:
            self.bias = nnx.Param(jnp.zeros((num, num_outputs)), split=1 if split == 2 else None, split_experts=0)

    def arrays(self) -> dict[str, jax.Array]:
        """The kernels, and the biases if there are any."""
        return {name: getattr(self, name)[...] for name in ("kernel", "bias") if hasattr(self, name)}


class Experts(nnx.Module):
    """Norm, router, and the chosen experts' SwiGLU.

    Args:
        activation: function of the products with the kernels of `names`, "... columns" each.
        names: the kernels before the activation, by name with their columns, in terms of the width.
        bias: whether router and experts have biases.
        shared_width: width of a gated feed forward that all tokens go through beside their experts; 0: there is none,
            but its parameters, without numbers, as files of transformers have them; None: there are none either.

    Over `tensor`, each device has a part of every expert's width, as of a dense feed forward's; the router reads the
    device's own part of the sequence. Over `expert`, each device has some of the experts.
    """

    def __init__(
        self,
        norm: RMSNorm,
        anatomy: Anatomy,
        *,
        routing: Routing,
        activation: Callable,
        num_layers: int,
        output_deviation: float,
        names: tuple[tuple[str, int], ...] = (("gate", 1), ("up", 1)),
        bias: bool = False,
        shared_width: int | None = None,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        num = routing.num_experts
        hidden = anatomy.hidden
        width = anatomy.width
        deviation = initial_deviation(hidden)
        self.norm = norm
        self.router = Linear(hidden, num, split=None, bias=bias, deviation=deviation, rngs=rngs)
        more = {"bias": bias, "rngs": rngs}
        for name, columns in names:
            setattr(self, name, Kernels(num, hidden, columns * width, split=2, deviation=deviation, **more))
        self.down = Kernels(num, width, hidden, split=1, deviation=output_deviation, **more)
        self.names = tuple(name for name, _ in names)
        if routing.has_bias:
            setattr(self, LOAD_BIAS, nnx.Param(jnp.zeros(num)))
        self.shared_width = shared_width
        if shared_width is not None:
            of_shared = {"bias": False, "rngs": rngs}
            self.shared_gate = Linear(hidden, shared_width, split=1, deviation=deviation, **of_shared)
            self.shared_up = Linear(hidden, shared_width, split=1, deviation=deviation, **of_shared)
            self.shared_down = Linear(shared_width, hidden, split=0, deviation=output_deviation, **of_shared)
        self.routing = routing
        self.activation = activation
        self.num_layers = num_layers
        self.tensor = tensor

    def __call__(
        self, x: jax.Array, token_arrays: dict[str, jax.Array] | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The experts' addition to the stream `x` "batch local_seq hidden", and sums of losses and measures.

        Where "is_token" of `token_arrays` is 0, for padding, the stream goes to no expert, and counts in no sum.
        """
        routing = self.routing
        tensor = self.tensor
        arrays = (x, self.norm.arrays(), self.router.arrays())
        bias = getattr(self, LOAD_BIAS)[...] if routing.has_bias else None
        # Choosing has no gradient. The logits that have one are computed again in `_to_experts`, so that backward
        # saves `x` alone.
        x_apart, norm_apart, router_apart = lax.stop_gradient(arrays)
        logits = _logits(self.norm.apply(x_apart, norm_apart), router_apart)
        chosen = routing.choose(logits, lax.stop_gradient(bias))
        if token_arrays and "is_token" in token_arrays:
            is_token = tensor.own(token_arrays["is_token"])
            chosen = jnp.where(is_token[..., None] != 0, chosen, routing.num_experts)
        # The name makes a recomputed layer save the choice: rounded otherwise, a second choice could be another.
        chosen = checkpoint_name(chosen, CHOSEN)
        count = jnp.bincount(chosen.reshape(-1), length=routing.num_experts).astype(jnp.float32)
        of_all = tensor.sum_over_batch(count)
        # At least 1, for a microbatch of padding alone.
        share = of_all * routing.num_chosen / jnp.maximum(of_all.sum(), 1)
        dispatch = routing.dispatch(tensor.expert)
        tiles = dispatch.tiles(chosen if tensor.size == 1 else gather_over(chosen, ("tensor",), 1))
        kernels = tuple(getattr(self, name).arrays() for name in self.names)
        static = self.norm.apply, routing, tensor, self.num_layers
        inputs, weights, losses = _to_experts(*static, *arrays, bias, kernels, chosen, share, tiles)
        losses |= lax.stop_gradient(routing.measured_sums(logits, chosen, share, tiles, tensor, self.num_layers))
        weights = dispatch.whole(tensor.gather(weights, 1))
        down = self.down.arrays()
        if "bias" in down and tensor.size > 1:
            down["bias"] = only_on_the_first(down["bias"], "tensor")
        y = _from_experts(self.activation, dispatch, inputs, weights, down, tiles)
        y = tensor.scatter_sum(dispatch.own(y, x.shape[1] * tensor.size), 1)
        if self.shared_width:
            inputs = from_stream(x, self.norm, (self.shared_gate, self.shared_up), tensor)
            y = y + to_stream(self.activation, inputs, self.shared_down, tensor)
        return y, losses


def _logits(normed: jax.Array, router: dict[str, jax.Array]) -> jax.Array:
    """The router's, float32 "batch local_seq expert"."""
    logits = jnp.einsum("bsh,he->bse", normed, router["kernel"], preferred_element_type=jnp.float32)
    return logits + router["bias"].astype(jnp.float32) if "bias" in router else logits


def _plus(products: jax.Array, of: dict[str, jax.Array], tiles: Tiles) -> jax.Array:
    return products + _of_rows(of["bias"], tiles) if "bias" in of else products


def _of_rows(bias: jax.Array, tiles: Tiles) -> jax.Array:
    """The bias of each tile's expert, "tile 1 out", of those of this device's experts."""
    if tiles.expert is None:  # a tile for each, in order
        return bias[:, None]
    # As a product, whose transpose adds in one order; a tile of no expert has zeros.
    return (jax.nn.one_hot(tiles.expert, bias.shape[0], dtype=bias.dtype) @ bias)[:, None]


# prevent_cse=False: a layer's forward and backward are never in one loop body, so nothing can be merged.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 1, 2, 3))
def _to_experts(
    norm: Callable,
    routing: Routing,
    tensor: TensorAxis,
    num_layers: int,
    x: jax.Array,
    norm_arrays: Any,
    router: dict[str, jax.Array],
    bias: jax.Array | None,
    kernels: tuple[dict[str, jax.Array], ...],
    chosen: jax.Array,
    share: jax.Array,
    tiles: Tiles,
) -> tuple[tuple[jax.Array, ...], jax.Array, dict[str, jax.Array]]:
    """Products with the experts' `kernels`, weights of the `chosen`, and the router's losses; backward saves `x`.

    Returns:
        "tile row local_width" for each of `kernels`; "batch local_seq k"; sums over the tokens of all of `tensor`.
    """
    normed = norm(x, norm_arrays)
    dispatch = routing.dispatch(tensor.expert)
    # Over `tensor` rows need whole tokens, since each device has a part of every expert's width.
    rows = dispatch.to_experts(spread(dispatch.whole(tensor.gather(normed, 1)), tiles))
    logits = _logits(normed, router)
    # The value is the sum of all devices, the gradient that of this device's tokens alone.
    local_sums = routing.loss_sums(logits, chosen, share, bias, num_layers)
    losses = {name: loss + lax.stop_gradient(tensor.sum(loss) - loss) for name, loss in local_sums.items()}
    inputs = tuple(_plus(dispatch.products(rows, of["kernel"], tiles), of, tiles) for of in kernels)
    return inputs, routing.weights(logits, chosen), losses


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 1))
def _from_experts(
    activation: Callable,
    dispatch: Dispatch,
    inputs: tuple[jax.Array, ...],
    weights: jax.Array,
    down: dict[str, jax.Array],
    tiles: Tiles,
) -> jax.Array:
    """Weighted sums "token hidden" of each token's experts on this device, of its part of their width."""
    of_rows = dispatch.to_experts(spread_weights(weights, tiles))
    active = activation(*inputs)
    # In float32, because the gradient of a weight is a sum over the width.
    active = (active.astype(jnp.float32) * of_rows[..., None]).astype(active.dtype)
    rows = dispatch.products(active, down["kernel"], tiles)
    if "bias" in down:
        addition = of_rows[..., None] * _of_rows(down["bias"], tiles).astype(jnp.float32)
        rows = (rows.astype(jnp.float32) + addition).astype(rows.dtype)
    return collect(dispatch.to_tokens(rows), tiles)
