"""How arrays lie in a page: all that one layer keeps of one microbatch for one span, in one row for each dtype.

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
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Pool:
    """Pages of one size.

    Attributes:
        num_pages: of every device.
        rows: (dtype, width): of each dtype, how many numbers a page has.
    """

    num_pages: int
    rows: tuple[tuple[Any, int], ...]

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return sum(width * jnp.dtype(dtype).itemsize for dtype, width in self.rows)

    @property
    def num_bytes(self) -> int:
        """Of all pages."""
        return self.num_pages * self.page_bytes

    def like(self, num_pages: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """[dtype] -> [num_pages, width]."""
        number = self.num_pages if num_pages is None else num_pages
        return [jax.ShapeDtypeStruct((number, width), dtype) for dtype, width in self.rows]


@dataclass(frozen=True)
class PageForm:
    """Where each array stands in a page.

    Attributes:
        arrays: shape and dtype of each.
        behind: of the same page, what stands before them.
    """

    arrays: tuple[jax.ShapeDtypeStruct, ...]
    behind: tuple[jax.ShapeDtypeStruct, ...] = ()

    @cached_property
    def ends(self) -> dict[Any, int]:
        """Dtype -> numbers of it, all together."""
        ends: dict[Any, int] = {}
        for like in (*self.behind, *self.arrays):
            ends[like.dtype] = ends.get(like.dtype, 0) + like.size
        return ends

    def write(self, pool: list[jax.Array], rows: Pool, page: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """`pool`, of the form `rows`, with `arrays` in `page`, in place."""
        pool = list(pool)
        for (row, start), array in zip(self._places(rows), arrays, strict=True):
            pool[row] = lax.dynamic_update_slice(pool[row], array.reshape(1, -1), (page, start))
        return pool

    def read(self, pool: list[jax.Array], rows: Pool, page: jax.Array) -> list[jax.Array]:
        """The arrays in `page` of `pool`, which has the form `rows`."""
        return [
            lax.dynamic_slice(pool[row], (page, start), (1, like.size)).reshape(like.shape)
            for (row, start), like in zip(self._places(rows), self.arrays, strict=True)
        ]

    def _places(self, rows: Pool) -> list[tuple[int, int]]:
        """[array] its row, and where in the row it starts."""
        dtypes = [dtype for dtype, _ in rows.rows]
        ends = PageForm(self.behind).ends
        places = []
        for like in self.arrays:
            start = ends.get(like.dtype, 0)
            places.append((dtypes.index(like.dtype), start))
            ends[like.dtype] = start + like.size
        return places


def pool_of(num_pages: int, *forms: PageForm) -> Pool:
    """A pool of pages in each of which one of `forms` has room."""
    dtypes = dict.fromkeys(dtype for form in forms for dtype in form.ends)
    return Pool(num_pages, tuple((dtype, max(form.ends.get(dtype, 0) for form in forms)) for dtype in dtypes))
