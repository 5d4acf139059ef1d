"""Means of several kinds of loss are over the whole batch, and one of no terms is 0, not NaN."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpipe.training import loop
from jaxpipe.training.step import mean_factors


def test_a_mean_of_nothing_is_zero():
    found = mean_factors({"many": np.int32(4), "none": np.int32(0)})
    assert {name: float(value) for name, value in found.items()} == {"many": 0.25, "none": 1.0}


def test_held_out_means_weigh_every_term_alike(monkeypatch):
    """Two batches, of 3 words and 1, and of no sequence and 2."""
    sums = [{"words": 6.0, "order": 0.0}, {"words": 4.0, "order": 3.0}]
    nums = [{"words": 3, "order": 0}, {"words": 1, "order": 2}]
    monkeypatch.setattr(loop, "put_batch", lambda _, batch: batch)
    setup: Any = SimpleNamespace(
        pipeline=None,
        task=SimpleNamespace(
            model=SimpleNamespace(num_losses=nums.__getitem__),
            heldout_batches=SimpleNamespace(first=lambda num_batches: range(num_batches)),
        ),
    )
    found = loop.heldout_losses(lambda _, batch: sums[batch], setup, None, num_batches=2)
    assert found == pytest.approx({"eval_loss": 2.5 + 1.5, "eval_words_loss": 2.5, "eval_order_loss": 1.5})
