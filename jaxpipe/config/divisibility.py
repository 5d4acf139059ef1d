"""Checks that the mesh divides what it splits: the batch over devices and microbatches, the model over its axes.

Goes in: a config. Comes out: nothing, or a ConfigError with the division that leaves a remainder and the nearest legal
value.
"""

from __future__ import annotations

import math
from typing import Any

from jaxpipe.cluster.axes import (
    BATCH_AXES,
    KERNEL_AXES,
    REST_AXIS,
    SEQUENCE_AXES,
    STAGE_AXIS,
    TOKEN_AXES,
    MeshAxis,
    MeshSizes,
    written,
)
from jaxpipe.config.base import RunConfig
from jaxpipe.config.model import model_config, vocab_pipe
from jaxpipe.errors import ConfigError
from jaxpipe.mesh import ContextAxis, TensorAxis
from jaxpipe.models.kinds import kinds_of
from jaxpipe.models.multi_token import check_further
from jaxpipe.models.sequence_parts import check_sequence_parts

TABLE_ROWS = "rows of the token table"


def sizes_to_divide(config: RunConfig, row: MeshAxis) -> dict[str, int]:
    """The sizes of model and data that an axis of the mesh must divide, by path.

    Raises:
        ConfigError: there is no such model.
    """
    model = model_config(config)
    anatomy = model.anatomy
    sizes = {}
    if row.splits_kernels:
        sizes |= {
            TABLE_ROWS: anatomy.num_rows,
            "model.num_heads": anatomy.num_heads,
            "model.num_kv_heads": anatomy.num_kv_heads,
            # Layers of several kinds may have other widths.
            **{f"model.{kind.anatomy.width_field}": kind.anatomy.width for kind in kinds_of(model)},
        }
        # A family without the field has as many as heads: one error is enough.
        if anatomy.num_kv_heads == anatomy.num_heads and not hasattr(config.model, "num_kv_heads"):
            del sizes["model.num_kv_heads"]
    if row.splits_tokens:
        sizes["data.seq_len"] = config.data.seq_len
    if row.splits_experts:
        sizes["model.num_experts"] = anatomy.num_experts
    return sizes


def check_divides(config: RunConfig, row: MeshAxis) -> None:
    """Raises ConfigError unless the devices of an axis of the mesh divide everything that is split over it."""
    try:
        sizes = sizes_to_divide(config, row)
    except ConfigError:
        return  # `check` reports it by itself
    name = f"mesh.{row.name}"
    number = config.mesh.axes[row.name]
    broken = {path: size for path, size in sizes.items() if size % number}
    # Rows of the table are split further over `pipe`; told only where the axis itself divides them.
    if row.splits_kernels and not broken:
        _check_vocab_over_pipe(config, sizes[TABLE_ROWS])
    if not broken:
        return
    rule = f"{row.name}-divides: every device of {name} has equally many {row.equally}"
    # A model without experts, for example: no size but 1 is legal.
    if set(sizes.values()) == {1}:
        raise ConfigError(
            f"{name}={number} of a model without {row.equally}",
            rule=rule,
            picture=f"model.family={config.model.family!r}",
            repair=f"set {name}=1, and for example mesh.{REST_AXIS}={config.mesh.axes[REST_AXIS] * number}",
        )
    common = math.gcd(*sizes.values())
    # A legal value divides the greatest common divisor of all sizes.
    nearest = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(n - number))
    raise ConfigError(
        f"{name}={number} does not divide {', '.join(f'{path}={size}' for path, size in broken.items())}",
        rule=rule,
        picture="\n".join(
            f"{path}: {size} = {number} x {size // number} + {size % number}" for path, size in broken.items()
        ),
        repair=f"set {name}={nearest}, the nearest legal value{_alternative(broken, config)}",
    )


def _check_vocab_over_pipe(config: RunConfig, size: int) -> None:
    num_parts = config.mesh.num_kernel_parts * vocab_pipe(config)
    if size % num_parts:
        parts = written(config.mesh.axes, (STAGE_AXIS, *KERNEL_AXES), prefix="mesh.")
        raise ConfigError(
            f"{parts} does not divide {TABLE_ROWS}={size}",
            rule="vocab-over-pipe: every device has equally many rows of the token table",
            picture=f"{TABLE_ROWS}: {size} = {num_parts} x {size // num_parts} + {size % num_parts}",
            repair=f"set model.vocab_multiple={math.lcm(config.model.vocab_multiple, num_parts)}",
        )


def sequence_multiple(mesh: MeshSizes, *, causal: bool) -> int:
    """What the length of a sequence is a multiple of.

    Example:
        >>> sequence_multiple(MeshSizes(context=2), causal=True), sequence_multiple(MeshSizes(context=2), causal=False)
        (4, 2)
    """
    # Axes of tokens split those of a device.
    chunks = ContextAxis(mesh.num_sequence_parts, causal=causal).num_chunks
    return math.lcm(chunks, mesh.num_sequence_parts * mesh.num_token_parts)


def check_sequences(config: RunConfig) -> None:
    """Raises ConfigError unless the model splits sequences as the mesh says, into equally long chunks."""
    if config.mesh.num_sequence_parts == 1:
        return
    sizes: dict[str, Any] = config.mesh.axes
    model = model_config(config)
    sharing = TensorAxis.of(**sizes)
    check_sequence_parts(model, sharing)
    check_further(model, sharing)
    seq_len = config.data.seq_len
    multiple = sequence_multiple(config.mesh, causal=model.anatomy.causal)
    if seq_len % multiple:
        parts = written(config.mesh.axes, (*SEQUENCE_AXES, *TOKEN_AXES), prefix="mesh.")
        chunks = "two chunks, an early and a late one," if model.anatomy.causal else "one chunk"
        raise ConfigError(
            f"data.seq_len={seq_len} does not divide into equal chunks of {parts}",
            rule=f"context-divides: a device has {chunks} of each sequence; chunks are equally long",
            picture=f"{seq_len} = {multiple} x {seq_len // multiple} + {seq_len % multiple}",
            repair=f"set data.seq_len={max(1, round(seq_len / multiple)) * multiple}, the nearest legal value",
        )


def check_batch(config: RunConfig) -> None:
    """Raises ConfigError unless the batch divides into equal microbatches on every copy of the pipeline."""
    batch_size = config.data.batch_size
    num_parts = config.pipeline.num_microbatches * config.mesh.num_batch_parts
    parts = written(config.mesh.axes, BATCH_AXES, prefix="mesh.")
    remainder = batch_size % num_parts
    if remainder:
        lower = batch_size - remainder
        upper = batch_size - remainder + num_parts
        # 0 sequences are no batch, however near.
        nearest = upper if not lower or upper - batch_size < remainder else lower
        raise ConfigError(
            (
                f"data.batch_size={batch_size} does not divide into pipeline.num_microbatches="
                f"{config.pipeline.num_microbatches} x {parts} = {num_parts}"
                " equal parts"
            ),
            rule="batch-divides: every device gets equally many sequences of every microbatch",
            picture=f"{batch_size} = {num_parts} x {batch_size // num_parts} + {remainder}",
            repair=f"set data.batch_size={nearest}, the nearest legal value",
        )


def _alternative(broken: dict[str, int], config: RunConfig) -> str:
    """A further repair if only the rows of the token table do not divide: more padding rows."""
    if list(broken) != [TABLE_ROWS]:
        return ""
    num_parts = config.mesh.num_kernel_parts * vocab_pipe(config)
    return f", or model.vocab_multiple={math.lcm(config.model.vocab_multiple, num_parts)}"
