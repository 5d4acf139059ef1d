"""LoRA: kernels are frozen, and beside some of them stand products of two small matrices, which are trained.

y = x @ kernel + alpha / rank * (x @ A) @ B, with A "in rank" and B "rank out". B begins as zeros, so that a model
begins as the one that it is made of. Left to others: what it means in a step that a parameter is frozen
(`jaxpipe.program.partition`).
Source: Hu et al., LoRA, ICLR 2022 (arXiv 2106.09685), section 4.1; initial values as those of Hugging Face's peft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.errors import ConfigError, closest

NAMES = ("lora_a", "lora_b")  # of the parameters that are trained
ALL = "all"
OF_ATTENTION = ("query", "key", "value", "output")
GATED = ("gate", "up", "down")  # of a gated feed forward

FIELDS = {
    # Above 0 adapters of this rank are trained beside the kernels of lora_targets, and all else is frozen.
    "lora_rank": 0,
    "lora_alpha": 16.0,  # the adapters' products are multiplied by lora_alpha / lora_rank
    # Among query, key, value, output (of attention), gate, up, down (of the feed forward); or "all".
    "lora_targets": "query,value",
}


@dataclass(frozen=True)
class Lora:
    """Adapters of a model.

    Attributes:
        rank: inner size of each adapter, >= 1.
        alpha: adapters count alpha / rank.
        targets: names of the matmuls that have one; `ALL` stands for all of them.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of the adapters' products."""
        return self.alpha / self.rank

    def is_target(self, name: str) -> bool:
        """Whether the matmul `name` has an adapter."""
        return name in self.targets or ALL in self.targets

    def check(self, names: Sequence[str], *, frozen: Mapping[str, str]) -> None:
        """Raises ConfigError unless the targets are among `names`.

        Args:
            names: the matmuls of a layer that can have adapters.
            frozen: why others cannot.
        """
        for name in self.targets:
            if name in names or name == ALL:
                continue
            why = frozen.get(name, "is no matmul of a layer")
            raise ConfigError(
                f"model.lora_targets={','.join(self.targets)!r}: {name!r} {why}.{closest(name, list(names))}",
                rule=f"lora-targets: among {', '.join(names)}, with commas between them, or {ALL!r}",
                repair=f"set model.lora_targets={ALL!r}, or for example {','.join(names[:3:2])!r}",
            )


def with_lora(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of `model` with one field `lora` in place of those of `FIELDS`; None for rank 0.

    Raises:
        ConfigError: a field has no effect, or names a target twice or none.

    Example:
        >>> with_lora({**FIELDS, "lora_rank": 8})
        {'lora': Lora(rank=8, alpha=16.0, targets=('query', 'value'))}
    """
    fields = dict(fields)
    rank, alpha, targets = (fields.pop(name) for name in FIELDS)
    if not rank:
        told = {"lora_alpha": alpha, "lora_targets": targets}
        for name, value in told.items():
            if value != FIELDS[name]:
                raise ConfigError(
                    f"model.{name}={value!r} with model.lora_rank=0",
                    rule="field-used: a field that has no effect is an error; without a rank there are no adapters",
                    repair=f"set model.lora_rank=8, or leave model.{name} out",
                )
        return fields | {"lora": None}
    names = tuple(name.strip() for name in targets.split(","))
    if len(set(names)) < len(names) or (ALL in names and len(names) > 1) or "" in names:
        raise ConfigError(
            f"model.lora_targets={targets!r}",
            rule=f"lora-targets: each target once, with commas between them; {ALL!r} stands alone",
            repair=f"set model.lora_targets={ALL!r}, or for example {FIELDS['lora_targets']!r}",
        )
    return fields | {"lora": Lora(rank, alpha, names)}


class Adapter(nnx.Module):
    """A and B of some columns of a kernel; split as the kernel is, so that it needs no exchange of its own."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rank: int, split: int | None, key: jax.Array):
        # Kaiming-uniform with a = sqrt(5), as peft has it: the bound is 1 / sqrt(inputs).
        bound = num_inputs**-0.5
        values = jax.random.uniform(key, (num_inputs, rank), minval=-bound, maxval=bound)
        self.lora_a = nnx.Param(values, split=0 if split == 0 else None)
        self.lora_b = nnx.Param(jnp.zeros((rank, num_outputs)), split=1 if split == 1 else None)

    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """A and B."""
        return self.lora_a[...], self.lora_b[...]


@dataclass(frozen=True)
class Columns:
    """How the columns of a kernel divide among its adapters; static.

    Attributes:
        names: names of the parts, which stand side by side in every group of columns.
        widths: columns of each part in a group; None: the part is all columns.
        scale: factor of adapters.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...] | None
    scale: float

    def joined(self, products: Mapping[str, jax.Array]) -> jax.Array:
        """The adapters' products "... columns of a part" as columns of the kernel; zeros for parts without one."""
        if self.widths is None:
            (product,) = products.values()
            return product
        first = next(iter(products))
        num_groups = products[first].shape[-1] // self.widths[self.names.index(first)]
        leading = products[first].shape[:-1]
        parts = [
            products[name].reshape(*leading, num_groups, width)
            if name in products
            else jnp.zeros((*leading, num_groups, width), products[first].dtype)
            for name, width in zip(self.names, self.widths, strict=True)
        ]
        return jnp.concatenate(parts, axis=-1).reshape(*leading, -1)


def merged(kernel: jax.Array, columns: Columns, adapters: Mapping[str, tuple[jax.Array, jax.Array]]) -> jax.Array:
    """The kernel "in out" of one layer, float32, with its adapters' products added.

    Args:
        adapters: A and B by the name of their part.
    """
    products = {name: a.astype(jnp.float32) @ b.astype(jnp.float32) for name, (a, b) in adapters.items()}
    return kernel.astype(jnp.float32) + columns.scale * columns.joined(products)


def base_of(config: Any) -> Any:
    """The config of the same model without adapters."""
    return replace(config, lora=None) if getattr(config, "lora", None) else config


def is_adapter(path: Sequence[Any]) -> bool:
    """Whether a parameter at this path of a tree of dicts is one of an adapter."""
    return getattr(path[-1], "key", None) in NAMES


def trained_of(params: Any) -> Any:
    """Whether each of `params` is trained where there are adapters: these alone are."""
    return jax.tree_util.tree_map_with_path(lambda path, _: is_adapter(path), params)
