"""AdamW with warm-up and cosine, from optax; gradients are clipped before, in `step`."""

from __future__ import annotations

from typing import Any

import jax
import optax
from ml_collections import ConfigDict


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """Step -> learning rate: linear up to the peak during warm-up, then a cosine down to its end."""
    peak, steps = config.optimizer.learning_rate, config.train.steps
    num_warmup = round(config.optimizer.warmup_fraction * steps)
    warmup = optax.linear_schedule(peak / (num_warmup + 1), peak, max(num_warmup, 1))
    cosine = optax.cosine_decay_schedule(
        peak, max(steps - num_warmup, 1), alpha=config.optimizer.final_learning_rate_fraction
    )
    return optax.join_schedules([warmup, cosine], [num_warmup])


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """The optimizer of `config`: AdamW with weight decay on kernels only."""
    optimizer = config.optimizer
    return optax.adamw(
        learning_rate(config),
        b1=optimizer.beta1,
        b2=optimizer.beta2,
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        mask=is_kernel,
    )


def is_kernel(params: Any) -> Any:
    """For every parameter, whether it is the kernel of a matrix product, by the name of its leaf.

    Biases, norms and embeddings are not decayed. The name decides, because the rank of a staged
    parameter is not that of a canonical one.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
