"""The endless order of sequences: epochs, shares and seeds, counted one by one."""

from collections import defaultdict
from fractions import Fraction
from functools import cache

import grain
import numpy as np
import pytest

from jaxpipe.data.batches import SequenceOrder
from jaxpipe.errors import ConfigError

ONE = (Fraction(1),)
SIZES, WEIGHTS = (7, 30, 2), (Fraction("0.5"), Fraction("1.25"), Fraction("0.25"))
BLEND = SequenceOrder(SIZES, WEIGHTS, seed=0)
PLACES = np.arange(400)


@cache
def addresses():
    return BLEND.at(PLACES)


def test_every_source_takes_each_of_its_sequences_once_an_epoch_and_its_epochs_one_after_another():
    seen = defaultdict(lambda: defaultdict(list))
    for source, epoch, sequence in addresses().tolist():
        seen[source][epoch].append(sequence)
    assert set(seen) == {0, 1, 2}
    for source, epochs in seen.items():
        assert list(epochs) == list(range(len(epochs)))
        *whole, last = epochs.values()
        assert len(whole) >= 8
        for sequences in whole:
            assert sorted(sequences) == list(range(SIZES[source]))
        assert len(set(last)) == len(last)


@pytest.mark.parametrize(
    "weights", [("0.7", "0.3"), ("0.3", "0.7"), ("1", "1", "1", "1", "1"), ("1e-3", "0.2", "5", "1e-4"), ("2",)]
)
def test_up_to_every_place_each_source_has_had_its_share(weights):
    exact = [Fraction(weight) for weight in weights]
    sources = SequenceOrder((10**6,) * len(exact), tuple(exact), seed=0).at(np.arange(1200))[:, 0]
    for source, weight in enumerate(exact):
        share = float(weight / sum(exact))
        counts = np.cumsum(sources == source)
        assert np.abs(counts - share * np.arange(1, 1201)).max() < len(exact)


def test_shares_are_exact_where_they_are_whole_numbers():
    counts = np.bincount(addresses()[:, 0])
    assert counts.tolist() == [100, 250, 50]  # of 400, a quarter, five eighths and an eighth


def test_a_place_has_the_same_sequence_whatever_is_asked_for_with_it():
    shuffled = np.random.default_rng(0).permutation(PLACES)
    np.testing.assert_array_equal(SequenceOrder(SIZES, WEIGHTS, seed=0).at(shuffled), addresses()[shuffled])


def test_epochs_seeds_and_sources_have_orders_of_their_own():
    def order_of(seed, source, epoch, num=1000):
        order = SequenceOrder((num, num), (Fraction(1), Fraction(1)), seed)
        return order.at(np.arange(2 * num * epoch + source, 2 * num * (epoch + 1), 2))[:, 2]

    orders = [order_of(seed, source, epoch) for seed in (0, 1) for source in (0, 1) for epoch in (0, 1)]
    for index, order in enumerate(orders):
        assert sorted(order.tolist()) == list(range(1000))
        assert (order == np.arange(1000)).sum() < 20  # about one stays where it is, by chance
        for other in orders[:index]:
            assert (order == other).sum() < 20


def test_a_far_place_is_as_near_as_the_first():
    size = 2**32
    ((source, epoch, sequence),) = SequenceOrder((size,), ONE, seed=2**32 - 1).at(np.array([10**15]))
    assert (source, epoch) == (0, 10**15 // size)
    assert 0 <= sequence < size


def test_what_cannot_be_counted_is_said():
    with pytest.raises(ConfigError, match=r"has 4294967297 sequences\n  rule countable-sequences"):
        SequenceOrder((5, 2**32 + 1), (Fraction(1), Fraction(1)), seed=0)


def test_grain_shuffles_as_it_always_has():
    """As its own test of all versions has it, without a promise: a run that goes on relies on it."""
    assert list(grain.MapDataset.range(10).seed(42).shuffle()) == [1, 7, 6, 9, 0, 8, 4, 5, 3, 2]
