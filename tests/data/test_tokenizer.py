"""Text to tokens and back: bytes, and vocabularies in a tokenizer.json; clear errors."""

import os
import re

import numpy as np
import pytest
from small_tokenizers import BERT_TOKENS, TEXT, write_bpe, write_word_pieces

from jaxpipe.data import MaskedSequences, MaskedVocabulary, Tokenizer, load_corpus, load_tokenizer
from jaxpipe.errors import ConfigError

BYTES = load_tokenizer("byte", is_masked=False)
MASKED_BYTES = load_tokenizer("byte", is_masked=True)


def masked_of(tokenizer: Tokenizer) -> MaskedVocabulary:
    assert tokenizer.masked is not None
    return tokenizer.masked


def special_of(masked: MaskedVocabulary) -> list[int]:
    return [masked.padding, masked.classification, masked.separator, masked.mask]


def test_a_byte_is_a_token():
    text = "Où? \0 ñ"
    assert BYTES.vocab_size == 256
    assert BYTES.encode(text).tolist() == list(text.encode())
    assert BYTES.encode(text.encode()).dtype == np.uint8
    assert BYTES.decode(BYTES.encode(text)) == text
    assert [tokens.tobytes() for tokens in BYTES.encode_documents([b"ab", b"", b"c"])] == [b"ab\0", b"\0", b"c\0"]
    assert BYTES.separator == 0
    assert BYTES.masked is None


def test_masked_bytes_have_four_tokens_more_and_bytes_alone_are_words():
    masked = masked_of(MASKED_BYTES)
    assert MASKED_BYTES.vocab_size == 260
    assert special_of(masked) == [256, 257, 258, 259]
    assert masked.maskable.tolist() == list(range(256))
    assert MASKED_BYTES.encode("é").tolist() == [195, 169]
    assert MASKED_BYTES.encode("é").dtype == np.uint16
    assert MASKED_BYTES.decode([257, 195, 169, 259, 258, 256]) == "[CLS]é[MASK][SEP][PAD]"


def test_what_is_no_text_reads_as_replacement_characters():
    assert BYTES.decode([97, 195, 98, 256, 300]) == "a\ufffdb\ufffd\ufffd"


def test_pairs_of_bytes_give_every_text_back(tmp_path):
    tokenizer = load_tokenizer(str(write_bpe(tmp_path)), is_masked=False)
    text = "The café: 東京 \t\n<|endoftext|> over."
    tokens = tokenizer.encode(text)
    assert tokenizer.vocab_size == 300
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == text
    np.testing.assert_array_equal(tokenizer.encode(text.encode()), tokens)
    assert len(tokenizer.encode(TEXT[0])) < len(TEXT[0]) / 2  # it has learned these words
    assert tokenizer.masked is None


def test_special_tokens_in_a_text_are_text_and_none_is_added_or_cut_off(tmp_path):
    tokenizer = load_tokenizer(str(write_bpe(tmp_path)), is_masked=False)
    assert tokenizer.decode([tokenizer.separator]) == "<|endoftext|>"
    assert tokenizer.separator not in tokenizer.encode("<|endoftext|>")
    documents = [text.encode() for text in ["<|endoftext|>", "", *TEXT]]
    for document, tokens in zip(documents, tokenizer.encode_documents(documents), strict=True):
        np.testing.assert_array_equal(tokens[:-1], tokenizer.encode(document))
        assert np.flatnonzero(tokens == tokenizer.separator).tolist() == [len(tokens) - 1]


def test_a_file_says_what_stands_before_a_text(tmp_path):
    assert load_tokenizer("byte", is_masked=False).beginning == ()
    plain = load_tokenizer(str(write_bpe(tmp_path, special=("</s>", "<s>"))), is_masked=False)
    assert plain.decode(plain.beginning) == "</s>"  # the first one, which that file puts there
    assert len(plain.beginning) == 1


