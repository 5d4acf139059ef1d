"""A feed forward of experts: a router sends each token to a few of many feed forwards.

Backward saves the stream, the rows before the activation, the routing as integers, and the weights. The choice of
the router is saved, since choosing again may choose otherwise.
Source: Shazeer et al., Outrageously Large Neural Networks, ICLR 2017; Jiang et al., Mixtral of Experts, 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.mesh import MEASURED, TensorAxis
from jaxpipe.mesh.collectives import Axis, gather_over, only_on_the_first
from jaxpipe.models.anatomy import LOAD_BIAS, Anatomy
from jaxpipe.models.dispatch import Dispatch, Tiles, collect, dispatch_of, spread, spread_weights
from jaxpipe.models.linear import Linear, RMSNorm, initial_deviation

CHOSEN = "chosen"  # the name of what even a layer that is computed again in backward saves


@dataclass(frozen=True)
class Routing:
    """How a router chooses.

    Source: Fedus et al., Switch Transformers, JMLR 2022, equations 4 to 6; Zoph et al., ST-MoE, 2022, equation 5; Wang
    et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024 (arXiv 2408.15664), algorithm 1.
    """

    num_experts: int
    num_chosen: int  # experts of a token; of equal ones the lower number
    normalized: bool  # whether the weights of a token's experts are divided by their sum
    # Factor of num_experts x sum over experts of (choices of the expert per token) x (mean of its probability), over a
    # microbatch on all devices: num_chosen where all are used alike. Mean over layers.
    balance_loss: float
    z_loss: float  # factor of the mean square of log(sum of exp(logits)). Mean over layers.
    capacity_factor: float | None = None  # see `jaxpipe.models.dispatch.Capacity`; None: no choice is dropped
    # Whether a bias of each expert is added to its probability where experts are chosen, and nowhere else. Its gradient
    # is the load above the mean, where 1 is the mean, so that a step in the direction of its sign balances the loads
    # without a loss.
    has_bias: bool = False

    def dispatch(self, expert: Axis) -> Dispatch:
        """How tokens come to the experts, which are split over the devices of `expert`."""
        return dispatch_of(self.num_experts, self.num_chosen, self.capacity_factor, expert)

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the losses of a layer."""
        return tuple(name for name, factor in self._factors.items() if factor)

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of what a layer measures."""
        names = ("expert_load", "fullest_expert", "emptiest_expert", "router_entropy")
        dropped = () if self.capacity_factor is None else ("dropped_choices",)
        bias = (LOAD_BIAS,) if self.has_bias else ()
        return tuple(MEASURED + name for name in (*names, *dropped, *bias))

    @property
    def _factors(self) -> dict[str, float]:
        return {"balance": self.balance_loss, "router_z": self.z_loss}

    def choose(self, logits: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Int32 "... k" experts of each token, of `logits` "... expert"."""
        # The bias is a difference of probabilities. Without one the logits have the same order and need no softmax.
        scores = logits if bias is None else jax.nn.softmax(logits) + bias
        return lax.top_k(scores, self.num_chosen)[1]

    def is_token(self, chosen: jax.Array) -> jax.Array:
        """Whether a token, "...", is no padding: padding has chosen `num_experts`, which is no expert, k times."""
        return chosen[..., 0] < self.num_experts

    def weights(self, logits: jax.Array, chosen: jax.Array) -> jax.Array:
        """Float32 "... k" weights of the chosen experts; those of padding, which no row has, depend on no logits."""
        # Padding's index is one beyond the last expert, where `take_along_axis` would return NaN.
        of_chosen = jnp.take_along_axis(jax.nn.softmax(logits), jnp.minimum(chosen, self.num_experts - 1), axis=-1)
        # A constant for padding, so that no gradient reaches its logits.
        of_chosen = jnp.where(self.is_token(chosen)[..., None], of_chosen, 1.0)
        return of_chosen / of_chosen.sum(axis=-1, keepdims=True) if self.normalized else of_chosen

    def loss_sums(
        self, logits: jax.Array, chosen: jax.Array, share: jax.Array, bias: jax.Array | None, num_layers: int
    ) -> dict[str, jax.Array]:
        """Sums over the tokens of `logits` "batch seq expert"; `share` "expert" are the choices of each per token.

        The last entry, sum of bias * (load - 1), is only reported; its gradient is what moves the bias.
        """
        is_token = self.is_token(chosen)
        chances = jnp.where(is_token[..., None], jax.nn.softmax(logits), 0)
        sums_of_tokens = {
            # `share` counts integers and has no gradient: only the probabilities move (Fedus et al., equation 4).
            "balance": self.num_experts * (chances.sum(axis=(0, 1)) @ share),
            "router_z": jnp.square(jnp.where(is_token, jax.nn.logsumexp(logits, axis=-1), 0)).sum(),
        }
        sums = {name: self._factors[name] / num_layers * sums_of_tokens[name] for name in self.losses}
        if bias is None:
            return sums
        # Times the tokens, since a run divides every sum by them.
        return sums | {MEASURED + LOAD_BIAS: is_token.sum() * (bias @ (self.load(share) - 1.0))}

    def load(self, share: jax.Array) -> jax.Array:
        """The choices of each expert in terms of the mean; `share` "expert" are those per token."""
        return share * self.num_experts / self.num_chosen

    def measured_sums(
        self,
        logits: jax.Array,
        chosen: jax.Array,
        share: jax.Array,
        tiles: Tiles,
        tensor: TensorAxis,
        num_layers: int,
    ) -> dict[str, jax.Array]:
        """Sums over the tokens of all of `tensor`; a run reports their means over layers and tokens.

        The sums are the load of every expert of this layer, "expert", where 1 is the mean; the load of the fullest and
        of the emptiest in a microbatch; the entropy of a token's probabilities in nats, and the fraction of choices
        that are dropped.
        """
        is_token = self.is_token(chosen)
        load = self.load(share)
        # The logarithm of the softmax and not of its result: a probability may round to 0, whose logarithm is -inf.
        chances = jax.nn.log_softmax(logits)
        entropy = -jnp.where(is_token[..., None], jnp.exp(chances) * chances, 0).sum()
        # Stacked, since one collective of two numbers takes as long as one of one.
        entropy, num_tokens = tensor.sum(jnp.stack([entropy, is_token.sum(dtype=jnp.float32)]))
        num_padding = is_token.size * tensor.size - num_tokens
        measures = {
            "fullest_expert": num_tokens * load.max(),
            "emptiest_expert": num_tokens * load.min(),
            "router_entropy": entropy,
            "dropped_choices": jnp.sum(tiles.row == tiles.choice.size) / self.num_chosen - num_padding,
            # Padding's choices have no row either, and are no dropped ones.
        }
        # The load stays of each layer; all others are means over layers.
        measures = {"expert_load": num_tokens * load, **{name: value / num_layers for name, value in measures.items()}}
        return {name: measures[name.removeprefix(MEASURED)] for name in self.measures if name != MEASURED + LOAD_BIAS}


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
            is_token = tensor.part(tensor.context.own(token_arrays["is_token"], 1), 1)
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
        return tensor.scatter_sum(dispatch.own(y, x.shape[1] * tensor.size), 1), losses


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
