"""JAX's own rules of promotion and transfer, under which jaxpipe's code and optax's is written.

JAX_NUMPY_RANK_PROMOTION=raise, JAX_NUMPY_DTYPE_PROMOTION=strict and JAX_TRANSFER_GUARD=disallow find mistakes in code
that is written for them. These settings stay in force for the functions of a model of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def default_promotion() -> Iterator[None]:
    """Ranks and dtypes are promoted as NumPy does."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@contextmanager
def default_rules() -> Iterator[None]:
    """Promotion as in `default_promotion`; and arrays of the host go to devices by themselves."""
    with default_promotion(), jax.transfer_guard("allow"):
        yield