def test_documents_encoded_in_several_groups_are_the_same(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(str(write_bpe(tmp_path)), is_masked=False)
    documents = [text.encode() for text in TEXT]
    whole = np.concatenate([*tokenizer.encode_documents(documents)])
    monkeypatch.setattr("jaxpipe.data.tokenizer.GROUP_BYTES", 60)
    np.testing.assert_array_equal(np.concatenate([*tokenizer.encode_documents(documents)]), whole)
    assert [*tokenizer.encode_documents([])] == []


def test_bytes_that_are_no_text_are_replaced(tmp_path):
    tokenizer = load_tokenizer(str(write_bpe(tmp_path)), is_masked=False)
    assert tokenizer.decode(tokenizer.encode(b"cat \xff mat")) == "cat \ufffd mat"


def test_pieces_of_words_have_the_special_tokens_of_bert(tmp_path):
    write_word_pieces(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), is_masked=True)  # the folder
    masked = masked_of(tokenizer)
    assert special_of(masked) == [0, 2, 3, 4]
    assert tokenizer.separator == masked.separator
    assert masked.maskable.tolist() == list(range(len(BERT_TOKENS), tokenizer.vocab_size))
    assert tokenizer.encode("the cat").dtype == np.uint8
    assert tokenizer.decode(tokenizer.encode("The CAT sat")) == "the cat sat"
    assert not set(tokenizer.encode("the [MASK] cat").tolist()) & {masked.mask, masked.separator}


def test_files_become_masked_sequences_of_pieces_of_words(tmp_path):
    write_word_pieces(tmp_path)
    for index, text in enumerate(TEXT):
        (tmp_path / f"{index}.txt").write_text(text * 5)
    tokenizer = load_tokenizer(str(tmp_path), is_masked=True)
    sizes = {"vocab_size": tokenizer.vocab_size, "heldout_fraction": 0.25, "batch_size": 2, "seq_len": 16}
    corpus = load_corpus(str(tmp_path / "*.txt"), tokenizer=tokenizer, **sizes)
    assert corpus.num_files == len(TEXT)
    (source,) = corpus.train.sources
    train = source[np.arange(len(source))]
    assert train.dtype == np.uint8
    sequences = MaskedSequences(train, 16, masked_of(tokenizer), 0.15, 0.0, seed=0, sentence_order=False)
    batch = sequences.take(np.arange(sequences.num_sequences), epoch=0)
    for row in range(sequences.num_sequences):
        tokens = batch["tokens"][row].copy()
        tokens[batch["predicted"][row]] = batch["targets"][row]
        text = np.delete(tokens[1:-1], np.flatnonzero(batch["token_types"][row] == 1)[0] - 2)
        np.testing.assert_array_equal(text, train[row * 13 : (row + 1) * 13])


@pytest.mark.parametrize(
    ("special", "words"),
    [
        (("[PAD]", "[UNK]", "[CLS]", "[SEP]"), ["without mask ([MASK] or <mask>)\n", "[PAD], [UNK], [CLS], [SEP]"]),
        (("[UNK]", "<s>", "</s>", "<mask>"), ["without padding ([PAD] or <pad>)\n", "are [UNK], <s>, </s>, <mask>"]),
    ],
)
def test_a_vocabulary_without_the_tokens_of_masked_models_names_them_and_what_it_has(tmp_path, special, words):
    path = write_word_pieces(tmp_path, special)
    with pytest.raises(ConfigError, match=r"rule masked-tokens") as error:
        load_tokenizer(str(path), is_masked=True)
    for word in [*words, str(path), "  repair: "]:
        assert word in str(error.value)


def test_the_names_of_other_masked_models_are_known(tmp_path):
    special = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
    tokenizer = load_tokenizer(str(write_word_pieces(tmp_path, special)), is_masked=True)
    assert special_of(masked_of(tokenizer)) == [1, 0, 2, 4]


@pytest.mark.parametrize("special", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_the_token_that_ends_a_document_has_one_of_its_usual_names(tmp_path, special):
    tokenizer = load_tokenizer(str(write_bpe(tmp_path, (special,))), is_masked=False)
    assert tokenizer.decode([tokenizer.separator]) == special


def test_a_vocabulary_without_an_end_of_document_is_refused(tmp_path):
    path = write_bpe(tmp_path, ())
    with pytest.raises(ConfigError, match=r"rule document-end: one of <\|endoftext\|>.*\n.*special tokens are none"):
        load_tokenizer(str(path), is_masked=False)


def test_a_file_that_has_changed_is_read_again(tmp_path):
    for special in ("</s>", "<|endoftext|>"):
        path = write_bpe(tmp_path, (special,))
        os.utime(path, ns=(len(special), len(special)))
        tokenizer = load_tokenizer(str(path), is_masked=False)
        assert tokenizer.decode([tokenizer.separator]) == special
        assert load_tokenizer(str(path), is_masked=False) is tokenizer


def test_a_file_that_is_not_there_or_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=rf"rule tokenizer-file.*\n *no {re.escape(str(tmp_path))}/tokenizer.json; current folder"
    ):
        load_tokenizer(str(tmp_path), is_masked=False)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ConfigError, match=r"rule tokenizer-form.*\n.*tokenizer.json: EOF"):
        load_tokenizer(str(tmp_path), is_masked=False)
