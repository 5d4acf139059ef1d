"""The fingerprint of tokens sees other tokens, not other places or types of them, and costs little of a long row."""

import json
import zlib
from fractions import Fraction

import numpy as np
import pytest
import tokenizers
from small_tokenizers import write_bpe, write_word_pieces

from jaxpipe.data import load_corpus, load_tokenizer
from jaxpipe.data.fingerprint import BLOCK_TOKENS, MAX_WHOLE_TOKENS, Fingerprint, differences, fingerprint
from jaxpipe.data.indexed_writer import write_indexed

BYTES = load_tokenizer("byte", is_masked=False)
SIZES = {"vocab_size": 256, "heldout_fraction": 0.25, "batch_size": 2, "seq_len": 4}
CHECK = np.frombuffer(b"123456789", np.uint8)


def of(row, tokenizer=BYTES) -> Fingerprint:
    return fingerprint({"a": row}, {"a": Fraction(1)}, tokenizer)


def of_files(files) -> Fingerprint:
    return load_corpus(str(files), tokenizer=BYTES, **SIZES).fingerprint


def write(prefix, tokens):
    with write_indexed(str(prefix), vocab_size=256) as writer:
        writer.add(tokens)
    return prefix


@pytest.fixture
def text(tmp_path):
    generator = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "text" / name).write_bytes(generator.integers(1, 256, size=400).astype(np.uint8).tobytes())
    return tmp_path / "text"


def test_four_bytes_a_token_give_the_published_check_value():
    # CRC-32/ISO-HDLC of "123456789" is cbf43926 in the catalogue of parametrised CRC algorithms.
    row = np.frombuffer(b"12345678", "<i4")
    expected = zlib.crc32(b"9", int(of(row).sources[0].crc32, 16))
    assert f"{expected:08x}" == "cbf43926"


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "<i8"])
def test_the_type_that_tokens_are_kept_in_does_not_matter(dtype):
    assert of(CHECK.astype(dtype)) == of(CHECK)


@pytest.mark.parametrize("place", [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 6])
def test_every_token_of_a_short_row_counts(place):
    row = np.zeros(3 * BLOCK_TOKENS + 7, np.uint8)
    before = of(row)
    row[place] = 1
    assert of(row) != before


class Recorded:
    """A row of zeros of any length, that remembers where it was read."""

    def __init__(self, num_tokens: int):
        self.num_tokens, self.places = num_tokens, []

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, places: np.ndarray, /) -> np.ndarray:
        self.places.append(places)
        return np.zeros(places.shape, np.int32)


@pytest.mark.parametrize("num_tokens", [MAX_WHOLE_TOKENS + 1, 10**12])
def test_of_a_long_row_four_mebibytes_are_read_evenly_from_its_first_to_its_last_token(num_tokens):
    row = Recorded(num_tokens)
    of(row)
    places = np.concatenate(row.places)
    assert places.size * 4 == 4 * 2**20
    assert (places[0], places[-1]) == (0, num_tokens - 1)
    gaps = np.diff([block[0] for block in row.places])
    assert gaps.min() > 0
    assert np.ptp(gaps) <= 1


def test_text_is_known_again_elsewhere_and_after_it_is_prepared(text, tmp_path):
    before = of_files(text / "*.txt")
    tokens = np.concatenate([[*path.read_bytes(), BYTES.separator] for path in sorted(text.iterdir())])
    prepared = of_files(f"indexed:{write(tmp_path / 'prepared', tokens)}")
    text.rename(tmp_path / "elsewhere")
    assert before == of_files(tmp_path / "elsewhere" / "*.txt") == prepared
    assert differences(before, prepared) == []


def test_a_file_that_is_more_or_changed_or_comes_in_another_order_is_seen(text):
    before = of_files(text / "*.txt")
    (text / "a.txt").rename(text / "c.txt")
    assert of_files(text / "*.txt") != before
    (text / "c.txt").rename(text / "a.txt")
    assert of_files(text / "*.txt") == before
    content = bytearray((text / "b.txt").read_bytes())
    content[200] ^= 1
    (text / "b.txt").write_bytes(content)
    assert of_files(text / "*.txt") != before
    content[200] ^= 1
    (text / "b.txt").write_bytes(content)
    (text / "d.txt").write_text("more")
    found = of_files(text / "*.txt")
    # 2 files of 400 bytes and one of 4, each with its end.
    assert [each.sources[0].num_tokens for each in (before, found)] == [802, 807]


