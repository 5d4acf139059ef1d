"""Tokenizers of a few hundred words, trained and written by Hugging Face's own library."""

import json
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
