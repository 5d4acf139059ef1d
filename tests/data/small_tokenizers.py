"""Tokenizers of a few hundred words, trained and written by Hugging Face's own library."""

import json
from functools import partial
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["The cat sat on the mat. The dog sat on the log.", "Où est le chat? Le chat est là-bas, près du café."] * 3
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_bpe(folder: Path, special: tuple[str, ...] = ("<|endoftext|>",)) -> Path:
    """Byte-level pairs as GPT-2 has them, with its special token; as unkind a file as there may be.

    It cuts and fills up every text, and begins it with the special token.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
        tokenizer.enable_padding(pad_id=0, pad_token=special[0], length=50)
    tokenizer.enable_truncation(max_length=4)
    return _save(tokenizer, folder)


def write_word_pieces(folder: Path, special: tuple[str, ...] = tuple(BERT_TOKENS)) -> Path:
    """Pieces of words as BERT has them, in lower case, with its special tokens."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    if {"[CLS]", "[SEP]"} <= set(special):
        ends = [(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return _save(tokenizer, folder)


def _save(tokenizer: tokenizers.Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_letters(
    folder: Path, *, special: tuple[str, ...] = (), added: tuple[str, ...] = (), words: tuple[str, ...] = ()
) -> Path:
    """All bytes without pairs, after special tokens, tokens that are added and not special, and words of the model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *added, *words, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    return _save(tokenizer, folder)


def write_beside(folder: Path, **files: dict) -> None:
    """The files beside a tokenizer.json, by their names without .json."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
) + _SPACES
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
) + _SPACES
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _cut(*patterns: str, **options: object) -> pre_tokenizers.PreTokenizer:
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), **({"behavior": "isolated"} | options)) for pattern in patterns
    ]
    return pre_tokenizers.Sequence([*splits, _BYTES])


# How published tokenizers treat a text before they look up its tokens, and what they are besides.
PUBLISHED = {
    "llama 3": {"pre_tokenizer": _cut(_WORDS.replace("%s", "{1,3}")), "ignore_merges": True},
    "qwen 3": {"normalizer": normalizers.NFC(), "pre_tokenizer": _cut(_WORDS.replace("%s", ""))},
    "gpt 4o": {"pre_tokenizer": _cut(_O200K, behavior="removed", invert=True)},
    "deepseek v3": {"pre_tokenizer": _cut(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK)},
    "gemma 3": {
        "normalizer": normalizers.Replace(" ", "\u2581"),
        "pre_tokenizer": pre_tokenizers.Split(" ", "merged_with_previous"),
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    },
    "llama 2": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    },
}


def write_published(folder: Path, name: str, *, special: tuple[str, ...]) -> Path:
    """The kind of tokenizer that a published one is, with a few hundred tokens of `TEXT`."""
    parts = dict(PUBLISHED[name])
    normalizer, pre_tokenizer = parts.pop("normalizer", None), parts.pop("pre_tokenizer", None)
    has_bytes = bool(parts.get("byte_fallback"))
    first = [*special, *(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if has_bytes else [])]

    def new(model: models.BPE) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer(model)
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            tokenizer.pre_tokenizer = pre_tokenizer
        return tokenizer

    alphabet = [] if has_bytes else sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = new(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 300, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(TEXT, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = new(models.BPE(vocab=model["vocab"], merges=merges, **parts))
    tokenizer.add_special_tokens(list(special))
    return _save(tokenizer, folder)


# ---- Kinds of tokenizers: how each treats the beginning of a text and of a word

KIND_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_KIND_TEXT = [
    *TEXT,
    "Q:\n Sure, yes. : a 0 ) Is it? no user assistant system tool",
    "4 2 {} [] ( ) name  two Q: 4 Q: 2 Q: )",
] * 3


def write_kind(folder: Path, kind: str) -> Path:
    """A tokenizer of one of `KINDS`, with `KIND_SPECIAL`; "</s>" ends a document."""
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens(list(KIND_SPECIAL))
    return _save(tokenizer, folder)


def _byte_level(*, add_prefix_space: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=add_prefix_space)  # as RoBERTa's, and as GPT-2's
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def _pairs(scheme: str | None) -> tokenizers.Tokenizer:
    """Pairs with bytes for unknown letters, as LLaMA's: the space before a text by a pre-tokenizer or a normalizer."""
    trained = tokenizers.Tokenizer(models.BPE())
    # With a normalizer nothing cuts words apart, so that tokens end with the space of the next one.
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme or "first", split=scheme is not None)
    _train(trained, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False))
    told = json.loads(trained.to_str())["model"]
    vocab = told["vocab"] | {f"<0x{byte:02X}>": len(told["vocab"]) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in told["merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    else:
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = {"special_tokens": ["<unk>"], "unk_token": "<unk>"}
    _train(tokenizer, trainers.UnigramTrainer(vocab_size=150, show_progress=False, **special))
    return tokenizer


def _words() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _train(tokenizer, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return tokenizer


def _train(tokenizer: tokenizers.Tokenizer, trainer: trainers.Trainer) -> None:
    tokenizer.train_from_iterator(_KIND_TEXT, trainer)


KINDS = {
    "byte level": partial(_byte_level, add_prefix_space=False),
    "byte level, space before": partial(_byte_level, add_prefix_space=True),
    "metaspace, space before": partial(_pairs, "always"),
    "metaspace": partial(_pairs, "never"),
    "normalizer, space before": partial(_pairs, None),
    "unigram, space before": _unigram,
    "words": _words,
}
