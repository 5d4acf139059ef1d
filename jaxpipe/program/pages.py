"""How residuals lie in a page: all that one layer keeps of one microbatch, in one row for each dtype.

A page is the unit of storage and of transfer, so it is as few arrays as can be: what moves a page moves one
slice of one array. Rows are flat: between a forward and a backward that prefer different orders of dims, XLA would
bring a whole array from one order into the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax


@dataclass(frozen=True)
class PageForm:
    """Where each residual stands in a page.

    Attributes:
        residuals: shape and dtype of each.
    """

    residuals: tuple[jax.ShapeDtypeStruct, ...]

    @cached_property
    def dtypes(self) -> tuple[Any, ...]:
        """Of the rows; pools and pages are lists in this order."""
        return tuple(dict.fromkeys(like.dtype for like in self.residuals))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Numbers in each row."""
        return tuple(sum(like.size for like in self.residuals if like.dtype == dtype) for dtype in self.dtypes)

    @property
    def num_bytes(self) -> int:
        """Of one page."""
        return sum(like.size * like.dtype.itemsize for like in self.residuals)

    def pool_like(self, num_pages: int) -> list[jax.ShapeDtypeStruct]:
        """[dtype] -> [num_pages, width]."""
        rows = zip(self.widths, self.dtypes, strict=True)
        return [jax.ShapeDtypeStruct((num_pages, width), dtype) for width, dtype in rows]

    def write(self, pool: list[jax.Array], page: jax.Array, residuals: Sequence[jax.Array]) -> list[jax.Array]:
        """`pool` with `residuals` in row `page`, in place."""
        pool = list(pool)
        for (row, start), residual in zip(self._places, residuals, strict=True):
            pool[row] = lax.dynamic_update_slice(pool[row], residual.reshape(1, -1), (page, start))
        return pool

    def read(self, pool: list[jax.Array], page: jax.Array) -> list[jax.Array]:
        """The residuals in row `page`."""
        return [
            lax.dynamic_slice(pool[row], (page, start), (1, like.size)).reshape(like.shape)
            for (row, start), like in zip(self._places, self.residuals, strict=True)
        ]

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """[residual] its row, and where in the row it starts."""
        ends = [0] * len(self.dtypes)
        places = []
        for like in self.residuals:
            row = self.dtypes.index(like.dtype)
            places.append((row, ends[row]))
            ends[row] += like.size
        return places
