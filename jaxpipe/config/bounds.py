"""The most that each number of a config may be, so that a slip of a few digits is refused before anything is allocated.

A bound on a size is several times that of any model, batch or cluster that was trained so far; sizes below it are
believed. Goes in: a field's path and value. Left to others: whether numbers fit together, and least values (`checks`).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.cluster.axes import AXES
from jaxpipe.errors import ConfigError

INT32 = 2**31 - 1  # steps, tokens and ids are counted in int32
UINT32 = 2**32 - 1  # of a seed
MOST_DEVICES = 2**20  # as of a topology

AT_MOST: dict[str, float] = {
    "model.num_layers": 10_000,
    "model.hidden": 2**20,
    "model.num_heads": 2**16,
    "model.num_kv_heads": 2**16,
    "model.head_size": 2**16,
    "model.feed_forward": 2**22,
    "model.vocab_size": 2**26,
    "model.vocab_multiple": 2**26,
    "model.num_positions": 2**26,
    "model.num_token_types": 2**16,
    "model.num_experts": 2**16,
    "model.experts_per_token": 2**16,
    "data.batch_size": 2**24,
    "data.seq_len": 2**26,
    "data.seed": UINT32,
    "data.heldout_fraction": 0.5,
    "data.mask_fraction": 1.0,
    "data.short_fraction": 1.0,
    "pipeline.num_microbatches": 1_000_000,
    **{f"mesh.{axis}": MOST_DEVICES for axis in AXES},
    "optimizer.warmup_fraction": 0.5,
    "optimizer.final_learning_rate_fraction": 1.0,
    "optimizer.decay_fraction": 1.0,
    "train.seed": UINT32,
    "train.lost_after_s": 1e9,
}

# The most that the product of several fields may be, since they allocate memory together.
TOGETHER: dict[tuple[str, ...], int] = {
    ("data.batch_size", "data.seq_len"): INT32,  # tokens of a step
    tuple(f"mesh.{axis}" for axis in AXES): MOST_DEVICES,
    ("model.num_layers", "model.hidden"): 2**31,  # GPT-3 has 2^20
}


def most_of(path: str, value: float) -> float | None:
    """The most that the field may be: all whole numbers have a bound; None for other numbers without one."""
    return AT_MOST.get(path, INT32 if isinstance(value, int) else None)


def check_together(paths: Sequence[str], values: Sequence[int]) -> None:
    """Raises ConfigError if the product of fields, a key of `TOGETHER`, is more than can be meant."""
    product = 1
    most = TOGETHER[tuple(paths)]
    for value in values:
        product *= value
    if product > most:
        raise ConfigError(
            ", ".join(f"{path}={value}" for path, value in zip(paths, values, strict=True)),
            rule=f"field-product: {' x '.join(paths)} is at most {most:,}",
            picture=f"{' x '.join(map(str, values))} = {product:,}",
            repair="set smaller ones",
        )
