"""What a program keeps from an action to a later one: in which pools, and how their pages look.

A forward keeps residuals for the backward. Where backwards are in two parts, W reads some of them as well, and what I
leaves for it. A slot, one page a layer, lives from F to the last action that reads it; what I leaves takes the place of
what only I has read, as far as there is room, and the rest has pages of its own, from I to W.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.pages import Pages
from jaxpipe.program.kept import Kept, Shapes
from jaxpipe.program.pages import PageForm, Pool, pool_of

_MOST_SUMS = 10_000  # of array sizes that are compared; a layer has a dozen arrays, mostly multiples of one size

Pools = list[list[jax.Array]]  # [pool][dtype] -> [num_pages, width]


@dataclass(frozen=True)
class Place:
    """Where some arrays stand.

    Attributes:
        chosen: their indices among all of their kind.
        pool: index.
        form: of their part of a page.
    """

    chosen: tuple[int, ...]
    pool: int
    form: PageForm


@dataclass(frozen=True, eq=False)
class Storage:
    """Pools, and where in their pages things stand.

    Attributes:
        kept: what is stored.
        pools: of slots; and of what has no room there, if anything.
        grids: [pool] which page of it each layer has in each round.
        for_weights, for_inputs: of the residuals those that W reads, and the others.
        left: of what I leaves, where each part stands.
    """

    kept: Kept
    pools: tuple[Pool, ...]
    grids: tuple[Pages, ...]
    for_weights: Place
    for_inputs: Place
    left: tuple[Place, ...]

    @property
    def page_bytes(self) -> int:
        """Of the pages of one layer and microbatch, those of all pools together."""
        return sum(pool.page_bytes for pool in self.pools)

    @property
    def num_bytes(self) -> int:
        """Of all pools."""
        return sum(pool.num_bytes for pool in self.pools)

    def write_residuals(self, pools: Pools, pages: jax.Array, residuals: Sequence[jax.Array]) -> Pools:
        """`pools` with what forward keeps; `pages` [pool] are those of its layer."""
        return self._write(pools, pages, (self.for_inputs, self.for_weights), residuals)

    def read_residuals(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """What forward has kept."""
        return self._read(pools, pages, (self.for_inputs, self.for_weights))

    def write_left(self, pools: Pools, pages: jax.Array, left: Sequence[jax.Array]) -> Pools:
        """`pools` with what I leaves; residuals for it alone are then gone."""
        return self._write(pools, pages, self.left, left)

    def read_left(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """What I has left."""
        return self._read(pools, pages, self.left)

    def read_for_weights(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """The residuals that W reads."""
        return self._read(pools, pages, (self.for_weights,))

    def _write(self, pools: Pools, pages: jax.Array, places: Iterable[Place], arrays: Sequence[jax.Array]) -> Pools:
        pools = list(pools)
        for place in places:
            k, chosen = place.pool, [arrays[i] for i in place.chosen]
            pools[k] = place.form.write(pools[k], self.pools[k], pages[k], chosen)
        return pools

    def _read(self, pools: Pools, pages: jax.Array, places: Iterable[Place]) -> list[jax.Array]:
        """In the order of their indices."""
        found: dict[int, jax.Array] = {}
        for place in places:
            k = place.pool
            found.update(zip(place.chosen, place.form.read(pools[k], self.pools[k], pages[k]), strict=True))
        return [found[i] for i in sorted(found)]


def make_storage(table: RoundTable, kept: Kept) -> Storage:
    """The storage of `table`, whose pages hold `kept`."""
    weights, inputs = _of(kept.residuals, kept.for_weights), _of(kept.residuals, kept.for_inputs)
    in_place = _fitting(kept.left, PageForm(inputs).ends)
    apart = tuple(i for i in range(len(kept.left)) if i not in in_place)
    for_weights = Place(kept.for_weights, 0, PageForm(weights))
    for_inputs = Place(kept.for_inputs, 0, PageForm(inputs, behind=weights))
    left = [Place(in_place, 0, PageForm(_of(kept.left, in_place), behind=weights))]
    pools, grids = [pool_of(table.pages.num_pages, for_weights.form, for_inputs.form)], [table.pages]
    if apart:
        left.append(Place(apart, 1, PageForm(_of(kept.left, apart))))
        pools.append(pool_of(table.weight_gradient_pages.num_pages, left[1].form))
        grids.append(table.weight_gradient_pages)
    return Storage(kept, tuple(pools), tuple(grids), for_weights, for_inputs, tuple(left))


def _of(shapes: Shapes, chosen: Iterable[int]) -> Shapes:
    return tuple(shapes[i] for i in chosen)


def _fitting(shapes: Shapes, room: dict) -> tuple[int, ...]:
    """Indices of the arrays that together fill `room`, dtype -> numbers, best, as far as `_MOST_SUMS` shows."""
    fitting: list[int] = []
    for dtype, width in room.items():
        filled: dict[int, tuple[int, ...]] = {0: ()}  # numbers -> the arrays that have as many
        for i, like in enumerate(shapes):
            if like.dtype == dtype:
                more = {numbers + like.size: (*chosen, i) for numbers, chosen in filled.items()}
                filled |= {numbers: chosen for numbers, chosen in more.items() if numbers <= width}
                filled = dict(sorted(filled.items())[-_MOST_SUMS:])
        fitting += filled[max(filled)]
    return tuple(sorted(fitting))
