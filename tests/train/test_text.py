"""What a config's `data` makes of its sources."""

from fractions import Fraction

import numpy as np
import pytest

from jaxpipe.config import base_config
from jaxpipe.data import Blend, Documents
from jaxpipe.data.indexed_writer import write_indexed
from jaxpipe.errors import DataError
from jaxpipe.training.batches import batches_of, example_batch, padding_of, read_corpus


def small(family="gpt"):
    config = base_config(family)
    config.model.vocab_size = 300
    config.data.update(batch_size=4, seq_len=16)
    config.pipeline.num_microbatches = 2
    return config


def test_sources_of_the_same_text_are_masked_each_in_its_own_way():
    config = small("bert")
    tokens = Documents.one(np.tile(np.arange(200), 20))
    batches = batches_of(config, Blend((tokens, tokens), (Fraction(1), Fraction(1))))
    first, second = (source.take(np.arange(100), epoch=0) for source in batches.sources)
    # One or two of 13 words: by chance one in 13 rows, at most, is masked in the same place.
    assert (first["predicted"] == second["predicted"]).all(axis=1).mean() < 0.3
    assert first["tokens"].shape == (100, 16)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_an_example_is_a_whole_batch(family):
    assert example_batch(small(family))["tokens"].shape == (2, 2, 16)


@pytest.mark.parametrize("packing", ["windows", "documents", "none"])
def test_an_example_has_the_arrays_of_its_packing(packing):
    config = small()
    config.data.packing = packing
    batch = example_batch(config)
    assert ("positions" in batch) == (packing == "documents")
    assert {values.shape for values in batch.values()} == {(2, 2, 16)}
    assert (batch["targets"] >= 0).all()


@pytest.mark.parametrize(
    ("family", "token", "is_known"), [("gpt", 299, True), ("gpt", 300, False), ("bert", 260, False)]
)
def test_a_token_is_in_the_vocabulary_of_the_model_and_of_a_masked_models_tokenizer(tmp_path, family, token, is_known):
    config = small(family)
    with write_indexed(str(tmp_path / "a"), vocab_size=1000) as writer:
        writer.add(np.full(5000, token))
    config.data.files = f"indexed:{tmp_path / 'a'}"
    batches = batches_of(config, read_corpus(config).train)
    if is_known:
        assert (batches.at(0)["tokens"] == token).all()
    else:
        with pytest.raises(DataError, match=rf"a.bin: token {token} at position \d+ is not in the vocabulary"):
            batches.at(0)


def test_a_run_says_how_its_rows_are_filled():
    config = small()
    documents = Documents.ending_at(np.arange(20) % 7, lambda: np.array([13, 20]))
    said = {}
    for packing in ("windows", "documents", "none"):
        config.data.packing = packing
        said[packing] = padding_of(batches_of(config, Blend((documents,))))
    assert said == {
        "windows": "",
        "documents": "; 2 rows of documents back to back, 43.75% padding",
        "none": "; 2 rows of one document each, 43.75% padding",
    }
    config.data.seq_len = 8
    said = padding_of(batches_of(config, Blend((documents,))))
    assert said == "; 3 rows of one document each, 25.00% padding; longer than a row and so cut: 1 of 2 documents"


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_routers_are_told_what_is_padding(packing):
    config = small("mixtral")
    config.data.packing, config.data.batch_size, config.pipeline.num_microbatches = packing, 2, 1
    documents = Documents.ending_at(np.arange(20) % 7, lambda: np.array([13, 20]))
    batch = batches_of(config, Blend((documents,))).at(0)
    np.testing.assert_array_equal(batch["is_token"], batch["targets"] >= 0)
    assert batch["is_token"].sum() == 12 + 6
