"""Which sequences a step sees: a function of (sources, weights, seed, step) alone."""

import threading
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from small_masked import SEQUENCES as MASKED
from tiers import tiers

from jaxpipe.data import Batches, CausalSequences
from jaxpipe.data.corpus import CheckedTokens
from jaxpipe.errors import DataError

SEQUENCES = CausalSequences(np.arange(103), seq_len=5)
BATCHES = Batches((SEQUENCES,), batch_size=6, num_microbatches=3, seed=0)  # 20 sequences
# 20, 6 and 40 sequences, told apart by their tokens' thousands.
BLEND = Batches(
    (SEQUENCES, CausalSequences(np.arange(1000, 1031), 5), CausalSequences(np.arange(2000, 2201), 5)),
    batch_size=8,
    num_microbatches=2,
    seed=3,
    weights=(Fraction(1), Fraction(2), Fraction(5)),
)
MASKED_BLEND = Batches((MASKED, replace(MASKED, seed=1)), 12, 2, seed=0, weights=(Fraction(1), Fraction(2)))
ALL = [BATCHES, BLEND, MASKED_BLEND]


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def first_tokens(batches, num_steps):
    """The first token of each sequence, in order; it says which one it is."""
    return np.concatenate([batches.at(step)["tokens"][..., 0].ravel() for step in range(num_steps)]).tolist()


def test_targets_are_the_next_tokens():
    batch = BATCHES.at(0)
    assert batch["tokens"].shape == batch["targets"].shape == (3, 2, 5)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)


