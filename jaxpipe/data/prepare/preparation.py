"""The preparation: from input files to PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from jaxpipe.data.indexed import LOSS, TOKENIZER, index_path, tokenizer_path, tokens_path
from jaxpipe.data.indexed_writer import write_indexed
from jaxpipe.data.prepare.chat import CHAT, ChatOptions
from jaxpipe.data.prepare.encoding import Notes, encode_block, encode_chat
from jaxpipe.data.prepare.endings import ends_of_text
from jaxpipe.data.prepare.reading import find_files, read_blocks
from jaxpipe.data.prepare.templates import read_templates
from jaxpipe.data.prepare.vocabulary import sample_texts, train_vocabulary, vocab_size_of
from jaxpipe.data.special_tokens import END_ID, FILE, TOKENIZER_CONFIG, beside
from jaxpipe.data.tokenizer import BYTE, load_tokenizer
from jaxpipe.data.tokenizer_file import file_of
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.files import local_path


@dataclass(frozen=True)
class Prepared:
    """A summary of what was prepared."""

    prefix: str  # path of the written files without their endings
    tokenizer: str  # the value for data.tokenizer
    vocab_size: int
    num_files: int
    num_documents: int  # documents written
    num_tokens: int  # tokens written, including a separator after every document
    dtype: np.dtype
    notes: Notes  # what was replaced or left out
    train_s: float  # seconds for training a vocabulary; 0 if none was trained
    encode_s: float  # seconds for reading, encoding and writing
    separator: str  # the token that ends a document, and where it comes from; "" for bytes
    ends: tuple[str, ...]  # the tokens at which a generated text ends, by name; none for bytes
    missing: tuple[str, ...]  # special tokens that the files beside the tokenizer name and its vocabulary lacks
    has_about: bool  # whether PREFIX.tokenizer_config.json says what the files beside the tokenizer say
    num_learned: int | None = None  # tokens that are learned; None: all are
    seq_len: int | None = None  # for conversations, the most tokens that one may predict, as `data.seq_len`


def prepare(
    inputs: Sequence[str],
    *,
    tokenizer: str,
    output: str,
    file_format: str = "auto",
    jsonl_key: str = "text",
    seq_len: int | None = None,
    reads_markup: bool = False,
    ignored_keys: Sequence[str] = (),
    is_masked: bool = False,
    drop_characters: bool = False,
    overwrite: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Writes the tokens of all documents of `inputs`, in order of their files' paths, with a separator after each.

    Args:
        tokenizer: "byte", the path of a tokenizer.json or of its folder, or "bpe:VOCAB" to train one.
        file_format: "text", "jsonl", "chat", or "auto", by the names of the files.
        jsonl_key: key of the text in a line's JSON object.
        seq_len: for "chat", the most tokens that a conversation may predict.
        reads_markup: for "chat", whether names of special tokens in prompts, answers and messages are these tokens.
        ignored_keys: for "chat", keys of lines and messages that are left out.
        is_masked: whether a masked model will use it, so that the tokenizer has [CLS], [SEP], [MASK] and [PAD].
        drop_characters: whether characters that the vocabulary lacks are left out and counted; else they are an error.
        log: takes a line about the progress.

    Raises:
        ConfigError: a file or tokenizer does not exist, `output` already exists, "chat" lacks what it needs, or the
            vocabulary lacks characters of the text.
        DataError: a file is damaged, none has text, or `output` cannot be written.
    """
    vocab_size = vocab_size_of(tokenizer, is_masked=is_masked)
    files = find_files(inputs, file_format=file_format)
    _check_output(output, overwrite=overwrite)
    if file_format == CHAT:
        _check_chat(seq_len, is_masked=is_masked or vocab_size is not None)
    else:
        _check_no_chat(file_format, {"markup": reads_markup, "ignore_key": ignored_keys})
    with TemporaryDirectory(prefix="jaxpipe_prepare_") as folder:
        start = time.perf_counter()
        if vocab_size:
            log(f"training   a vocabulary of {vocab_size:,} tokens")
            texts = sample_texts(files, key=jsonl_key)
            library = train_vocabulary(texts, vocab_size=vocab_size, is_masked=is_masked)
            library.save(str(Path(folder) / FILE))
            # From here on like a tokenizer that was there before.
            tokenizer = folder
        trained = time.perf_counter()
        loaded = load_tokenizer(tokenizer, is_masked=is_masked, drops=drop_characters)
        templates = read_templates(tokenizer)
        ends = ends_of_text(loaded, templates)
        written = {} if tokenizer == BYTE else {TOKENIZER: file_of(tokenizer).read_bytes()}
        if loaded.about:
            # So that PREFIX.tokenizer.json says as much as the folder that it comes from.
            about = json.dumps(loaded.about | {END_ID: ends}, indent=2, ensure_ascii=False) + "\n"
            written[f".{TOKENIZER_CONFIG}"] = about.encode()
        notes = Notes()
        options = None
        if file_format == CHAT and seq_len:
            special = tuple(loaded.special_tokens.values())
            options = ChatOptions(templates, tokenizer, seq_len, special, ends, reads_markup, ignored_keys)
        with (
            write_indexed(output, vocab_size=loaded.vocab_size, beside=written, has_loss=options is not None) as writer,
            # There is no bar where there is no terminal.
            tqdm(total=sum(file.num_bytes for file in files), unit="B", unit_scale=True, disable=None) as bar,
        ):
            for parts in read_blocks(files):
                block = encode_chat(parts, loaded, options) if options else encode_block(parts, loaded, key=jsonl_key)
                writer.add(block.tokens, block.lengths, is_open=block.is_open, learned=block.learned)
                notes += block.notes
                bar.update(sum(part.num_read_bytes for part in parts))
            if not writer.num_tokens:
                raise DataError(
                    f"no text in {len(files)} files",
                    rule="input-text: there is at least one document that is not empty",
                    picture=f"first: {files[0].path}, {files[0].num_bytes} bytes",
                    repair="name other files with --input",
                )
        for path in (tokenizer_path(output), _config_path(output)):
            if path.name.removeprefix(local_path(output).name) not in written:
                path.unlink(missing_ok=True)  # of an older preparation
        # An older preparation's loss would leave out tokens of this one.
        if not options:
            tokens_path(f"{output}{LOSS}").unlink(missing_ok=True)
            index_path(f"{output}{LOSS}").unlink(missing_ok=True)
    return Prepared(
        prefix=output,
        tokenizer=f"{output}{TOKENIZER}" if written else BYTE,
        vocab_size=loaded.vocab_size,
        num_files=len(files),
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        dtype=writer.dtype,
        notes=notes,
        train_s=trained - start if vocab_size else 0.0,
        encode_s=time.perf_counter() - trained,
        separator=f"{loaded.decode([loaded.separator])}, by {loaded.separator_from}" if written else "",
        ends=tuple(loaded.decode([token]) for token in ends) if written else (),
        missing=loaded.missing,
        has_about=bool(loaded.about),
        num_learned=writer.num_learned,
        seq_len=options.seq_len if options else None,
    )


