"""The table of words gives the tokens that the library gives to the whole text."""

import json
import random
import unicodedata

import numpy as np
import pytest
import tokenizers
from small_tokenizers import TEXT, write_bpe, write_word_pieces
from tokenizers import models, normalizers, pre_tokenizers, trainers

from jaxpipe.data import load_tokenizer
from jaxpipe.data.huggingface_tokenizer import HuggingFaceTokenizer
from jaxpipe.prepare import words
from jaxpipe.prepare.vocabulary import train_vocabulary
from jaxpipe.prepare.words import WORD, WordTable, cuts_like_gpt2


@pytest.fixture
def library(tmp_path) -> tokenizers.Tokenizer:
    loaded = load_tokenizer(str(write_bpe(tmp_path)), is_masked=False)
    assert isinstance(loaded, HuggingFaceTokenizer)
    return loaded.library


def check_alone(texts: list[str]) -> None:
    """Words cut alone by the library are cut as they are in the text."""
    library = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in texts:
        alone = [piece for word in WORD.findall(text) for piece, _ in library.pre_tokenize_str(word)]
        assert alone == [piece for piece, _ in library.pre_tokenize_str(text)], text


def test_every_character_between_others_is_cut_as_the_library_does():
    letters = [chr(code) for code in range(0x30000) if unicodedata.category(chr(code)) not in ("Cs", "Cn")]
    for left, right in [("a", "b"), (" ", " "), ("1", "'s")]:
        texts = [
            "".join(left + letter + right for letter in letters[start : start + 512])
            for start in range(0, len(letters), 512)
        ]
        check_alone(texts)


def test_random_texts_are_cut_as_the_library_does():
    draw = random.Random(0)
    letters = [
        *" \t\n\r\v\f'stdlvemrABz019.,_-#",
        "'ll",
        "'ve",
        "é",
        "東",
        "½",
        "²",
        "٣",
        "\x1c",
        "\x85",
        "\xa0",
        "\u200b",
    ]
    letters += ["\u3000", "\u180e", "\u2028", "\u0301", "😀", "\0"]
    texts = ["".join(draw.choices(letters, k=draw.randrange(30))) for _ in range(20_000)]
    check_alone(texts)


def test_tokens_are_the_librarys_in_every_call(library):
    table = WordTable(library)
    for texts in [TEXT, ["", *TEXT, "Le dog: 東京 <|endoftext|>\n"], [], [""], TEXT[::-1]]:
        tokens, lengths = table.encode(texts)
        expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
        assert lengths.tolist() == [len(one) for one in expected]
        np.testing.assert_array_equal(tokens, np.concatenate([np.zeros(0, int), *expected]))


def test_a_full_table_begins_anew(library, monkeypatch):
    monkeypatch.setattr(words, "MOST_WORDS", 5)
    table = WordTable(library)
    for text in TEXT * 2:
        tokens, _ = table.encode([text])
        assert tokens.tolist() == library.encode(text, add_special_tokens=False).ids
        assert len(table._places) < 30


def test_only_tokenizers_that_cut_so_are_taken_for_it(library, tmp_path):
    assert cuts_like_gpt2(library)
    pieces = load_tokenizer(str(write_word_pieces(tmp_path)), is_masked=True)
    assert isinstance(pieces, HuggingFaceTokenizer)
    assert not cuts_like_gpt2(pieces.library)

    def changed(change) -> bool:
        other = tokenizers.Tokenizer.from_str(library.to_str())
        other.encode_special_tokens = True
        change(other)
        return cuts_like_gpt2(other)

    def set_prefix(other):
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)

    def set_no_cuts(other):
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def set_normalizer(other):
        other.normalizer = normalizers.NFC()

    def set_special(other):
        other.encode_special_tokens = False

    def set_dropout(other):
        other.model.dropout = 0.1

    assert changed(lambda other: None)
    for change in (set_prefix, set_no_cuts, set_normalizer, set_special, set_dropout):
        assert not changed(change), change
    assert not changed(lambda other: other.add_tokens(["dog"]))


def test_training_gives_the_same_vocabulary_again():
    first, again = (train_vocabulary(TEXT * 5, vocab_size=400, is_masked=True).to_str() for _ in range(2))
    assert first == again
    state = json.loads(first)
    assert [token["content"] for token in state["added_tokens"]] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert cuts_like_gpt2(_with_text_specials(first))


def _with_text_specials(state: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(state)
    library.encode_special_tokens = True
    return library


def test_a_library_without_any_cutting_is_not_taken():
    library = tokenizers.Tokenizer(models.BPE())
    library.train_from_iterator(TEXT, trainers.BpeTrainer(show_progress=False))
    assert not cuts_like_gpt2(_with_text_specials(library.to_str()))
