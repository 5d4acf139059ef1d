"""Files to tokens: determinism, the held-out part, clear errors."""

from pathlib import Path

import numpy as np
import pytest

from jaxpipe.data import load_corpus, load_tokenizer
from jaxpipe.data.corpus import split
from jaxpipe.errors import ConfigError

BYTES = load_tokenizer("byte", is_masked=False)
SIZES = {"tokenizer": BYTES, "heldout_fraction": 0.25, "batch_size": 2, "seq_len": 4}


def test_standard_library_is_real_text_and_the_same_each_time():
    first = load_corpus("auto", tokenizer=BYTES, heldout_fraction=0.05, batch_size=32, seq_len=128)
    again = load_corpus("auto", tokenizer=BYTES, heldout_fraction=0.05, batch_size=32, seq_len=128)
    assert len(first.train) > 5_000_000
    assert 0.03 < len(first.heldout) / (len(first.train) + len(first.heldout)) < 0.07
    np.testing.assert_array_equal(first.train, again.train)
    assert b"\nimport " in first.train.tobytes()
    assert b"\nimport " in first.heldout.tobytes()


def test_glob_takes_files_in_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("def " * 10)
    (tmp_path / "a.txt").write_text("abc " * 10)
    (tmp_path / "a.bin").write_text("no")
    corpus = load_corpus(str(tmp_path / "**" / "*.txt"), **SIZES)
    assert corpus.num_files == 2
    assert len(corpus.train) + len(corpus.heldout) == 82
    assert corpus.train.tobytes().startswith(b"abc ")
    assert b"def " in corpus.train.tobytes()
    assert b"no" not in corpus.train.tobytes()


def test_split_holds_out_whole_blocks_and_loses_nothing():
    tokens = np.arange(40)
    train, heldout = split(tokens, every=4)
    np.testing.assert_array_equal(heldout, np.arange(30, 40))
    np.testing.assert_array_equal(np.sort(np.concatenate([train, heldout])), tokens)


def test_missing_files_name_the_glob(tmp_path):
    with pytest.raises(ConfigError, match=r"data.files='.*nothing/\*.txt' matches no file"):
        load_corpus(f"{tmp_path}/nothing/*.txt", **SIZES)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("x" * 100)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"rule files-readable[^\n]*\n *[^\n]*secret.txt: Permission denied"):
        load_corpus(f"{tmp_path}/*.txt", **SIZES)


def test_text_one_token_too_short_says_how_many_are_needed_and_found(tmp_path):
    text = tmp_path / "text.txt"
    # One in 4 held out: 4 blocks of at least seq_len + 1 = 5 tokens, and 3 of them hold 2 x 4 + 1 = 9: 20 tokens.
    text.write_text("x" * 18)
    with pytest.raises(ConfigError, match=r"needed 20 tokens[^\n]*\n *found  19 tokens"):
        load_corpus(str(text), **SIZES)
    text.write_text("x" * 19)
    corpus = load_corpus(str(text), **SIZES)
    assert len(corpus.heldout) >= 5
    assert len(corpus.train) >= 9
