"""From sums of losses to what a run reports: the mean of each kind, and their sum.

A model returns one sum, or one of each kind in a dict, and counts the terms of each. A mean over the whole batch is
the sum over all microbatches and devices divided by the count over all of them, however they are split.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def factors(num_losses: PyTree) -> PyTree:
    """What makes a mean of each sum of losses; 0 terms count as one. Traceable.

    Args:
        num_losses: terms of each sum, as `LanguageModel.num_losses` counts them.
    """
    return jax.tree.map(lambda num: 1.0 / jnp.maximum(num, 1), num_losses)


def named(means: PyTree, *, prefix: str = "") -> dict[str, Any]:
    """The loss of a run, the sum of all means, and after it each kind's own where there are several.

    Args:
        means: one, or a dict of them.
        prefix: of every name.

    Example:
        >>> named(2.5, prefix="eval_")
        {'eval_loss': 2.5}
        >>> named({"masked_lm": 2.5, "sentence_order": 0.5})
        {'loss': 3.0, 'masked_lm_loss': 2.5, 'sentence_order_loss': 0.5}
    """
    kinds = {f"{prefix}{kind}_loss": mean for kind, mean in means.items()} if isinstance(means, dict) else {}
    return {f"{prefix}loss": sum(jax.tree.leaves(means)), **kinds}


def in_words(losses: dict[str, float]) -> str:
    """What `named` made, to print.

    Example:
        >>> in_words({"eval_loss": 3.0, "eval_masked_lm_loss": 2.5, "eval_sentence_order_loss": 0.5})
        'loss 3.0000 nats (masked_lm 2.5000, sentence_order 0.5000)'
    """
    (_, loss), *kinds = losses.items()
    named_kinds = (f"{name.removeprefix('eval_').removesuffix('_loss')} {mean:.4f}" for name, mean in kinds)
    return f"loss {loss:.4f} nats" + (f" ({', '.join(named_kinds)})" if kinds else " per token")
