"""Storage of saved residuals between the actions that write and read them: pages, pools of pages, and places in them.

A page holds all that one layer saves for one microbatch and span, in one row for each dtype. A page is the unit of
storage and of transfer, so it has as few arrays as possible: moving a page moves one slice of each. Rows are flat:
between a forward and a backward that prefer different orders of dims, XLA would bring a whole array from one order into
the other.

F saves residuals for the backward. If backwards are split, W also reads some of them, and the values that I
defers to it. A slot, one page a layer, lives from F to the last action that reads it. Deferred values overwrite the
residuals that only I reads, as far as they fit; the rest has its own pages, from I to W:

    page of a slot, from F    | shared with W | only for I               |
    the same page, from I     | shared with W | deferred, what fits |    |
    page of its own, from I   | deferred, the rest |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.pages import Layers, Pages, Span

_MAX_SUMS = 10_000  # array sizes to compare; a layer has a dozen arrays, mostly multiples of one size

Shapes = tuple[jax.ShapeDtypeStruct, ...]
Pools = list[list[jax.Array]]  # [pool][dtype] -> [num_pages, width]
Page = list[jax.Array]  # [dtype] -> [1, width]


@dataclass(frozen=True)
class SavedResiduals:
    """The arrays that one layer saves for one microbatch, on one device."""

    residuals: Shapes  # shape and dtype of each array that F saves
    shared_with_w: tuple[int, ...] = ()  # indices of the residuals that W reads; I may read them too
    deferred: Shapes = ()  # shape and dtype of each array that I defers to its W

    @property
    def only_for_i(self) -> tuple[int, ...]:
        """Indices of the residuals that W does not read."""
        return tuple(i for i in range(len(self.residuals)) if i not in self.shared_with_w)

    @cached_property
    def without_place(self) -> tuple[int, ...]:
        """Indices of the deferred arrays that do not fit in the place of residuals, and have pages of their own."""
        in_place = fitting_deferred(self)
        return tuple(i for i in range(len(self.deferred)) if i not in in_place)

    @property
    def forms(self) -> tuple[PageForm, PageForm]:
        """What a page of each of its two pools has room for."""
        return PageForm(self.residuals), PageForm(_select(self.deferred, self.without_place))


# Pages and pools


@dataclass(frozen=True)
class Pool:
    """The shape of a pool of pages, all of one size."""

    num_pages: int
    rows: tuple[tuple[Any, int], ...]  # (dtype, width): how many elements of each dtype a page has

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(width * jnp.dtype(dtype).itemsize for dtype, width in self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def like(self, num_pages: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """The arrays of the pool: [dtype] -> [num_pages, width]."""
        number = self.num_pages if num_pages is None else num_pages
        return [jax.ShapeDtypeStruct((number, width), dtype) for dtype, width in self.rows]


@dataclass(frozen=True)
class PageForm:
    """The place of each array in a page.

    Example:
        A float32 [2, 3] follows a float32 [5], so its elements are 5 to 10 of the page's float32 row.

        >>> x, scale = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((5,), "float32")
        >>> form = PageForm((x,), preceding=(scale,))
        >>> form.num_elements
        {dtype('float32'): 11}
        >>> pool = pool_for(4, form)
        >>> slots = form.write([jnp.zeros(like.shape) for like in pool.like()], pool, 2, [jnp.ones((2, 3))])
        >>> slots[0][2].tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """

    arrays: Shapes  # shape and dtype of each array
    preceding: Shapes = ()  # the arrays before them in the same page

    @cached_property
    def num_elements(self) -> dict[Any, int]:
        """Dtype -> elements of all arrays together, preceding ones included."""
        totals: dict[Any, int] = {}
        for like in (*self.preceding, *self.arrays):
            totals[like.dtype] = totals.get(like.dtype, 0) + like.size
        return totals

    def write(
        self, slots: list[jax.Array], pool: Pool, page: jax.Array | int, arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns `slots`, the arrays of `pool`, with `arrays` written into `page`, in place."""
        slots = list(slots)
        for (row, start), array in zip(self._places(pool), arrays, strict=True):
            # Flat, see the module.
            slots[row] = lax.dynamic_update_slice(slots[row], array.reshape(1, -1), (page, start))
        return slots

    def read(self, slots: list[jax.Array], pool: Pool, page: jax.Array | int) -> list[jax.Array]:
        """Returns the arrays in `page` of `slots`, the arrays of `pool`."""
        return [
            lax.dynamic_slice(slots[row], (page, start), (1, like.size)).reshape(like.shape)
            for (row, start), like in zip(self._places(pool), self.arrays, strict=True)
        ]

    def _places(self, pool: Pool) -> list[tuple[int, int]]:
        """[array] its row, and its start in that row."""
        dtypes = [dtype for dtype, _ in pool.rows]
        filled = PageForm(self.preceding).num_elements
        places = []
        for like in self.arrays:
            start = filled.get(like.dtype, 0)
            places.append((dtypes.index(like.dtype), start))
            filled[like.dtype] = start + like.size
        return places


