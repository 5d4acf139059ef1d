"""Which sequences a step sees: a function of (sequences, seed, step) alone; here with next tokens to foretell."""

import dataclasses

import numpy as np

from jaxpipe.data import Batches, CausalSequences

SEQUENCES = CausalSequences(np.arange(103), seq_len=5)
BATCHES = Batches(SEQUENCES, batch_size=6, num_microbatches=3, seed=0)  # 20 sequences


def test_targets_are_the_next_tokens():
    batch = BATCHES.at(0)
    assert batch["tokens"].shape == batch["targets"].shape == (3, 2, 5)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)


def test_an_epoch_repeats_no_sequence():
    seen = np.concatenate([BATCHES.at(step)["tokens"][..., 0].ravel() for step in range(3)])
    assert len(set(seen.tolist())) == 18
    assert set(seen.tolist()) <= set(range(0, 100, 5))


def test_same_seed_and_step_give_the_same_batch_and_others_do_not():
    again = dataclasses.replace(BATCHES)
    np.testing.assert_array_equal(BATCHES.at(7)["tokens"], again.at(7)["tokens"])
    assert not np.array_equal(BATCHES.at(7)["tokens"], dataclasses.replace(BATCHES, seed=1).at(7)["tokens"])
    assert not np.array_equal(BATCHES.at(0)["tokens"], BATCHES.at(3)["tokens"])  # the next epoch's first


def test_the_number_of_microbatches_only_groups():
    ungrouped = dataclasses.replace(BATCHES, num_microbatches=1)
    np.testing.assert_array_equal(BATCHES.at(4)["tokens"].reshape(6, 5), ungrouped.at(4)["tokens"].reshape(6, 5))


def test_evaluation_sees_every_sequence_once_and_marks_what_is_missing():
    batches = list(BATCHES.first(100))
    assert len(batches) == 4
    valid = np.concatenate([batch["targets"][batch["targets"] >= 0] for batch in batches])
    assert sorted(valid.tolist()) == list(range(1, 101))
    assert (batches[-1]["targets"] < 0).sum() == 4 * 5
    assert len(list(BATCHES.first(2))) == 2
