"""Files to tokens: determinism, the held-out part, prepared files of any size, clear errors."""

import tracemalloc
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpipe.data import Batches, CausalSequences, Documents, load_corpus, load_tokenizer
from jaxpipe.data.corpus import Blocks, CheckedTokens, split_blocks, split_documents
from jaxpipe.data.files import text_files
from jaxpipe.data.indexed import IndexedTokens
from jaxpipe.data.indexed_writer import write_indexed
from jaxpipe.errors import ConfigError, DataError

BYTES = load_tokenizer("byte", is_masked=False)
SIZES = {"tokenizer": BYTES, "vocab_size": 256, "heldout_fraction": 0.25, "batch_size": 2, "seq_len": 4}
INDEXED = {**SIZES, "vocab_size": 10_000}


def all_of(tokens):
    return tokens[np.arange(len(tokens))]


def text_of(part) -> bytes:
    (tokens,) = part.sources
    return all_of(tokens).tobytes()


def write(prefix, tokens):
    with write_indexed(str(prefix), vocab_size=100_000) as writer:
        writer.add(tokens)


@pytest.mark.ci
def test_standard_library_is_real_text_and_the_same_each_time():
    sizes = {**SIZES, "heldout_fraction": 0.05, "batch_size": 32, "seq_len": 128}
    first, again = load_corpus("auto", **sizes), load_corpus("auto", **sizes)
    assert len(first.train) > 5_000_000
    assert 0.03 < len(first.heldout) / (len(first.train) + len(first.heldout)) < 0.07
    assert text_of(first.train) == text_of(again.train)
    assert b"\nimport " in text_of(first.train)
    assert b"\nimport " in text_of(first.heldout)


def test_glob_takes_files_in_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("def " * 10)
    (tmp_path / "a.txt").write_text("abc " * 10)
    (tmp_path / "a.bin").write_text("no")
    corpus = load_corpus(str(tmp_path / "**" / "*.txt"), **SIZES)
    assert corpus.num_files == 2
    assert len(corpus.train) + len(corpus.heldout) == 82
    assert text_of(corpus.train).startswith(b"abc ")
    assert b"def " in text_of(corpus.train)
    assert b"no" not in text_of(corpus.train)


def test_prepared_files_have_the_tokens_of_the_text_that_they_were_prepared_from(tmp_path):
    text = np.random.default_rng(0).integers(256, size=1000)
    (tmp_path / "text.txt").write_bytes(text.astype(np.uint8).tobytes())
    write(tmp_path / "text", np.append(text, BYTES.separator))
    found = load_corpus(f"indexed:{tmp_path}/text", **SIZES)
    expected = load_corpus(f"{tmp_path}/text.txt", **SIZES)
    for part, other in [(found.train, expected.train), (found.heldout, expected.heldout)]:
        np.testing.assert_array_equal(all_of(part.sources[0]), all_of(other.sources[0]))
    assert found.num_files == 1
    assert found.train.weights == (1,)


