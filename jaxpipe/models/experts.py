"""A feed forward of experts: a router sends each token to a few of many feed forwards, and no token is dropped.

Tokens are sorted by expert, and each expert's rows are filled up to whole tiles. So there is a static number of tiles,
whatever the router chooses, and each is a product with the kernel of one expert. `jax.lax.ragged_dot` is not used:
XLA multiplies every row with every expert (jax 0.10.2).

Backward saves the stream, the rows before the activation, the routing as integers, and the weights. What the router
has chosen is saved, since choosing again may choose otherwise.
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

from jaxpipe.mesh import TensorAxis
from jaxpipe.mesh.collectives import gather_over
from jaxpipe.models.linear import Linear, RMSNorm

MIN_TILE, MAX_TILE = 8, 512  # rows
CHOSEN = "chosen"  # the name of what even a layer that is computed again in backward saves
PADDING = 0.1  # rows that are filled up, as a fraction of those with tokens


# ---- Tiles


def tile_size(num_rows: int, num_experts: int) -> int:
    """Rows of a tile: a power of two of which the experts' last tiles waste a tenth of `num_rows` at most.

    Example:
        >>> tile_size(16384, num_experts=8), tile_size(64, num_experts=8)
        (128, 8)
    """
    largest = min(max(int(PADDING * num_rows) // num_experts, MIN_TILE), MAX_TILE)
    return 1 << (largest.bit_length() - 1)


def num_tiles(num_rows: int, num_experts: int) -> int:
    """Tiles that hold the rows of all experts, however many each has."""
    size = tile_size(num_rows, num_experts)
    return (num_rows + num_experts * (size - 1)) // size


@partial(jax.tree_util.register_dataclass, data_fields=["choice", "row", "expert"], meta_fields=[])
@dataclass(frozen=True)
class Tiles:
    """Where the tokens' rows are, int32. A choice is one of the experts of one token.

    Attributes:
        choice: "tile row" the choice whose row it is; the number of choices where it is filled up.
        row: "token k" the row of each choice, counted through all tiles.
        expert: "tile" whose rows a tile has.
    """

    choice: jax.Array
    row: jax.Array
    expert: jax.Array


def tiles_of(chosen: jax.Array, num_experts: int) -> Tiles:
    """The tiles of tokens.

    Args:
        chosen: int32 "token k", the experts of each token.
        num_experts: experts of the layer.

    Example:
        Three tokens of one expert each, of two; tiles of eight rows.

        >>> tiles = tiles_of(jnp.array([[1], [0], [1]]), 2)
        >>> tiles.expert.tolist(), tiles.row[:, 0].tolist(), tiles.choice[1, :3].tolist()
        ([0, 1], [8, 0, 9], [0, 2, 3])
    """
    flat = chosen.reshape(-1)
    size, number = tile_size(flat.size, num_experts), num_tiles(flat.size, num_experts)
    order = jnp.argsort(flat, stable=True)
    count = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    tiles = -(-count // size)
    last_tile = jnp.cumsum(tiles)
    # The first row of an expert in its tiles, less that among the sorted choices.
    shift = (last_tile - tiles) * size - (jnp.cumsum(count) - count)
    row = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=jnp.int32) + shift[flat[order]])
    choice = jnp.full(number * size, flat.size, jnp.int32).at[row].set(jnp.arange(flat.size, dtype=jnp.int32))
    expert = jnp.searchsorted(last_tile, jnp.arange(number), side="right").astype(jnp.int32)
    return Tiles(choice.reshape(number, size), row.reshape(chosen.shape), jnp.minimum(expert, num_experts - 1))


@jax.custom_vjp
def spread(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Rows "tile row hidden" of tokens `x` "token hidden"; zeros where tiles are filled up."""
    return jnp.take(x, tiles.choice // tiles.row.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows: jax.Array, tiles: Tiles) -> jax.Array:
    """The sum "token hidden" of the rows of each token's experts; the transpose of `spread`."""
    found = rows.reshape(-1, rows.shape[-1])[tiles.row]
    return found.sum(axis=1, dtype=jnp.float32).astype(rows.dtype)


@jax.custom_vjp
def spread_weights(weights: jax.Array, tiles: Tiles) -> jax.Array:
    """The weight "tile row" of each row, of `weights` "token k"."""
    return jnp.take(weights.reshape(-1), tiles.choice, mode="fill", fill_value=0)


# As gathers: what JAX makes of their transposes would scatter, and add in no order on a GPU.
spread.defvjp(lambda x, tiles: (spread(x, tiles), tiles), lambda tiles, d: (collect(d, tiles), None))
collect.defvjp(lambda rows, tiles: (collect(rows, tiles), tiles), lambda tiles, d: (spread(d, tiles), None))
spread_weights.defvjp(
    lambda weights, tiles: (spread_weights(weights, tiles), tiles),
    lambda tiles, d: (d.reshape(-1)[tiles.row], None),
)


@jax.custom_vjp
def grouped(rows: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    """Products "tile row out" of tiles with their experts' kernels.

    Args:
        rows: "tile row in".
        kernels: "expert in out".
        expert: int32 "tile".
    """

    def tile(_: None, turn: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        rows, expert = turn
        return None, rows @ lax.dynamic_index_in_dim(kernels, expert, 0, keepdims=False)

    return lax.scan(tile, None, (rows, expert))[1]


def _grouped_backward(saved: tuple[jax.Array, jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, expert = saved

    def tile(_: None, turn: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        d, expert = turn
        return None, d @ lax.dynamic_index_in_dim(kernels, expert, 0, keepdims=False).T

    def add(sums: jax.Array, turn: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows, d, expert = turn
        term = jnp.einsum("ri,ro->io", rows, d, preferred_element_type=jnp.float32)
        total = lax.dynamic_index_in_dim(sums, expert, 0) + term[None]
        return lax.dynamic_update_index_in_dim(sums, total, expert, 0), None

    # Two scans, since a split backward does the second later.
    _, d_rows = lax.scan(tile, None, (d, expert))
    d_kernels, _ = lax.scan(add, jnp.zeros(kernels.shape, jnp.float32), (rows, d, expert))
    return d_rows, d_kernels.astype(kernels.dtype), None


grouped.defvjp(
    lambda rows, kernels, expert: (grouped(rows, kernels, expert), (rows, kernels, expert)), _grouped_backward
)


# ---- The layer's part


@dataclass(frozen=True)
class Routing:
    """How a router chooses.

    Attributes:
        num_experts: experts of a layer.
        num_chosen: experts of a token; of equal ones the lower number.
        normalized: whether the weights of a token's experts are divided by their sum.
        balance_loss: factor of num_experts x sum over experts of (choices of the expert per token) x (mean of its
            probability), over a microbatch on all devices: num_chosen where all are used alike. Mean over layers.
        z_loss: factor of the mean square of log(sum of exp(logits)). Mean over layers.

    Source: Fedus et al., Switch Transformers, JMLR 2022, equations 4 to 6; Zoph et al., ST-MoE, 2022, equation 5.
    """

    num_experts: int
    num_chosen: int
    normalized: bool
    balance_loss: float
    z_loss: float

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the losses of a layer."""
        return tuple(name for name, factor in self._factors.items() if factor)

    @property
    def _factors(self) -> dict[str, float]:
        return {"balance": self.balance_loss, "router_z": self.z_loss}

    def weights(self, logits: jax.Array, chosen: jax.Array) -> jax.Array:
        """Float32 "... k" weights of the chosen experts."""
        of_chosen = jnp.take_along_axis(jax.nn.softmax(logits), chosen, axis=-1)
        return of_chosen / of_chosen.sum(axis=-1, keepdims=True) if self.normalized else of_chosen

    def loss_sums(self, logits: jax.Array, share: jax.Array, num_layers: int) -> dict[str, jax.Array]:
        """Sums over the tokens of `logits` "batch seq expert"; `share` "expert" are the choices of each per token."""
        found = {
            "balance": self.num_experts * (jax.nn.softmax(logits).sum(axis=(0, 1)) @ share),
            "router_z": jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum(),
        }
        return {name: self._factors[name] / num_layers * found[name] for name in self.losses}


class Kernels(nnx.Module):
    """A kernel of every expert, "expert in out"; `split` is the dim split over `tensor`."""

    def __init__(self, num: int, num_inputs: int, num_outputs: int, *, split: int, deviation: float, rngs: nnx.Rngs):
        kernel = deviation * jax.random.normal(rngs.params(), (num, num_inputs, num_outputs))
        self.kernel = nnx.Param(kernel, split=split)


class Experts(nnx.Module):
    """Norm, router, and the chosen experts' SwiGLU.

    Over `tensor`, each device has a part of every expert's width, as of a dense feed forward's; the router reads the
    device's own part of the sequence.

    Args:
        norm: norm of the stream.
        width: size between the matmuls of an expert.
        routing: see `Routing`.
        activation: function of gate and up.
        num_layers: layers of the model.
    """

    def __init__(
        self,
        norm: RMSNorm,
        *,
        hidden: int,
        width: int,
        routing: Routing,
        activation: Callable,
        num_layers: int,
        deviation: float,
        output_deviation: float,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        self.norm = norm
        self.router = Linear(hidden, routing.num_experts, split=None, bias=False, deviation=deviation, rngs=rngs)
        num = routing.num_experts
        self.gate = Kernels(num, hidden, width, split=2, deviation=deviation, rngs=rngs)
        self.up = Kernels(num, hidden, width, split=2, deviation=deviation, rngs=rngs)
        self.down = Kernels(num, width, hidden, split=1, deviation=output_deviation, rngs=rngs)
        self.routing, self.activation, self.num_layers, self.tensor = routing, activation, num_layers, tensor

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The experts' addition to the stream `x` "batch local_seq hidden", and sums of the router's losses."""
        routing, tensor, arrays = self.routing, self.tensor, (x, self.norm.arrays(), self.router.arrays()["kernel"])
        x_apart, norm_apart, router_apart = lax.stop_gradient(arrays)
        logits = _logits(self.norm.apply(x_apart, norm_apart), router_apart)
        chosen = checkpoint_name(lax.top_k(logits, routing.num_chosen)[1], CHOSEN)
        count = jnp.bincount(chosen.reshape(-1), length=routing.num_experts).astype(jnp.float32)
        share = tensor.sum_over_batch(count) * routing.num_chosen / (chosen.size * tensor.num_sharing)
        of_all = chosen if tensor.size == 1 else gather_over(chosen, ("tensor",), 1)
        tiles = tiles_of(of_all.reshape(-1, routing.num_chosen), routing.num_experts)
        kernels = self.gate.kernel[...], self.up.kernel[...]
        static = self.norm.apply, routing, tensor, self.num_layers
        inputs, weights, losses = _to_experts(*static, *arrays, kernels, chosen, share, tiles)
        weights = tensor.gather(weights, 1).reshape(-1, routing.num_chosen)
        y = _from_experts(self.activation, inputs, weights, self.down.kernel[...], tiles)
        return tensor.scatter_sum(y.reshape(x.shape[0], -1, x.shape[-1]), 1), losses


def _logits(normed: jax.Array, kernel: jax.Array) -> jax.Array:
    """The router's, float32 "batch local_seq expert"."""
    return jnp.einsum("bsh,he->bse", normed, kernel, preferred_element_type=jnp.float32)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 1, 2, 3))
def _to_experts(
    norm: Callable,
    routing: Routing,
    tensor: TensorAxis,
    num_layers: int,
    x: jax.Array,
    norm_arrays: Any,
    router: jax.Array,
    kernels: tuple[jax.Array, ...],
    chosen: jax.Array,
    share: jax.Array,
    tiles: Tiles,
) -> tuple[tuple[jax.Array, ...], jax.Array, dict[str, jax.Array]]:
    """Products with the experts' `kernels`, weights of the `chosen`, and the router's losses; backward saves `x`.

    Returns:
        "tile row local_width" for each of `kernels`; "batch local_seq k"; sums over the tokens of all of `tensor`.
    """
    normed = norm(x, norm_arrays)
    whole = tensor.gather(normed, 1)
    rows = spread(whole.reshape(-1, whole.shape[-1]), tiles)
    logits = _logits(normed, router)
    # Every device has the sum of all, and the gradient of its own tokens.
    own = routing.loss_sums(logits, share, num_layers)
    losses = {name: loss + lax.stop_gradient(tensor.sum(loss) - loss) for name, loss in own.items()}
    return tuple(grouped(rows, each, tiles.expert) for each in kernels), routing.weights(logits, chosen), losses


@partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _from_experts(
    activation: Callable, inputs: tuple[jax.Array, ...], weights: jax.Array, kernel: jax.Array, tiles: Tiles
) -> jax.Array:
    """Weighted sums "token hidden" of each token's experts, of this device's part of their width."""
    active = activation(*inputs) * spread_weights(weights, tiles).astype(inputs[0].dtype)[..., None]
    return collect(grouped(active, kernel, tiles.expert), tiles)