def pool_for(num_pages: int, *forms: PageForm) -> Pool:
    """The smallest pool whose pages have room for any one of `forms`."""
    # Not a set: the order of rows must be the same in every process.
    dtypes = dict.fromkeys(dtype for form in forms for dtype in form.num_elements)
    return Pool(num_pages, tuple((dtype, max(form.num_elements.get(dtype, 0) for form in forms)) for dtype in dtypes))


def empty_pages(pool: Pool, num_pages: int, empty: Callable[..., jax.Array]) -> list[jax.Array]:
    """Pages of a pool, [dtype] -> [num_pages, width]; `empty` makes storage of a shape and dtype."""
    return [empty(row.shape, row.dtype) for row in pool.like(num_pages)]


# The storage of a step


@dataclass(frozen=True)
class Place:
    """The place of some of the saved arrays."""

    chosen: tuple[int, ...]  # indices of the arrays among the residuals, or among the deferred arrays
    pool: int
    form: PageForm


@dataclass(frozen=True, eq=False)
class Storage:
    """The pools of a step, and the places of all arrays in their pages."""

    saved: SavedResiduals
    pools: tuple[Pool, ...]  # one of slots; and one for the deferred arrays that do not fit there, if any
    grids: tuple[Pages, ...]  # [pool] the page of each layer in each round
    pages_per_slot: int  # layers of the longest stage
    shared_with_w: Place  # of the residuals
    only_for_i: Place  # of the residuals
    deferred: tuple[Place, ...]  # of each part of the deferred arrays
    first_pool: int = 0  # its place among those of the step: layers that save otherwise have pools of their own

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages of one layer and microbatch, those of all pools together."""
        return sum(pool.page_bytes for pool in self.pools)

    @property
    def slot_bytes(self) -> int:
        """Bytes per device of one slot, on the longest stage; deferred arrays with pages of their own do not count."""
        return self.pages_per_slot * self.pools[0].page_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes per device of all pools."""
        return sum(pool.num_bytes for pool in self.pools)

    def write_residuals(self, pools: Pools, pages: jax.Array, residuals: Sequence[jax.Array]) -> Pools:
        """Returns `pools` with the residuals of one layer, which F saves.

        Args:
            pages: [pool] the page of the layer.
            residuals: arrays in the order of `saved.residuals`.
        """
        return self._write(pools, pages, (self.only_for_i, self.shared_with_w), residuals)

    def read_residuals(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """Returns all residuals of one layer, for its B or I."""
        return self._read(pools, pages, (self.only_for_i, self.shared_with_w))

    def write_deferred(self, pools: Pools, pages: jax.Array, deferred: Sequence[jax.Array]) -> Pools:
        """Returns `pools` with the arrays that I defers to its W, which overwrite the residuals that only I reads."""
        return self._write(pools, pages, self.deferred, deferred)

    def read_deferred(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """Returns the arrays that I has deferred to its W."""
        return self._read(pools, pages, self.deferred)

    def read_shared_with_w(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """Returns the residuals that W reads."""
        return self._read(pools, pages, (self.shared_with_w,))

    def _write(self, pools: Pools, pages: jax.Array, places: Iterable[Place], arrays: Sequence[jax.Array]) -> Pools:
        # A copy of the list, not of the arrays: the caller's stays as it was.
        pools = list(pools)
        for place in places:
            pool = self.pools[place.pool]
            k = self.first_pool + place.pool
            chosen = [arrays[i] for i in place.chosen]
            pools[k] = place.form.write(pools[k], pool, pages[k], chosen)
        return pools

    def _read(self, pools: Pools, pages: jax.Array, places: Iterable[Place]) -> list[jax.Array]:
        """The arrays of `places`, in the order of their indices."""
        # Places stand in the order of the page, callers count in that of the residuals.
        arrays: dict[int, jax.Array] = {}
        for place in places:
            pool = self.pools[place.pool]
            k = self.first_pool + place.pool
            arrays.update(zip(place.chosen, place.form.read(pools[k], pool, pages[k]), strict=True))
        return [arrays[i] for i in sorted(arrays)]


def make_storage(
    table: RoundTable, saved: SavedResiduals, *, layers: Layers | None = None, first_pool: int = 0
) -> Storage:
    """The storage of `table`, whose pages hold `saved`: of all layers, or of some that have pools of their own."""
    slots = table.pages if layers is None else table.pages_of(Span.SLOT, layers)
    shared = _select(saved.residuals, saved.shared_with_w)
    only = _select(saved.residuals, saved.only_for_i)
    in_place = fitting_deferred(saved)
    rest = saved.without_place
    shared_with_w = Place(saved.shared_with_w, 0, PageForm(shared))
    only_for_i = Place(saved.only_for_i, 0, PageForm(only, preceding=shared))
    deferred = [Place(in_place, 0, PageForm(_select(saved.deferred, in_place), preceding=shared))]
    pools = [pool_for(slots.num_pages, shared_with_w.form, only_for_i.form)]
    grids = [slots]
    if rest:
        apart = table.weight_gradient_pages if layers is None else table.pages_of(Span.WEIGHT_GRADIENT, layers)
        deferred.append(Place(rest, 1, PageForm(_select(saved.deferred, rest))))
        pools.append(pool_for(apart.num_pages, deferred[1].form))
        grids.append(apart)
    return Storage(
        saved,
        tuple(pools),
        tuple(grids),
        max(table.layers_per_stage),
        shared_with_w,
        only_for_i,
        tuple(deferred),
        first_pool,
    )


def fitting_deferred(saved: SavedResiduals) -> tuple[int, ...]:
    """Indices of the deferred arrays that take the place of residuals; the others have pages of their own."""
    # I has read these residuals when it writes; W reads the others, so only these are overwritten.
    return _fitting(saved.deferred, PageForm(_select(saved.residuals, saved.only_for_i)).num_elements)


def _select(shapes: Shapes, chosen: Iterable[int]) -> Shapes:
    return tuple(shapes[i] for i in chosen)


def _fitting(arrays: Shapes, room: dict[Any, int]) -> tuple[int, ...]:
    """Indices of the arrays that together fill `room` (dtype -> elements) best."""
    # A row has one dtype, so room of one cannot hold another.
    fitting: list[int] = []
    for dtype, free in room.items():
        same = [i for i, like in enumerate(arrays) if like.dtype == dtype]
        fitting += [same[k] for k in fullest_subset([arrays[i].size for i in same], free)]
    return tuple(sorted(fitting))


def fullest_subset(sizes: Sequence[int], free: int) -> tuple[int, ...]:
    """Indices of the sizes whose sum comes closest to `free` without exceeding it.

    The subset-sum problem, solved sum by sum: after each size, `reached` maps every sum of some of the sizes so far to
    one choice of them. Of more than `_MAX_SUMS` sums only the largest are kept.

    Example:
        Of 8 free elements, arrays of 5, 4 and 3 fill all: 5 + 3. The sums reached are {0}, {0, 5}, {0, 4, 5} (9 is too
        much), {0, 3, 4, 5, 7, 8}. Taking the largest array first, 5, and then any that fits is as good here, but not
        for 7 free elements: 4 + 3.

        >>> fullest_subset([5, 4, 3], free=8)
        (0, 2)
        >>> fullest_subset([5, 4, 3], free=7)
        (1, 2)
    """
    reached: dict[int, tuple[int, ...]] = {0: ()}
    for i, size in enumerate(sizes):
        more = {total + size: (*chosen, i) for total, chosen in reached.items()}
        reached |= {total: chosen for total, chosen in more.items() if total <= free}
        reached = dict(sorted(reached.items())[-_MAX_SUMS:])
    return reached[max(reached)]
