"""A mesh without devices, on which functions are traced for an estimate, and kernels that are only traced there.

What is traced there asks for no device and starts no backend. A jaxpr does not show what a kernel computes, and some
kernels need a driver's library even to be traced: `stand_in` has their shapes and says what they multiply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh

from jaxpipe.cluster.axes import AXES

Sizes = tuple[int, int, int, int]  # rows, columns, depth of a matmul, and how many there are

_KIND = "traced for an estimate"
_MATMULS = "matmuls"


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """The mesh of all axes, 1 device along those that `sizes` lacks."""
    shape = tuple(sizes.get(name, 1) for name in AXES)
    return AbstractMesh(shape, AXES, abstract_device=AbstractDevice(_KIND, None, "gpu"))


def is_estimated() -> bool:
    """Whether the function that asks is traced on an `abstract_mesh`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.device_kind == _KIND


def stand_in(
    like: Sequence[Any], matmuls: Sequence[Sizes], *, fused: bool = False, apart: int = 0
) -> Callable[..., Any]:
    """A function that is traced in place of kernels, and never run.

    Args:
        like: shape and dtype of each result.
        matmuls: what the kernels multiply.
        fused: whether they keep products on the chip, as attention does.
        apart: numbers that each reads or writes while it multiplies nothing.
    """
    declared = {_MATMULS: json.dumps([[*sizes, int(fused), apart] for sizes in matmuls])}
    out_shape = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like]
    return pl.pallas_call(lambda *refs: None, out_shape=out_shape, metadata=declared)


def declared_matmuls(params: Mapping[str, Any]) -> list[list[int]]:
    """The arguments of `stand_in` for each of the matmuls that a `pallas_call` declares.

    Args:
        params: those of its equation. A kernel declares its matmuls as `stand_in` does, by its `metadata`.
    """
    # By dict: JAX keeps it as a mapping of its own, whose `get` takes no default.
    return json.loads(dict(params.get("metadata") or {}).get(_MATMULS, "[]"))
