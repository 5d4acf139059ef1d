"""Rules of what the mesh divides: the batch over `data` and microbatches, the model over `tensor`."""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from jaxpipe.config.model import model_config
from jaxpipe.errors import ConfigError

ROWS = "rows of the token table"


def check_tensor(config: ConfigDict) -> None:
    """Raises ConfigError unless every device of `mesh.tensor` gets as much of all that it divides."""
    try:
        anatomy = model_config(config).anatomy
    except ConfigError:
        return  # `check` reports it by itself
    tensor = config.mesh.tensor
    sizes = {
        ROWS: anatomy.num_rows,
        "model.num_heads": anatomy.num_heads,
        "model.num_kv_heads": anatomy.num_kv_heads,
        "model.feed_forward": anatomy.width,
        "data.seq_len": config.data.seq_len,
    }
    if anatomy.num_kv_heads == anatomy.num_heads and "num_kv_heads" not in config.model:
        del sizes["model.num_kv_heads"]
    broken = {path: size for path, size in sizes.items() if size % tensor}
    if broken:
        common = math.gcd(*sizes.values())
        nearest = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(n - tensor))
        raise ConfigError(
            f"mesh.tensor={tensor} does not divide {', '.join(f'{path}={size}' for path, size in broken.items())}\n"
            "  rule tensor-divides: every device of mesh.tensor holds as many heads, columns, words and positions\n"
            + "".join(
                f"      {path}: {size} = {tensor} x {size // tensor} + {size % tensor}\n"
                for path, size in broken.items()
            )
            + f"  repair: set mesh.tensor={nearest}, the nearest legal value{_alternative(broken, config)}"
        )


def check_batch(config: ConfigDict) -> None:
    """Raises ConfigError unless the batch divides into equal microbatches on every copy of the pipeline."""
    batch_size = config.data.batch_size
    num_parts = config.pipeline.num_microbatches * config.mesh.data
    remainder = batch_size % num_parts
    if remainder:
        lower, upper = batch_size - remainder, batch_size - remainder + num_parts
        nearest = upper if not lower or upper - batch_size < remainder else lower
        raise ConfigError(
            f"data.batch_size={batch_size} does not divide into"
            f" pipeline.num_microbatches={config.pipeline.num_microbatches} x mesh.data={config.mesh.data}"
            f" = {num_parts} equal parts\n"
            "  rule batch-divides: every device gets as many sequences of every microbatch\n"
            f"      {batch_size} = {num_parts} x {batch_size // num_parts} + {remainder}\n"
            f"  repair: set data.batch_size={nearest}, the nearest legal value"
        )


def _alternative(broken: dict[str, int], config: ConfigDict) -> str:
    """Another repair, where there is one: rows that are no tokens can be added."""
    if list(broken) != [ROWS]:
        return ""
    return f", or model.vocab_multiple={math.lcm(config.model.vocab_multiple, config.mesh.tensor)}"
