"""The optimizers that a config names, and the learning rate by step; all are optax's.

Gradients are clipped before, in `step`. Weight decay is on kernels of matrix products alone. Muon's update of a matrix
reads the whole matrix: where masters are split over devices, XLA sums or gathers what its products need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from ml_collections import ConfigDict

from jaxpipe.config import model_config
from jaxpipe.models import Anatomy
from jaxpipe.models.anatomy import LOAD_BIAS

RMS_OF_ADAMW = 0.2  # of an update of AdamW, about; Liu et al., Muon is Scalable for LLM Training (arXiv 2502.16982)
_QUERY_KEY_VALUE = ("query", "key", "value")


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """The optimizer of a checked config."""
    optimizer = OPTIMIZERS[config.optimizer.name](config)
    if config.optimizer.error_feedback:
        optimizer = optax.chain(error_feedback(), optimizer)
    return with_load_bias(optimizer, config)


def with_load_bias(optimizer: optax.GradientTransformation, config: ConfigDict) -> optax.GradientTransformation:
    """`optimizer`, and the rule of `model.bias_rate` for the bias of experts, whose gradients are their loads."""
    rate = config.model.get("bias_rate", 0.0)
    if not rate:
        return optimizer
    of_each = {True: lower_bias_of_busy_experts(rate), False: optimizer}
    return optax.multi_transform(of_each, is_load_bias)  # pyright: ignore[reportArgumentType]  # labels are hashable


def _adamw(config: ConfigDict) -> optax.GradientTransformation:
    fields = config.optimizer
    return optax.adamw(
        learning_rate(config),
        b1=fields.beta1,
        b2=fields.beta2,
        eps=fields.epsilon,
        weight_decay=fields.weight_decay,
        mask=is_kernel,
    )


def _lion(config: ConfigDict) -> optax.GradientTransformation:
    fields = config.optimizer
    return optax.lion(
        learning_rate(config), fields.beta1, fields.beta2, weight_decay=fields.weight_decay, mask=is_kernel
    )


def _sgd(config: ConfigDict) -> optax.GradientTransformation:
    fields = config.optimizer
    return optax.chain(
        optax.add_decayed_weights(fields.weight_decay, mask=is_kernel), optax.sgd(learning_rate(config), fields.beta1)
    )


def _muon(config: ConfigDict) -> optax.GradientTransformation:
    fields = config.optimizer
    of_matrices = optax.chain(
        scale_by_muon(model_config(config).anatomy, beta=fields.muon_beta),
        optax.add_decayed_weights(fields.weight_decay),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return optax.multi_transform({"muon": of_matrices, "adamw": _adamw(config)}, labels_of_muon)


OPTIMIZERS: dict[str, Callable[[ConfigDict], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "sgd": _sgd,
}


READS_MATRICES = ("muon",)  # whose update of a parameter is of its whole matrix; the others' are elementwise


def is_kernel(params: Any) -> Any:
    """A tree of bools that selects the kernels of matrix products, by the name of each leaf.

    Biases, norms and embeddings are not decayed. The name decides, because a staged parameter has more dimensions
    than a canonical one.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path) == "kernel", params)


def _name(path: tuple[Any, ...]) -> str | None:
    """The name of a leaf; None in a list or tuple."""
    return getattr(path[-1], "key", None)


def labels_of_muon(params: Any) -> Any:
    """The optimizer of each parameter under Muon: "muon" for the kernels of layers, "adamw" for all others."""
    matrices = is_kernel(params)["layers"]
    return {
        # Muon is made for hidden matrices: its authors leave embedding and head to AdamW.
        **jax.tree.map(lambda _: "adamw", params),
        "layers": jax.tree.map(lambda is_matrix: "muon" if is_matrix else "adamw", matrices),
    }


# ---- The bias of experts

# Below this a load counts as the mean: without it rounding would decide the sign, and the bias, by mesh.
_BALANCED_LOAD_TOLERANCE = 1e-5  # the rounding of sums of loads, which differs from mesh to mesh


