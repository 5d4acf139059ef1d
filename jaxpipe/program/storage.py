"""What a program keeps from an action to a later one: in which pools, and how its pages look.

A forward keeps residuals for the backward. Where backwards are in two parts, W reads some of them as well, and what I
leaves for it. That lies in one of two ways, whichever takes fewer bytes:

* in place: a slot is one page a layer from F to W, in which what I leaves takes the place of what only I has read;
* apart: residuals for I alone, residuals for W and what I leaves have a pool each, and pages for as long as they live.
  So it is where I leaves much more than forward keeps, as with recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.pages import Pages
from jaxpipe.program.kept import Kept, Shapes
from jaxpipe.program.pages import PageForm, Pool, pool_of

Pools = list[list[jax.Array]]  # [pool][dtype] -> [num_pages, width]


@dataclass(frozen=True, eq=False)
class Storage:
    """Pools, and where in their pages things stand.

    Attributes:
        kept: what is stored.
        pools: residuals for W first, then, if apart, those for I alone and what I leaves; or all in one.
        grids: [pool] which page of it each layer has in each round.
        for_inputs, for_weights, left: the pool of each kind of `kept`, and its form.
    """

    kept: Kept
    pools: tuple[Pool, ...]
    grids: tuple[Pages, ...]
    for_inputs: tuple[int, PageForm]
    for_weights: tuple[int, PageForm]
    left: tuple[int, PageForm]

    @property
    def travelling(self) -> tuple[Pool, ...]:
        """The pools whose pages EVICT and LOAD move: all but one for what I leaves alone."""
        return self.pools[:2]

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
        for chosen, place in ((self.kept.for_inputs, self.for_inputs), (self.kept.for_weights, self.for_weights)):
            pools = self._write(pools, pages, place, [residuals[i] for i in chosen])
        return pools

    def read_residuals(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """What forward has kept."""
        found: dict[int, jax.Array] = {}
        for chosen, place in ((self.kept.for_inputs, self.for_inputs), (self.kept.for_weights, self.for_weights)):
            found.update(zip(chosen, self._read(pools, pages, place), strict=True))
        return [found[i] for i in range(len(found))]

    def write_left(self, pools: Pools, pages: jax.Array, left: Sequence[jax.Array]) -> Pools:
        """`pools` with what I leaves; residuals for it alone are then gone."""
        return self._write(pools, pages, self.left, left)

    def read_for_weights(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """The residuals that W reads."""
        return self._read(pools, pages, self.for_weights)

    def read_left(self, pools: Pools, pages: jax.Array) -> list[jax.Array]:
        """What I has left."""
        return self._read(pools, pages, self.left)

    def _write(self, pools: Pools, pages: jax.Array, place: tuple[int, PageForm], arrays: Sequence[jax.Array]) -> Pools:
        k, form = place
        written = form.write(pools[k], self.pools[k], pages[k], arrays)
        return [*pools[:k], written, *pools[k + 1 :]]

    def _read(self, pools: Pools, pages: jax.Array, place: tuple[int, PageForm]) -> list[jax.Array]:
        k, form = place
        return form.read(pools[k], self.pools[k], pages[k])


def make_storage(table: RoundTable, kept: Kept) -> Storage:
    """The storage of `table` that takes fewest bytes."""
    inputs, weights = (tuple(kept.residuals[i] for i in chosen) for chosen in (kept.for_inputs, kept.for_weights))
    in_place = _in_place(table.pages, kept, inputs, weights)
    if not table.has_halves:
        return in_place
    forms = [PageForm(shapes) for shapes in (weights, inputs, kept.left)]
    grids = (table.pages, table.input_gradient_pages, table.weight_gradient_pages)
    pools = tuple(pool_of(grid.num_pages, form) for grid, form in zip(grids, forms, strict=True))
    apart = Storage(kept, pools, grids, for_weights=(0, forms[0]), for_inputs=(1, forms[1]), left=(2, forms[2]))
    return min(in_place, apart, key=lambda storage: storage.num_bytes)


def _in_place(grid: Pages, kept: Kept, inputs: Shapes, weights: Shapes) -> Storage:
    forms: Any = {
        "for_weights": PageForm(weights),
        "for_inputs": PageForm(inputs, behind=weights),
        "left": PageForm(kept.left, behind=weights),
    }
    pool = pool_of(grid.num_pages, *forms.values())
    return Storage(kept, (pool,), (grid,), **{name: (0, form) for name, form in forms.items()})