def _check_chat(seq_len: int | None, *, is_masked: bool) -> None:
    if seq_len is None or seq_len < 1 or is_masked:
        what = "needs --seq_len" if not is_masked else "is for a causal model with a tokenizer that is there"
        raise ConfigError(
            f"--format={CHAT} {what}",
            rule="chat-row: a conversation is not cut, so the length of a row is known when it is prepared",
            repair="set --seq_len to data.seq_len, and --tokenizer to that of the model",
        )


def _check_no_chat(file_format: str, given: Mapping[str, object]) -> None:
    for flag, value in given.items():
        if value:
            raise ConfigError(
                f"--{flag} has no effect with --format={file_format}",
                rule=f"chat-flags: --{flag} says how lines of chats are read",
                repair=f"leave --{flag} out, or set --format={CHAT}",
            )


def _config_path(output: str) -> Path:
    """The path PREFIX.tokenizer_config.json, which says what the files beside the tokenizer say."""
    return beside(tokenizer_path(output), TOKENIZER_CONFIG)


def _check_output(output: str, *, overwrite: bool) -> None:
    if output.endswith(os.sep) or local_path(output).is_dir():
        raise ConfigError(
            f"--output={output} is a folder",
            rule="output-prefix: the files are named as --output and an ending, .bin, .idx, .tokenizer.json",
            repair=f"name them, as --output={output.rstrip(os.sep)}/text",
        )
    if output.split() != [output]:
        raise ConfigError(
            f"--output={output!r} contains a space",
            rule="output-prefix: data.files names prefixes and weights with spaces between them",
            repair=f"name it without spaces, as --output={'_'.join(output.split()) or 'data/text'}",
        )
    prefixes = output, f"{output}{LOSS}"
    targets = [*map(tokens_path, prefixes), *map(index_path, prefixes), tokenizer_path(output), _config_path(output)]
    existing = [str(path) for path in targets if path.exists()]
    if existing and not overwrite:
        raise ConfigError(
            f"--output={output} exists already",
            rule="output-files: nothing is overwritten without --overwrite",
            picture=f"existing: {', '.join(existing)}",
            repair="name another --output, or add --overwrite",
        )