def is_load_bias(params: Any) -> Any:
    """A tree of bools that selects the biases of experts, whose gradients are loads, by the name of each leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path) == LOAD_BIAS, params)


def lower_bias_of_busy_experts(rate: float) -> optax.GradientTransformation:
    """Adds `rate` to the biases of experts with less load than the mean, and takes it from those with more.

    Source: DeepSeek-V3 technical report, 2024 (arXiv 2412.19437), section 2.1.2.
    """

    def update(load: jax.Array) -> jax.Array:
        # Loads are given as gradients, load minus mean; only their sign counts, as in the source.
        return jnp.where(jnp.abs(load) > _BALANCED_LOAD_TOLERANCE, -rate * jnp.sign(load), 0.0)

    return optax.stateless(lambda loads, _: jax.tree.map(update, loads))


# ---- Muon


class MuonState(NamedTuple):
    """State of `scale_by_muon`: the steps done, int32, and the momentum, like the parameters."""

    num_steps: jax.Array
    momentum: Any


def scale_by_muon(anatomy: Anatomy, *, beta: float) -> optax.GradientTransformation:
    """Momentum of each matrix, orthogonalized and scaled so that it changes a weight as much as AdamW does.

    Queries, keys and values are three matrices of one kernel. All leading dims count matrices: the layers, in canonical
    parameters, or device, chunk and layer, in staged ones. Unused rows of zeros stay zeros.

    Args:
        anatomy: of the model: which columns of `query_key_value` are whose.
        beta: of Nesterov's momentum.

    Source: Jordan et al. 2024, as in optax.contrib; the scale 0.2 sqrt(max(inputs, outputs)): Liu et al. 2025 (arXiv
    2502.16982), section 2.2.
    """
    inner: Any = optax.contrib.scale_by_muon(beta=beta, weight_dimension_numbers=_dimensions)

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        apart = split_columns(updates, anatomy)
        # Momentum is stored with columns joined, like the parameters, so that checkpoints and shardings need no other
        # tree.
        before = inner.init(apart)._replace(count=state.num_steps, mu=split_columns(state.momentum, anatomy))
        orthogonal, after = inner.update(apart, before)
        # The last two dims are a matrix; all before them count matrices.
        scaled = jax.tree.map(lambda leaf: RMS_OF_ADAMW * max(leaf.shape[-2:]) ** 0.5 * leaf, orthogonal)
        return join_columns(scaled, anatomy), MuonState(after.count, join_columns(after.mu, anatomy))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  # optax has tree types


def _dimensions(updates: Any) -> Any:
    # Counted from the end, so that they hold for staged and canonical parameters.
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)


def split_columns(tree: Any, anatomy: Anatomy) -> Any:
    """Returns `tree` with a dict of the kernels of queries, keys and values in place of each `query_key_value` kernel.

    The columns stand by key-value head: its queries, its key, its value (`models.block.SelfAttention`).
    """

    def split(path: Any, leaf: jax.Array) -> Any:
        if not any(getattr(entry, "key", None) == "query_key_value" for entry in path):
            return leaf
        by_group = leaf.reshape(*leaf.shape[:-1], anatomy.num_kv_heads, -1, anatomy.head_size)
        # Of a key-value head the last two columns are its key and its value; all before are queries.
        parts = by_group[..., :-2, :], by_group[..., -2, :], by_group[..., -1, :]
        return {name: part.reshape(*leaf.shape[:-1], -1) for name, part in zip(_QUERY_KEY_VALUE, parts, strict=True)}

    return jax.tree_util.tree_map_with_path(split, tree)


def join_columns(tree: Any, anatomy: Anatomy) -> Any:
    """Inverse of `split_columns`."""

    def is_split(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == set(_QUERY_KEY_VALUE)

    def join(node: Any) -> Any:
        if not is_split(node):
            return node
        leading = node["query"].shape[:-1]
        by_group = [
            node[name].reshape(*leading, anatomy.num_kv_heads, -1, anatomy.head_size) for name in _QUERY_KEY_VALUE
        ]
        return jnp.concatenate(by_group, axis=-2).reshape(*leading, -1)

    return jax.tree.map(join, tree, is_leaf=is_split)


# ---- Error feedback


class FeedbackState(NamedTuple):
    """State of `error_feedback`: the steps done, int32, and the gradient before, like the parameters."""

    num_steps: jax.Array
    before: Any


def error_feedback() -> optax.GradientTransformation:
    """Adds to each gradient what the one before it lacked: g(t) becomes g(t) + (g(t) - g(t-1)).

    Without flush step t applies g(t-1), the gradient that is there, in place of g(t), which it should. The error is
    g(t) - g(t-1); it is known a step later, and is made good then. The first gradient is left as it is.

    Source: the idea, and one buffer of a gradient's size, from Zmushko et al., ICML 2026 (arXiv 2606.30634), section 3;
    the formula is our reading, derived from error feedback for compressed gradients (Seide et al. 2014).
    """

    def init(params: Any) -> FeedbackState:
        return FeedbackState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: FeedbackState, params: Any = None) -> tuple[Any, FeedbackState]:
        del params
        # In the first step `before` holds zeros, no gradient: a correction would double the step.
        made_good = (state.num_steps > 0).astype(jnp.float32)
        corrected = jax.tree.map(lambda now, before: now + made_good * (now - before), updates, state.before)
        return corrected, FeedbackState(state.num_steps + 1, updates)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  # optax has tree types


# ---- Learning rate


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """The learning rate by step: linear warm-up to the peak, then as `optimizer.schedule` says."""
    fields = config.optimizer
    steps = config.train.steps
    num_warmup = fields.warmup_steps or round(fields.warmup_fraction * steps)
    # From 1 / (n + 1) of the peak, not from 0: a first step of rate 0 would be lost. At least one step, since optax
    # divides by their number.
    warmup = optax.linear_schedule(fields.learning_rate / (num_warmup + 1), fields.learning_rate, max(num_warmup, 1))
    return optax.join_schedules([warmup, RATES[fields.schedule](config, steps - num_warmup)], [num_warmup])


def _cosine(config: ConfigDict, steps: int) -> optax.Schedule:
    fields = config.optimizer
    return optax.cosine_decay_schedule(fields.learning_rate, max(steps, 1), alpha=fields.final_learning_rate_fraction)


def _constant(config: ConfigDict, steps: int) -> optax.Schedule:
    del steps
    return optax.constant_schedule(config.optimizer.learning_rate)


def _wsd(config: ConfigDict, steps: int) -> optax.Schedule:
    """Stable, then down in a line; source: Hu et al., MiniCPM (arXiv 2404.06395), section 4."""
    fields = config.optimizer
    # Bounded by the steps after warm-up, so that a short run still comes down to the final rate.
    num_down = min(max(1, round(fields.decay_fraction * config.train.steps)), max(steps, 1))
    last = fields.final_learning_rate_fraction * fields.learning_rate
    return optax.linear_schedule(fields.learning_rate, last, num_down, transition_begin=max(steps - num_down, 0))


RATES: dict[str, Callable[[ConfigDict, int], optax.Schedule]] = {"cosine": _cosine, "wsd": _wsd, "constant": _constant}
