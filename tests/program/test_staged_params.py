"""Layers are split so that no other split has a cheaper largest stage."""

import itertools

import pytest

from jaxpipe.errors import CompileError
from jaxpipe.program import balanced_split


def splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Every way to give each stage at least one layer."""
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    edges = [(0, *cut, num_layers) for cut in cuts]
    return [tuple(after - before for before, after in itertools.pairwise(edge)) for edge in edges]


def largest_cost(counts: tuple[int, ...], embedding_layers: float, head_layers: float) -> float:
    costs = list(map(float, counts))
    costs[0] += embedding_layers
    costs[-1] += head_layers
    return max(costs)


@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.25, 2.5), (3.0, 1.0), (0.1, 20.0)])
def test_no_split_has_a_cheaper_largest_stage(ends):
    embedding_layers, head_layers = ends
    for num_layers, num_stages in itertools.product((5, 6, 8, 11, 13), (1, 2, 3, 4, 5)):
        counts = balanced_split(num_layers, num_stages, embedding_layers=embedding_layers, head_layers=head_layers)
        everyone = splits(num_layers, num_stages)
        assert counts in everyone, (num_layers, num_stages)
        least = min(largest_cost(other, *ends) for other in everyone)
        assert largest_cost(counts, *ends) == least, (num_layers, num_stages)


@pytest.mark.parametrize(
    ("num_layers", "counts"),
    [
        (8, (2, 2, 2, 2)),
        (9, (2, 3, 2, 2)),
        (10, (2, 3, 3, 2)),
        (11, (3, 3, 3, 2)),
        (4, (1, 1, 1, 1)),
    ],
)
def test_without_costs_counts_differ_by_one_and_the_ends_stay_short_first(num_layers, counts):
    assert balanced_split(num_layers, 4) == counts


def test_what_the_ends_cost_moves_layers_inwards():
    assert balanced_split(32, 4, head_layers=4.0) == (9, 9, 9, 5)
    assert balanced_split(32, 4, embedding_layers=4.0) == (5, 9, 9, 9)
    assert balanced_split(32, 4, embedding_layers=2.0, head_layers=2.0) == (7, 9, 9, 7)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(CompileError, match=r"num_layers=3 on num_stages=4.\n *rule layer-per-stage"):
        balanced_split(3, 4)
