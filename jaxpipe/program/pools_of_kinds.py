"""Pools of pages where layers are of several kinds: one for all, or one for those kinds that save alike.

Every device has as many pages of a pool as the one that needs most of them. Where kinds are in turn, pools by kind take
what their layers save. Where one kind has the first layers, and others the rest, most devices hold one pool in vain, so
that one pool of the largest pages may take fewer bytes. Whichever takes fewer is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxpipe.layer_kinds import Pattern
from jaxpipe.lowering import RoundTable
from jaxpipe.program.storage import Pool, SavedResiduals, Storage, make_storage


def storages_of_kinds(table: RoundTable, saves: Sequence[SavedResiduals], pattern: Pattern) -> list[Storage]:
    """[kind] where its layers save: all in the same pools, or in pools by what they save, if these take fewer bytes."""
    together = _with_pages_of_all([make_storage(table, saved) for saved in saves])
    alike = saving_alike(saves)
    # Pages that move to another device are of one size.
    if len(alike) == 1 or len(table.page_moves.layer):
        return together
    apart = dict(enumerate(together))
    num_pools = 0
    num_bytes = 0
    for kinds in alike:
        layers = pattern.places(kinds, table.layers_per_stage)
        own = [make_storage(table, saves[kind], layers=layers, first_pool=num_pools) for kind in kinds]
        apart.update(zip(kinds, _with_pages_of_all(own), strict=True))
        num_pools += len(own[0].pools)
        num_bytes += own[0].num_bytes
    return [apart[kind] for kind in range(len(saves))] if num_bytes < together[0].num_bytes else together


def saving_alike(saves: Sequence[SavedResiduals]) -> list[tuple[int, ...]]:
    """The kinds of layers in groups, each of those that save as many elements of each dtype."""
    groups: dict[Any, list[int]] = {}
    for kind, saved in enumerate(saves):
        groups.setdefault(tuple(frozenset(form.num_elements.items()) for form in saved.forms), []).append(kind)
    return list(map(tuple, groups.values()))


def _with_pages_of_all(storages: Sequence[Storage]) -> list[Storage]:
    """The storages of several kinds of layers with the same pools, whose pages have room for any of the kinds."""
    longest = max(storages, key=lambda storage: len(storage.pools))
    pools = []
    for place, pool in enumerate(longest.pools):
        rows = [dict(storage.pools[place].rows) for storage in storages if place < len(storage.pools)]
        dtypes = dict.fromkeys(dtype for widths in rows for dtype in widths)
        widest = tuple((dtype, max(widths.get(dtype, 0) for widths in rows)) for dtype in dtypes)
        pools.append(Pool(pool.num_pages, widest))
    return [replace(storage, pools=tuple(pools), grids=longest.grids) for storage in storages]