def test_what_is_held_out_is_never_trained_on_in_any_source(tmp_path):
    write(tmp_path / "a", np.arange(400))
    write(tmp_path / "b", np.arange(1000, 1100))
    corpus = load_corpus(f"indexed:0.8 {tmp_path}/a 0.2 {tmp_path}/b", **INDEXED)
    assert corpus.train.weights == corpus.heldout.weights == (Fraction("0.8"), Fraction("0.2"))

    def tokens_of(part, num_steps):
        sources = tuple(CausalSequences(tokens, 4) for tokens in part.sources)
        batches = Batches(sources, batch_size=5, num_microbatches=1, seed=0, weights=part.weights)
        seen = [batches.at(step) for step in range(num_steps)]
        return {int(token) for batch in seen for values in batch.values() for token in values.ravel()}

    trained, heldout = tokens_of(corpus.train, 60), tokens_of(corpus.heldout, 60)
    assert not trained & heldout
    # Three epochs and more of each, of whole sequences: what is missing is the end of a part.
    assert len(trained) + len(heldout) > 500 - 4 * 5
    assert min(len({t for t in seen if t // 1000 == source}) for seen in (trained, heldout) for source in (0, 1)) > 20


def test_ten_gigabytes_cost_no_more_memory_than_what_is_read(tmp_path, monkeypatch):
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(10 * 10**9)  # a sparse file: no block of the disk is taken
    tokens = np.memmap(path, np.uint16, mode="r")
    monkeypatch.setattr(IndexedTokens, "open", lambda prefix: SimpleNamespace(tokens=tokens, prefix=prefix, ends=list))
    tracemalloc.start()
    corpus = load_corpus(f"indexed:{tmp_path}/large", **INDEXED)
    batches = Batches((CausalSequences(corpus.train.sources[0], 1024),), batch_size=8, num_microbatches=2, seed=0)
    for step in (0, 10**6, 10**12):
        assert not batches.at(step)["tokens"].any()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(corpus.train) + len(corpus.heldout) == 5 * 10**9
    assert peak_bytes < 8 * 1025 * 8 * 20  # twenty arrays of 64-bit numbers of a batch


def test_a_token_that_the_model_has_no_word_for_is_found_where_it_is_read(tmp_path):
    tokens = np.arange(100)
    tokens[60] = 300
    write(tmp_path / "a", tokens)
    train = load_corpus(f"indexed:{tmp_path}/a", **SIZES).train.sources[0]
    places = np.flatnonzero(all_of(load_corpus(f"indexed:{tmp_path}/a", **INDEXED).train.sources[0]) != 300)
    train[places]
    with pytest.raises(DataError, match=r"a.bin: token 300 at position 60 is not in (.|\n)*vocab_size=256"):
        all_of(train)


def test_a_file_may_have_the_name_of_a_glob(tmp_path):
    path = tmp_path / "a[1].txt"
    path.write_text("text")
    assert text_files(str(path)) == [path]


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


def test_of_a_blend_the_source_that_is_too_short_for_its_share_is_named(tmp_path):
    write(tmp_path / "long", np.arange(1000))
    write(tmp_path / "short", np.arange(43))
    # 8 of 16 sequences: 8 x 4 + 1 = 33 tokens in 3 of 4 blocks, which are of 11 tokens: 44 tokens.
    files = f"indexed:1 {tmp_path}/long 1 {tmp_path}/short"
    with pytest.raises(ConfigError, match=r"/short' is too short(.|\n)*needed 44 tokens(.|\n)*found  43 tokens"):
        load_corpus(files, **{**INDEXED, "batch_size": 16})
    write(tmp_path / "short", np.arange(44))
    corpus = load_corpus(files, **{**INDEXED, "batch_size": 16})
    assert len(corpus.train.sources[1]) >= 33


def by_hand(tokens: list[int], num_block: int, every: int) -> tuple[list[int], list[int]]:
    parts = ([], [])
    for number, begin in enumerate(range(0, len(tokens), num_block)):
        parts[number % every == every - 1].extend(tokens[begin : begin + num_block])
    return parts


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("num_block", [1, 4])
def test_parts_are_what_is_cut_by_hand_for_every_length(num_block, every):
    for num_tokens in range(3 * num_block * every):
        tokens = np.arange(100, 100 + num_tokens)
        for is_heldout, expected in enumerate(by_hand(tokens.tolist(), num_block, every)):
            part = Blocks(tokens, num_block, every, bool(is_heldout))
            assert len(part) == len(expected)
            assert part[np.arange(len(part))].tolist() == expected


def test_places_may_be_of_any_shape_and_in_any_order():
    part = Blocks(np.arange(60), 4, 3, is_heldout=False)
    whole = part[np.arange(len(part))]
    places = np.array([[39, 0, 8], [7, 7, 21]])
    np.testing.assert_array_equal(part[places], whole[places])


def test_blocks_are_large_and_of_a_short_text_such_that_there_is_one_to_hold_out(monkeypatch):
    monkeypatch.setattr("jaxpipe.data.corpus.BLOCK_TOKENS", 10)
    train, heldout = split_blocks(Documents.one(np.arange(200)), every=4, seq_len=5)
    assert heldout[np.arange(20)].tolist() == [*range(30, 40), *range(70, 80)]
    train, heldout = split_blocks(Documents.one(np.arange(12)), every=4, seq_len=5)
    assert heldout[np.arange(len(heldout))].tolist() == [9, 10, 11]
    assert len(train) == 9


def test_a_document_is_held_out_as_a_whole_unless_it_is_longer_than_a_row(monkeypatch):
    """Blocks of ten tokens, the third of each three held out: 20 to 30 and 50 to 60."""
    monkeypatch.setattr("jaxpipe.data.corpus.BLOCK_TOKENS", 10)
    ends = np.array([4, 18, 25, 26, 47, 48, 65])

    def spans(seq_len):
        parts = split_documents(Documents.ending_at(np.arange(65), lambda: ends), every=3, seq_len=seq_len)
        return [list(zip(*(edge.tolist() for edge in part.spans), strict=True)) for part in parts]

    # 18 to 25 begins before the held-out block and is trained on; 25 to 26 and 26 to 47 begin in it.
    assert spans(30) == [[(0, 4), (4, 18), (18, 25), (47, 48), (48, 65)], [(25, 26), (26, 47)]]
    assert spans(10) == [
        [(0, 4), (4, 18), (18, 25), (30, 47), (47, 48), (48, 50), (60, 65)],
        [(25, 26), (26, 30), (50, 60)],
    ]


def test_no_document_is_in_both_parts_and_none_is_lost():
    ends = np.cumsum(np.random.default_rng(0).integers(0, 300_000, 40))
    train, heldout = split_documents(
        Documents.ending_at(np.empty(ends[-1], np.uint8), lambda: ends), every=4, seq_len=64
    )
    spans = sorted([*zip(*train.spans, strict=True), *zip(*heldout.spans, strict=True)])
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == ends[-1]
    assert len(train) + len(heldout) == ends[-1]
    assert 0.1 < len(heldout) / ends[-1] < 0.4


def test_tokens_of_the_vocabulary_come_as_they_are():
    tokens = CheckedTokens(np.array([0, 4, 9], np.uint16), "x.bin", vocab_size=10)
    assert len(tokens) == 3
    assert tokens[np.array([[2, 0], [1, 1]])].tolist() == [[9, 0], [4, 4]]
    assert tokens[np.array([], np.int64)].tolist() == []


@pytest.mark.parametrize("token", [10, 50256, -1])
def test_another_is_named_with_its_place_and_the_file(token):
    tokens = CheckedTokens(np.array([0, 4, 9, token, 5], np.int32), "data/x.bin", vocab_size=10)
    tokens[np.array([0, 1, 2, 4])]
    with pytest.raises(DataError, match=rf"^data/x.bin: token {token} at position 3 is not in the voc") as error:
        tokens[np.array([[0, 1], [3, 3]])]
    assert "vocab_size=10: tokens 0 .. 9" in str(error.value)


def test_a_block_holds_a_sequence_however_long(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxpipe.data.corpus.BLOCK_TOKENS", 10)
    (tmp_path / "a.txt").write_text("0123456789" * 6)
    sizes = {"vocab_size": 256, "heldout_fraction": 0.25, "batch_size": 2, "seq_len": 12}
    corpus = load_corpus(str(tmp_path / "*.txt"), tokenizer=load_tokenizer("byte", is_masked=False), **sizes)
    assert CausalSequences(corpus.heldout.sources[0], 12).num_sequences > 0