def test_an_epoch_has_every_sequence_once_and_the_next_one_follows_within_a_batch():
    seen = first_tokens(BATCHES, 10)  # 60 sequences are three epochs
    epochs = [seen[0:20], seen[20:40], seen[40:60]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 100, 5))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_sources_of_a_blend_have_epochs_of_their_own_and_their_shares():
    seen = first_tokens(BLEND, 60)
    for source, (begin, num_sequences, share) in enumerate([(0, 20, 1 / 8), (1000, 6, 2 / 8), (2000, 40, 5 / 8)]):
        own = [token for token in seen if token // 1000 == source]
        assert len(own) == 480 * share
        for start in range(0, len(own) - num_sequences + 1, num_sequences):
            epoch = own[start : start + num_sequences]
            assert sorted(epoch) == list(range(begin, begin + 5 * num_sequences, 5))


def test_every_batch_of_a_blend_has_each_source_in_its_share():
    for step in range(20):
        tokens = BLEND.at(step)["tokens"][..., 0].ravel()
        assert Counter((tokens // 1000).tolist()) == {0: 1, 1: 2, 2: 5}


def test_a_sequence_of_a_blend_comes_from_one_source():
    for step in range(20):
        tokens = BLEND.at(step)["tokens"]
        np.testing.assert_array_equal(tokens, tokens[..., :1] + np.arange(5))


def test_each_source_of_masked_ones_is_taken_in_the_epoch_it_is_in():
    few = replace(MASKED, tokens=MASKED.tokens[: 4 * (MASKED.seq_len - 3)])
    batches = Batches((few, MASKED), 3, 1, seed=0, weights=(Fraction(2), Fraction(1)))
    seen = [{name: values[0] for name, values in batches.at(step).items()} for step in range(6)]
    joined = {name: np.concatenate([batch[name] for batch in seen]) for name in seen[0]}
    is_few = np.arange(18) % 3 != 2  # of three places the last is the second source's
    for epoch in range(3):
        rows = np.flatnonzero(is_few)[4 * epoch : 4 * epoch + 4]
        expected = few.take(np.arange(4), epoch=epoch)
        assert sorted(joined["tokens"][rows].tolist()) == sorted(expected["tokens"].tolist())


def test_same_seed_and_step_give_the_same_batch_and_others_do_not():
    again = replace(BATCHES)
    np.testing.assert_array_equal(BATCHES.at(7)["tokens"], again.at(7)["tokens"])
    assert not np.array_equal(BATCHES.at(7)["tokens"], replace(BATCHES, seed=1).at(7)["tokens"])


@pytest.mark.parametrize("batches", ALL)
def test_neither_microbatches_nor_the_size_of_a_batch_change_the_order(batches):
    size = batches.batch_size
    whole = replace(batches, batch_size=4 * size, num_microbatches=1).at(1)
    steps = [batches.at(step) for step in range(4, 8)]
    joined = {name: np.concatenate([step[name].reshape(size, -1) for step in steps]) for name in steps[0]}
    assert_same({name: values.reshape(4 * size, -1) for name, values in whole.items()}, joined)


@pytest.mark.parametrize("batches", ALL)
def test_the_rows_of_any_processes_together_are_the_batch(batches):
    draw = np.random.default_rng(0)
    microbatch_size = batches.batch_size // batches.num_microbatches
    for step in range(12):
        whole = batches.at(step)
        process = draw.integers(3, size=microbatch_size)  # which of three processes has a row
        joined = {name: np.full_like(values, -7) for name, values in whole.items()}
        for rows in (np.flatnonzero(process == index) for index in set(process.tolist())):
            part = batches.at(step, rows)
            for name, values in part.items():
                joined[name][:, rows] = values
        assert_same(joined, whole)


@pytest.mark.parametrize("batches", ALL)
@pytest.mark.parametrize("step", tiers([0, 17], slow=[1, 10**9]))
def test_what_is_read_ahead_is_what_each_step_has_from_wherever_a_run_goes_on(batches, step):
    rows = np.array([1])
    for found, expected in zip(islice(batches.following(step), 10), range(step, step + 10), strict=True):
        assert_same(found, batches.at(expected))
    for found, expected in zip(islice(batches.following(step, rows), 3), range(step, step + 3), strict=True):
        assert_same(found, batches.at(expected, rows))


def reading_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")}


def test_closing_ends_the_threads():
    before = reading_threads()
    following = BATCHES.following(0)
    next(following)
    started = reading_threads() - before
    assert started
    following.close()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert next(following, None) is None


def test_an_error_in_a_thread_is_raised_at_its_batch_and_ends_the_threads():
    tokens = np.arange(103)
    tokens[52] = 5000  # of the sequence that begins with 50
    known = CausalSequences(CheckedTokens(tokens, "x.bin", 103), 5)
    batches = Batches((known,), batch_size=2, num_microbatches=1, seed=0)
    clean = replace(batches, sources=(SEQUENCES,))
    bad_step = next(step for step in range(10) if 50 in clean.at(step)["tokens"][..., 0])
    assert bad_step > 0
    before = reading_threads()
    following = batches.following(0)
    for step in range(bad_step):
        assert_same(next(following), clean.at(step))
    with pytest.raises(DataError, match=r"^x.bin: token 5000 at position 52 is not in the vocabulary\n"):
        next(following)
    for thread in reading_threads() - before:
        thread.join(timeout=60)
        assert not thread.is_alive()


@dataclass(frozen=True)
class CountedSequences:
    """Sequences that note which of them are taken."""

    sequences: CausalSequences
    taken: list

    @property
    def num_sequences(self):
        return self.sequences.num_sequences

    def take(self, indices, *, epoch):
        self.taken.append(len(indices))
        return self.sequences.take(indices, epoch=epoch)


def test_a_process_reads_its_own_rows_alone_and_only_a_few_batches_ahead():
    counted = CountedSequences(SEQUENCES, [])
    batches = Batches((counted,), batch_size=12, num_microbatches=3, seed=0)
    batches.at(0, np.array([1]))
    assert counted.taken == [3]
    counted.taken.clear()
    following = batches.following(100)
    next(following)
    following.close()
    for thread in reading_threads():
        thread.join(timeout=60)
    assert sum(counted.taken) <= 6 * 12  # the first, four ahead and one more


def test_evaluation_sees_every_sequence_once_and_marks_what_is_missing():
    batches = list(BATCHES.first(100))
    assert len(batches) == 4
    valid = np.concatenate([batch["targets"][batch["targets"] >= 0] for batch in batches])
    assert sorted(valid.tolist()) == list(range(1, 101))
    assert (batches[-1]["targets"] < 0).sum() == 4 * 5
    assert len(list(BATCHES.first(2))) == 2
    # What is missing are rows of the batch once more, so that routers of a mixture see real tokens alone.
    last = batches[-1]["tokens"].reshape(6, 5)
    np.testing.assert_array_equal(last[2:], last[[0, 1, 0, 1]])


def test_evaluation_of_a_blend_ends_before_a_source_repeats():
    batches = list(BLEND.first(100))
    # Two of eight are of the second source, which has six: it repeats in the fourth batch.
    tokens = np.concatenate([batch["tokens"].reshape(8, 5) for batch in batches])
    targets = np.concatenate([batch["targets"].reshape(8, 5) for batch in batches])
    is_valid = (targets >= 0).all(axis=1)
    seen = tokens[is_valid, 0].tolist()
    assert len(set(seen)) == len(seen)
    assert sum(token // 1000 == 1 for token in seen) == 6
    assert 24 <= len(seen) < 32
    assert is_valid.tolist() == sorted(is_valid.tolist(), reverse=True)
