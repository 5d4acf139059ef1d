"""How a router chooses experts for tokens, what weight each has, and what it measures and loses.

Goes in: a router's logits. Comes out: the chosen experts, their weights, losses that balance, and loads. Left to
others: how tokens come to their experts (`dispatch`), and what these compute (`experts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh import MEASURED, TensorAxis
from jaxpipe.mesh.collectives import Axis
from jaxpipe.models.anatomy import LOAD_BIAS
from jaxpipe.models.dispatch import Dispatch, Tiles, dispatch_of

SCORES = ("softmax", "sigmoid")
EXPERT_LOAD = "expert_load"  # the only measure with a number for each expert


@dataclass(frozen=True)
class Routing:
    """How a router chooses.

    Source: Fedus et al., Switch Transformers, JMLR 2022, equations 4 to 6; Zoph et al., ST-MoE, 2022, equation 5; Wang
    et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024 (arXiv 2408.15664), algorithm 1;
    DeepSeek-V2, 2024 (arXiv 2405.04434), section 2.2.2, and DeepSeek-V3, 2024 (arXiv 2412.19437), section 2.1.2, for
    groups and sigmoids.
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
    # The score of each expert, which is its weight: its probability by the softmax, or the sigmoid of its own logit.
    scores: str = "softmax"
    # Experts stand in so many groups of equally many. Of these a token chooses `groups_chosen` first: by the two
    # highest scores together, with the bias, or without one by the highest. Its experts are of those groups.
    num_groups: int = 1
    groups_chosen: int = 1
    scale: float = 1.0  # of all weights

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
        names = (EXPERT_LOAD, "fullest_expert", "emptiest_expert", "router_entropy")
        dropped = () if self.capacity_factor is None else ("dropped_choices",)
        bias = (LOAD_BIAS,) if self.has_bias else ()
        return tuple(MEASURED + name for name in (*names, *dropped, *bias))

    def zeros(self) -> dict[str, jax.Array]:
        """Zeros like all sums of a layer, of one without experts."""
        shapes = {MEASURED + EXPERT_LOAD: (self.num_experts,)}
        return {name: jnp.zeros(shapes.get(name, ()), jnp.float32) for name in (*self.losses, *self.measures)}

    @property
    def _factors(self) -> dict[str, float]:
        return {"balance": self.balance_loss, "router_z": self.z_loss}

    def choose(self, logits: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Int32 "... k" experts of each token, of `logits` "... expert"."""
        # The bias is a difference of scores. Without one the logits have the same order.
        scores = logits if bias is None else self.scored(logits) + bias
        if self.num_groups > 1:
            by_group = scores.reshape(*scores.shape[:-1], self.num_groups, -1)
            of_groups = by_group.max(axis=-1) if bias is None else lax.top_k(by_group, 2)[0].sum(axis=-1)
            groups = lax.top_k(of_groups, self.groups_chosen)[1]
            is_of_them = (groups[..., None] == jnp.arange(self.num_groups)).any(axis=-2)
            scores = jnp.where(is_of_them[..., None], by_group, -jnp.inf).reshape(scores.shape)
        return lax.top_k(scores, self.num_chosen)[1]

    def scored(self, logits: jax.Array) -> jax.Array:
        """The score of each expert."""
        return jax.nn.sigmoid(logits) if self.scores == "sigmoid" else jax.nn.softmax(logits)

    def chances(self, logits: jax.Array) -> jax.Array:
        """The scores as probabilities: of sigmoids their part of the sum."""
        scores = self.scored(logits)
        return scores / scores.sum(axis=-1, keepdims=True) if self.scores == "sigmoid" else scores

    def is_token(self, chosen: jax.Array) -> jax.Array:
        """Whether a token, "...", is no padding: padding has chosen `num_experts`, which is no expert, k times."""
        return chosen[..., 0] < self.num_experts

    def weights(self, logits: jax.Array, chosen: jax.Array) -> jax.Array:
        """Float32 "... k" weights of the chosen experts; those of padding, which no row has, depend on no logits."""
        # Padding's index is one beyond the last expert, where `take_along_axis` would return NaN.
        of_chosen = jnp.take_along_axis(self.scored(logits), jnp.minimum(chosen, self.num_experts - 1), axis=-1)
        # A constant for padding, so that no gradient reaches its logits.
        of_chosen = jnp.where(self.is_token(chosen)[..., None], of_chosen, 1.0)
        weights = of_chosen / of_chosen.sum(axis=-1, keepdims=True) if self.normalized else of_chosen
        return weights if self.scale == 1.0 else self.scale * weights

    def loss_sums(
        self, logits: jax.Array, chosen: jax.Array, share: jax.Array, bias: jax.Array | None, num_layers: int
    ) -> dict[str, jax.Array]:
        """Sums over the tokens of `logits` "batch seq expert"; `share` "expert" are the choices of each per token.

        The last entry, sum of bias * (load - 1), is only reported; its gradient is what moves the bias.
        """
        is_token = self.is_token(chosen)
        chances = jnp.where(is_token[..., None], self.chances(logits), 0)
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
        # Logarithms first: a probability may round to 0, whose logarithm is -inf. Of sigmoids they are sums of two.
        logs = jax.nn.log_softmax(jax.nn.log_sigmoid(logits) if self.scores == "sigmoid" else logits)
        entropy = -jnp.where(is_token[..., None], jnp.exp(logs) * logs, 0).sum()
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
        measures = {EXPERT_LOAD: num_tokens * load, **{name: value / num_layers for name, value in measures.items()}}
        return {name: measures[name.removeprefix(MEASURED)] for name in self.measures if name != MEASURED + LOAD_BIAS}
