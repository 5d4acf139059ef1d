"""Text to tokens and back: bytes, and vocabularies in a tokenizer.json; clear errors."""

import json
import os
import re

import numpy as np
import pytest
import tokenizers
from small_tokenizers import (
    BERT_TOKENS,
    PUBLISHED,
    TEXT,
    write_beside,
    write_bpe,
    write_letters,
    write_published,
    write_word_pieces,
)
from tokenizers import models, processors
from tokenizers.normalizers import NFD, Replace, Sequence, StripAccents
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit

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
    monkeypatch.setattr("jaxpipe.data.huggingface_tokenizer.GROUP_BYTES", 60)
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


DEEPSEEK = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
ADDED_TOKEN = {"__type": "AddedToken", "content": DEEPSEEK[1], "lstrip": False, "normalized": True}
GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# What the vocabulary has, the files beside it, and the tokens that end a text, the end of a document first.
ENDS = {
    "several special": (
        {"special": ("<|endoftext|>", "<s>", "</s>")},
        {"tokenizer_config": {"eos_token": "</s>"}},
        ["</s>"],
    ),
    "gemma": (  # </s> is a tag of HTML there
        {"special": GEMMA, "added": ("</s>", "<h1>")},
        {
            "tokenizer_config": {"eos_token": "<eos>", "bos_token": "<bos>"},
            "generation_config": {"eos_token_id": [1, 5]},
        },
        ["<eos>", "<end_of_turn>"],
    ),
    "gemma without a config": ({"special": GEMMA, "added": ("</s>", "<h1>")}, {}, ["<eos>"]),
    "deepseek": ({"special": DEEPSEEK}, {"tokenizer_config": {"eos_token": ADDED_TOKEN}}, [DEEPSEEK[1]]),
    "llama 3": (
        {"special": LLAMA3},
        {"tokenizer_config": {"eos_token": "<|eot_id|>"}, "generation_config": {"eos_token_id": [1, 2, 3]}},
        ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
    ),
    "qwen": (
        {"special": QWEN},
        {"tokenizer_config": {"eos_token": "<|im_end|>"}, "generation_config": {"eos_token_id": [2, 0]}},
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "a word of the model": (
        {"special": QWEN[:1], "words": ("</s>", "<|im_start|>")},
        {"tokenizer_config": {"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>"]}},
        ["</s>"],
    ),
    "a token that was added": (
        {"special": QWEN, "added": ("<end>", "<turn>")},
        {"tokenizer_config": {"eos_token": "<end>", "extra_special_tokens": {"turn_token": "<turn>"}}},
        ["<end>"],
    ),
    "special by the list of added ones": (
        {"special": QWEN, "words": ("<a>", "<b>")},
        {
            "tokenizer_config": {
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {"3": {"content": "<a>", "special": True}},
            }
        },
        ["<|im_end|>"],
    ),
    "the map alone": (
        {"special": QWEN},
        {"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}},
        ["<|im_end|>"],
    ),
    "the map before an old config": (
        {"special": QWEN},
        {"special_tokens_map": {"eos_token": "<|im_end|>"}, "tokenizer_config": {"eos_token": "<|endoftext|>"}},
        ["<|im_end|>"],
    ),
    "a new config before the map": (
        {"special": QWEN},
        {
            "special_tokens_map": {"eos_token": "<|im_end|>"},
            "tokenizer_config": {"eos_token": "<|endoftext|>", "added_tokens_decoder": {}},
        },
        ["<|endoftext|>"],
    ),
    "generation_config alone": (
        {"special": QWEN},
        {"generation_config": {"eos_token_id": 2}, "config": {"eos_token_id": 1}},
        ["<|im_end|>"],
    ),
    "config alone": ({"special": QWEN}, {"config": {"eos_token_id": 2}}, ["<|im_end|>"]),
    "numbers that are no special tokens": (
        {"special": QWEN},
        {"generation_config": {"eos_token_id": [77, 100_000, -1, True]}},
        ["<|endoftext|>"],
    ),
    "a name that is not in the vocabulary": (
        {"special": QWEN},
        {"tokenizer_config": {"eos_token": "<none>", "pad_token": None}},
        ["<|endoftext|>"],
    ),
    "a usual name that is not special": ({"special": ("<eos>",), "words": ("</s>",)}, {}, ["<eos>"]),
}


@pytest.mark.parametrize("case", ENDS)
def test_texts_end_as_the_files_beside_the_tokenizer_say(tmp_path, case):
    vocabulary, files, ends = ENDS[case]
    path = write_letters(tmp_path, **vocabulary)
    write_beside(tmp_path, **files)
    tokenizer = load_tokenizer(str(path), is_masked=False)
    assert [tokenizer.decode([token]) for token in tokenizer.ends] == ends
    assert tokenizer.separator == tokenizer.ends[0]


@pytest.mark.parametrize("case", [name for name, (_, files, _) in ENDS.items() if "tokenizer_config" in files])
def test_what_the_files_call_special_is_so_as_in_transformers(tmp_path, case):
    from transformers import PreTrainedTokenizerFast

    vocabulary, files, ends = ENDS[case]
    write_letters(tmp_path, **vocabulary)
    write_beside(tmp_path, **files)
    tokenizer = load_tokenizer(str(tmp_path), is_masked=False)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    names = [name for kind in vocabulary.values() for name in kind]
    if case != "a name that is not in the vocabulary":
        assert theirs.eos_token == ends[0]
        assert {*theirs.all_special_tokens} <= {*tokenizer.special_tokens.values()}
    text = "Où</h1> 3" + " a".join(names)
    assert tokenizer.encode_places([text])[0][0].tolist() == theirs.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokenizers_of_published_kinds_give_the_tokens_of_transformers(tmp_path, name):
    from transformers import PreTrainedTokenizerFast

    write_published(tmp_path, name, special=QWEN)
    write_beside(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(str(tmp_path), is_masked=False)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.separator == theirs.eos_token_id
    whole = "The cats' chat 12345\n\n\t sat  on\u00a0it. Où e\u0301tait 東京の猫? \U0001f600 <|im_end|>\r\n</s> "
    for text in (whole, "", " ", "\n", " la", "la ", *whole.split()):
        wanted = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.encode(text).tolist() == wanted
        assert tokenizer.encode_batch([text])[0].tolist() == wanted
        assert tokenizer.encode_places([text])[0][0].tolist() == theirs.encode(text, add_special_tokens=False)
    documents = [*tokenizer.encode_documents([whole.encode()])]
    assert documents[0].tolist() == [
        *theirs.encode(whole, add_special_tokens=False, split_special_tokens=True),
        theirs.eos_token_id,
    ]


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "generation_config"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\xff"])
def test_a_damaged_file_beside_the_tokenizer_is_named(tmp_path, name, text):
    path = write_bpe(tmp_path)
    (tmp_path / f"{name}.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"{name}.json cannot be read\n *rule tokenizer-config"):
        load_tokenizer(str(path), is_masked=False)


def test_a_file_beside_the_tokenizer_that_has_changed_is_read_again(tmp_path):
    path = write_letters(tmp_path, special=QWEN)
    for number, end in enumerate(["<|im_end|>", "<|im_start|>"]):
        write_beside(tmp_path, tokenizer_config={"eos_token": end})
        os.utime(tmp_path / "tokenizer_config.json", ns=(number, number))
        tokenizer = load_tokenizer(str(path), is_masked=False)
        assert tokenizer.decode([tokenizer.separator]) == end
    (tmp_path / "additional_chat_templates").mkdir()
    for text in ("a", "b"):
        for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
            (tmp_path / name).write_text(text if "/" in name else "c")
            os.utime(tmp_path / name, ns=(ord(text if "/" in name else "c"),) * 2)
        about = load_tokenizer(str(path), is_masked=False).about
        assert about["chat_template"] == [
            {"name": "default", "template": "c"},
            {"name": "tool_use", "template": text},
        ]


@pytest.mark.parametrize("special", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_the_token_that_ends_a_document_has_one_of_its_usual_names(tmp_path, special):
    tokenizer = load_tokenizer(str(write_bpe(tmp_path, (special,))), is_masked=False)
    assert tokenizer.decode([tokenizer.separator]) == special


def test_the_special_tokens_of_a_masked_model_are_those_that_its_files_name(tmp_path):
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<pad>", "<mask>")
    path = write_word_pieces(tmp_path, special)
    assert special_of(masked_of(load_tokenizer(str(path), is_masked=True))) == [0, 2, 3, 4]
    named = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": {"content": "</s>"}, "mask_token": "<mask>"}
    write_beside(tmp_path, tokenizer_config=named)
    assert special_of(masked_of(load_tokenizer(str(path), is_masked=True))) == [7, 5, 6, 8]
    write_beside(tmp_path, tokenizer_config=named | {"sep_token": "<none>", "cls_token": None})
    assert special_of(masked_of(load_tokenizer(str(path), is_masked=True))) == [7, 2, 3, 8]


def test_a_word_that_is_called_like_a_special_token_is_none(tmp_path):
    path = write_letters(tmp_path, special=("<pad>", "<s>", "</s>", "<mask>"), words=("[MASK]", "[SEP]", "[PAD]"))
    masked = masked_of(load_tokenizer(str(path), is_masked=True))
    assert special_of(masked) == [0, 1, 2, 3]
    assert masked.is_maskable[4:].all()


def test_a_vocabulary_without_an_end_of_document_is_refused(tmp_path):
    path = write_bpe(tmp_path, ())
    with pytest.raises(ConfigError, match=r"rule document-end: one of <\|endoftext\|>.*\n.*special tokens are none"):
        load_tokenizer(str(path), is_masked=False)


def write_model(folder, model, *, normalizer=None, pre_tokenizer=None, special=("</s>",), added=()):
    library = tokenizers.Tokenizer(model)
    if normalizer is not None:
        library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    library.add_special_tokens(list(special))
    library.add_tokens(list(added))
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder), is_masked=False)


def pairs(*tokens, **options):
    return models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[], **options)


SPACES = WhitespaceSplit()
# A vocabulary, a text, and what becomes no token.
LACKING = {
    "a letter": (pairs("a", "b"), {}, "ab éé東a", {" ": 1, "é": 2, "東": 1}),
    "spaces that are cut off": (pairs("a", "b"), {"pre_tokenizer": SPACES}, " ab é\n", {"é": 1}),
    "what a normalizer takes away": (pairs("a"), {"normalizer": Replace("é", "")}, "aéb", {"b": 1}),
    "what a normalizer makes of it": (
        pairs("e"),
        {"normalizer": Sequence([NFD(), StripAccents()])},
        "éa",
        {"a": 1},
    ),
    "a letter inside a word": (
        pairs("a", "b</w>", end_of_word_suffix="</w>"),
        {"pre_tokenizer": SPACES},
        "ab ba",
        {"b": 1, "a": 1},
    ),
    "an unknown token": (pairs("a", "?", unk_token="?"), {}, "aé", {}),
    "bytes": (pairs(*(f"<0x{byte:02X}>" for byte in range(256)), byte_fallback=True), {}, "a東", {}),
    "some bytes": (pairs("a", "<0xC3>", "<0xA9>", byte_fallback=True), {}, "aé東", {"東": 1}),
    "the name of a special token": (pairs("a", "s"), {}, "a</s>s", {"<": 1, "/": 1, ">": 1}),
    "spaces of byte pairs": (pairs("a", "Ġ"), {"pre_tokenizer": ByteLevel(add_prefix_space=False)}, "a  a", {}),
    "whole words": (pairs("東京", ignore_merges=True), {"pre_tokenizer": SPACES}, "東京 東", {"東": 1}),
}


@pytest.mark.parametrize("case", LACKING)
def test_characters_that_a_vocabulary_lacks_are_refused_and_counted(tmp_path, case):
    model, parts, text, lacking = LACKING[case]
    tokenizer = write_model(tmp_path, model, **parts)
    assert tokenizer.lacking([text, "", text]) == {letter: 2 * num for letter, num in lacking.items()}
    if not lacking:
        assert len(tokenizer.encode(text))
        return
    documents = [text.encode()]
    for use in (
        tokenizer.encode,
        lambda text: tokenizer.encode_batch([text]),
        lambda _: list(tokenizer.encode_documents(documents)),
    ):
        with pytest.raises(ConfigError, match=r"lacks \d characters of the text\n *rule tokenizer-characters") as error:
            use(text)
        for letter, num in lacking.items():
            assert f"{letter!r} U+{ord(letter):04X} {num} times" in str(error.value)
    dropping = load_tokenizer(str(tmp_path), is_masked=False, drops=True)
    assert dropping.encode(text).tolist() == tokenizer.library.encode(text).ids


def test_a_name_that_is_a_token_is_not_lacking(tmp_path):
    """Its letters are no tokens: one name is special, one is added and not."""
    tokenizer = write_model(tmp_path, pairs("a"), added=("東京",))
    assert tokenizer.lacking(["a東京a京</s>"], reads_special=True) == {"京": 1}
    assert tokenizer.encode_places(["a東京</s>"])[0][0].tolist() == [0, 2, 1]
    with pytest.raises(ConfigError, match=r"lacks 1 characters of the text\n.*\n *'京' U\+4EAC 1 times"):
        tokenizer.encode_places(["a東京a京</s>"])


@pytest.mark.parametrize("normalizer", [Replace("", "x"), Replace(tokenizers.Regex("(?=a)"), "zz")])
def test_a_panic_of_the_library_is_told(tmp_path, normalizer):
    parts = {"normalizer": normalizer, "pre_tokenizer": ByteLevel()}
    tokenizer = write_model(tmp_path, pairs("a", "Ġ"), **parts)
    for use in (tokenizer.encode, lambda text: tokenizer.encode_batch([text]), lambda _: tokenizer.beginning):
        with pytest.raises(ConfigError, match="rule tokenizer-words"):
            use("a a")


@pytest.mark.parametrize("largest", [2**31, 2**32 - 1])
@pytest.mark.parametrize("is_masked", [False, True])
def test_tokens_that_no_table_has_are_refused(tmp_path, largest, is_masked):
    path = write_letters(tmp_path, special=("</s>",))
    file = json.loads(path.read_text())
    file["model"]["vocab"]["far"] = largest
    path.write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=rf"whose largest token is {largest}\n *rule tokenizer-size"):
        load_tokenizer(str(path), is_masked=is_masked)


def test_what_stands_before_a_text_does_not_depend_on_the_letters_of_a_vocabulary(tmp_path):
    write_model(tmp_path, pairs("b", "c"), special=("</s>", "<s>"))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    library.save(str(tmp_path / "tokenizer.json"))
    os.utime(tmp_path / "tokenizer.json", ns=(7, 7))
    assert load_tokenizer(str(tmp_path), is_masked=False).beginning == (3,)


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