def test_of_a_blend_shares_and_the_order_of_sources_count_but_not_the_scale_of_weights(tmp_path):
    one, two = write(tmp_path / "one", np.arange(100)), write(tmp_path / "two", np.arange(50, 150))
    before = of_files(f"indexed:0.7 {one} 0.3 {two}")
    assert [source.share for source in before.sources] == ["7/10", "3/10"]
    assert of_files(f"indexed:7 {one} 3 {two}") == before
    assert of_files(f"indexed:0.3 {two} 0.7 {one}") != before
    ((words, other),) = differences(before, of_files(f"indexed:{one}"))[1:]
    assert words.startswith("source 2: ")
    assert words.endswith("/two', 100 tokens, " + f"crc32 {before.sources[1].crc32}, 3/10 of a batch")
    assert other == "source 2: none"


def test_json_keeps_it():
    before = of(CHECK)
    found = Fingerprint.from_json(before.to_json())
    assert found == before
    assert found.sources[0].name == "a"
    assert set(json.loads(before.to_json())) == {"vocab_size", "tokenizer", "sources"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sources": [{}]}', '{"sources": [1]}', '{"sources": 3}'])
def test_other_json_is_none(text):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Fingerprint.from_json(text)


def test_a_vocabulary_is_known_again_elsewhere_and_saved_in_another_form(tmp_path):
    path = write_bpe(tmp_path)
    (tmp_path / "other").mkdir()
    tokenizers.Tokenizer.from_file(str(path)).save(str(tmp_path / "other" / "tokenizer.json"), pretty=False)
    one, other = (load_tokenizer(str(folder), is_masked=False) for folder in (tmp_path, tmp_path / "other"))
    assert path.read_bytes() != (tmp_path / "other" / "tokenizer.json").read_bytes()
    assert of(CHECK, one) == of(CHECK, other)


def test_two_words_that_have_changed_places_make_another_vocabulary(tmp_path):
    path = write_word_pieces(tmp_path)
    before = of(CHECK, load_tokenizer(str(path), is_masked=True))
    saved = json.loads(path.read_text())
    words = saved["model"]["vocab"]
    first, second = list(words)[20:22]
    words[first], words[second] = words[second], words[first]
    (tmp_path / "swapped.json").write_text(json.dumps(saved))
    after = of(CHECK, load_tokenizer(str(tmp_path / "swapped.json"), is_masked=True))
    assert after.vocab_size == before.vocab_size
    ((words_before, words_after),) = differences(before, after)
    assert words_before.startswith(f"tokenizer: {before.vocab_size} tokens, sha256 ")
    assert words_before != words_after


def of_documents(prefix, lengths, *, by_documents=True) -> Fingerprint:
    """Of the same tokens, divided into documents of these lengths."""
    tokens, start = np.arange(1, 1 + sum(lengths), dtype=np.uint8), 0
    with write_indexed(str(prefix), vocab_size=256) as writer:
        for length in lengths:
            writer.add(tokens[start : start + length])
            start += length
    corpus = load_corpus(f"indexed:{prefix}", tokenizer=BYTES, **SIZES, by_documents=by_documents)
    return corpus.fingerprint


def test_documents_belong_to_the_fingerprint_of_rows_that_are_made_of_them(tmp_path):
    one = of_documents(tmp_path / "a", [30, 50, 40])
    assert not differences(one, of_documents(tmp_path / "b", [30, 50, 40]))
    other = of_documents(tmp_path / "c", [50, 30, 40])
    assert differences(one, other)
    windows = of_documents(tmp_path / "d", [30, 50, 40], by_documents=False)
    assert not differences(windows, of_documents(tmp_path / "e", [50, 30, 40], by_documents=False))
    # The fingerprint of a run from before has no checksum of documents.
    old = json.loads(one.to_json())
    for source in old["sources"]:
        del source["documents"]
    assert not differences(Fingerprint.from_json(json.dumps(old)), other)
