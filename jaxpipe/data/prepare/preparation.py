"""The preparation: from input files to PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, dropwhile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from jaxpipe.data.indexed import LOSS, TOKENIZER, index_path, tokenizer_path, tokens_path
from jaxpipe.data.indexed_writer import write_indexed
from jaxpipe.data.prepare.chat import CHAT, ChatForm
from jaxpipe.data.prepare.encoding import Tally, encode_block, encode_chat, texts_of
from jaxpipe.data.prepare.endings import ends_of_text
from jaxpipe.data.prepare.reading import FilePart, InputFile, find_files, place_to_cut, read_blocks, read_file
from jaxpipe.data.prepare.templates import read_templates
from jaxpipe.data.special_tokens import END_ID, FILE, TOKENIZER_CONFIG, beside
from jaxpipe.data.tokenizer import BYTE, file_of, load_tokenizer
from jaxpipe.errors import ConfigError, DataError, explain
from jaxpipe.files import local_path


@dataclass(frozen=True)
class Prepared:
    """A summary of what was prepared.

    Attributes:
        prefix: path of the written files without their endings.
        tokenizer: the value for data.tokenizer.
        vocab_size: vocabulary size of the tokenizer.
        num_files: files read.
        num_documents: documents written.
        num_tokens: tokens written, including a separator after every document.
        dtype: dtype of the tokens.
        num_text_bytes: bytes of the text in UTF-8.
        replaced: places of invalid UTF-8.
        empty: documents without text, which were left out.
        unknown: tokens that stand for what the vocabulary lacks.
        dropped: characters that the vocabulary lacks and that were left out, and how often.
        separator: the token that ends a document, and where it comes from; "" for bytes.
        ends: the tokens at which a generated text ends, by name; none for bytes.
        missing: special tokens that the files beside the tokenizer name and its vocabulary lacks.
        has_about: whether PREFIX.tokenizer_config.json says what the files beside the tokenizer say.
        num_learned: tokens that are learned; None: all are.
        seq_len: for conversations, the most tokens that one may predict, as `data.seq_len`.
        markup: prompts and answers with the name of a special token, which was read as text.
        train_s: seconds for training a vocabulary; 0 if none was trained.
        encode_s: seconds for reading, encoding and writing.
    """

    prefix: str
    tokenizer: str
    vocab_size: int
    num_files: int
    num_documents: int
    num_tokens: int
    dtype: np.dtype
    num_text_bytes: int
    replaced: Tally
    empty: Tally
    markup: Tally
    train_s: float
    encode_s: float
    unknown: Tally
    dropped: Counter[str]
    separator: str
    ends: tuple[str, ...]
    missing: tuple[str, ...]
    has_about: bool
    num_learned: int | None = None
    seq_len: int | None = None


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
        inputs: files or globs.
        tokenizer: "byte", the path of a tokenizer.json or of its folder, or "bpe:VOCAB" to train one.
        output: path of the written files without their endings.
        file_format: "text", "jsonl", "chat", or "auto", by the names of the files.
        jsonl_key: key of the text in a line's JSON object.
        seq_len: for "chat", the most tokens that a conversation may predict.
        reads_markup: for "chat", whether names of special tokens in prompts, answers and messages are these tokens.
        ignored_keys: for "chat", keys of lines and messages that are left out.
        is_masked: whether a masked model will use it, so that the tokenizer has [CLS], [SEP], [MASK] and [PAD].
        drop_characters: whether characters that the vocabulary lacks are left out and counted; else they are an error.
        overwrite: whether existing files are replaced.
        log: takes a line about the progress.

    Raises:
        ConfigError: a file or tokenizer does not exist, `output` already exists, "chat" lacks what it needs, or the
            vocabulary lacks characters of the text.
        DataError: a file is damaged, none has text, or `output` cannot be written.
    """
    vocab_size = vocab_size_of(tokenizer, is_masked=is_masked)
    files = find_files(inputs, file_format=file_format)
    _check_output(output, overwrite=overwrite)
    _check_chat(file_format, seq_len, is_masked=is_masked or vocab_size is not None)
    _check_chat_flags(file_format, {"markup": reads_markup, "ignore_key": ignored_keys})
    with TemporaryDirectory(prefix="jaxpipe_prepare_") as folder:
        start = time.perf_counter()
        if vocab_size:
            log(f"training   a vocabulary of {vocab_size:,} tokens")
            texts = sample_texts(files, key=jsonl_key)
            library = train_vocabulary(texts, vocab_size=vocab_size, is_masked=is_masked)
            library.save(str(Path(folder) / FILE))
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
        num_text_bytes = 0
        replaced = Tally(0)
        empty = Tally(0)
        markup = Tally(0)
        unknown = Tally(0)
        dropped = Counter[str]()
        form = None
        if file_format == CHAT and seq_len:
            form = ChatForm(templates, tokenizer, seq_len, loaded.special_names, ends, reads_markup, ignored_keys)
        with (
            write_indexed(output, vocab_size=loaded.vocab_size, beside=written, has_loss=form is not None) as writer,
            _progress(files) as shown,
        ):
            for parts in shown(read_blocks(files)):
                block = encode_chat(parts, loaded, form) if form else encode_block(parts, loaded, key=jsonl_key)
                writer.add(block.tokens, block.lengths, is_open=block.is_open, learned=block.learned)
                num_text_bytes += block.num_text_bytes
                replaced += block.replaced
                empty += block.empty
                markup += block.markup
                unknown += block.unknown
                dropped += block.dropped
            if not writer.num_tokens:
                raise _no_text(files)
        for path in (tokenizer_path(output), _config_path(output)):
            if path.name.removeprefix(local_path(output).name) not in written:
                path.unlink(missing_ok=True)  # of an older preparation
        if not form:
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
        num_text_bytes=num_text_bytes,
        replaced=replaced,
        empty=empty,
        markup=markup,
        train_s=trained - start if vocab_size else 0.0,
        encode_s=time.perf_counter() - trained,
        unknown=unknown,
        dropped=dropped,
        separator=f"{loaded.decode([loaded.separator])}, by {loaded.separator_from}" if written else "",
        ends=tuple(loaded.decode([token]) for token in ends) if written else (),
        missing=loaded.missing,
        has_about=bool(loaded.about),
        num_learned=writer.num_learned,
        seq_len=form.seq_len if form else None,
    )


def _check_chat(file_format: str, seq_len: int | None, *, is_masked: bool) -> None:
    if file_format == CHAT and (seq_len is None or seq_len < 1 or is_masked):
        what = "needs --seq_len" if not is_masked else "is for a causal model with a tokenizer that is there"
        raise ConfigError(
            explain(
                f"--format={CHAT} {what}",
                rule="chat-row: a conversation is not cut, so the length of a row is known when it is prepared",
                repair="set --seq_len to data.seq_len, and --tokenizer to that of the model",
            )
        )


def _check_chat_flags(file_format: str, given: Mapping[str, object]) -> None:
    for flag, value in given.items():
        if value and file_format != CHAT:
            raise ConfigError(
                explain(
                    f"--{flag} has no effect with --format={file_format}",
                    rule=f"chat-flags: --{flag} says how lines of chats are read",
                    repair=f"leave --{flag} out, or set --format={CHAT}",
                )
            )


def _config_path(output: str) -> Path:
    """The path PREFIX.tokenizer_config.json, which says what the files beside the tokenizer say."""
    return beside(tokenizer_path(output), TOKENIZER_CONFIG)


def _check_output(output: str, *, overwrite: bool) -> None:
    if output.endswith(os.sep) or local_path(output).is_dir():
        raise ConfigError(
            explain(
                f"--output={output} is a folder",
                rule="output-prefix: the files are named as --output and an ending, .bin, .idx, .tokenizer.json",
                repair=f"name them, as --output={output.rstrip(os.sep)}/text",
            )
        )
    if output.split() != [output]:
        raise ConfigError(
            explain(
                f"--output={output!r} contains a space",
                rule="output-prefix: data.files names prefixes and weights with spaces between them",
                repair=f"name it without spaces, as --output={'_'.join(output.split()) or 'data/text'}",
            )
        )
    prefixes = output, f"{output}{LOSS}"
    targets = [*map(tokens_path, prefixes), *map(index_path, prefixes), tokenizer_path(output), _config_path(output)]
    existing = [str(path) for path in targets if path.exists()]
    if existing and not overwrite:
        raise ConfigError(
            explain(
                f"--output={output} exists already",
                rule="output-files: nothing is overwritten without --overwrite",
                picture=f"existing: {', '.join(existing)}",
                repair="name another --output, or add --overwrite",
            )
        )


@contextmanager
def _progress(files: Sequence[InputFile]) -> Iterator[Callable[[Iterator[list[FilePart]]], Iterator[list[FilePart]]]]:
    """Yields a function that passes blocks on and shows how many bytes are read, if there is a terminal."""
    num_bytes = sum(file.num_bytes for file in files)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None) as bar:

        def shown(blocks: Iterator[list[FilePart]]) -> Iterator[list[FilePart]]:
            for block in blocks:
                yield block
                bar.update(sum(part.num_read_bytes for part in block))

        yield shown


def _no_text(files: Sequence[InputFile]) -> DataError:
    return DataError(
        explain(
            f"no text in {len(files)} files",
            rule="input-text: there is at least one document that is not empty",
            picture=f"first: {files[0].path}, {files[0].num_bytes} bytes",
            repair="name other files with --input",
        )
    )


# The vocabulary: byte pairs, trained on a sample of the text


BPE = "bpe:"
CAUSAL_TOKENS = ("<|endoftext|>",)
MASKED_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

MOST_TOKENS = 10_000_000
SAMPLE_BYTES = 2**26
STRETCH_BYTES = 2**20


def vocab_size_of(tokenizer: str, *, is_masked: bool) -> int | None:
    """Returns the size of the vocabulary to train if `tokenizer` is bpe:VOCAB, None if it names a tokenizer.

    Raises:
        ConfigError: VOCAB is not a number, or is too small for the bytes and the special tokens.
    """
    if not tokenizer.startswith(BPE):
        return None
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + len(_special(is_masked)) + 1
    number = tokenizer.removeprefix(BPE)
    is_number = number.isascii() and number.isdigit() and len(number) < 10
    if not (is_number and smallest <= int(number) <= MOST_TOKENS):
        raise ConfigError(
            explain(
                f"--tokenizer={tokenizer} does not name the size of a vocabulary",
                rule=f"vocabulary-size: {BPE}VOCAB with more tokens than the 256 bytes and the special tokens, at most"
                f" {MOST_TOKENS}",
                picture=f"special tokens: {', '.join(_special(is_masked))}",
                repair=f"set --tokenizer={BPE}32000, or a size of at least {smallest}",
            )
        )
    return int(number)


def train_vocabulary(texts: Iterable[str], *, vocab_size: int, is_masked: bool) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE like that of GPT-2: it encodes every text, and decodes it to the same text.

    Args:
        texts: the sample in which pairs are counted.
        vocab_size: number of tokens, including bytes and special tokens; fewer if the texts have no more pairs.
        is_masked: whether it has BERT's special tokens, or GPT-2's single one.

    Source: Sennrich et al. 2016 (arXiv 1508.07909); over bytes: Radford et al. 2019, section 2.2.

    Example:
        >>> library = train_vocabulary(["to be or not to be"] * 9, vocab_size=260, is_masked=False)
        >>> library.encode("to be").tokens
        ['to', 'Ġbe']
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_special(is_masked)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def sample_texts(files: Sequence[InputFile], *, key: str) -> Iterator[str]:
    """Yields all texts of `files` if these have at most `SAMPLE_BYTES`; else stretches evenly spread over them.

    A compressed file is read once, up to its last stretch. The sample skips damaged lines after its first stretch:
    the preparation of the whole text reports them.

    Args:
        files: the files, in order.
        key: key of the text in a line's JSON object.

    Raises:
        DataError: a line of the first stretch contains no document, or a file cannot be read.
    """
    num_bytes = sum(file.num_bytes for file in files)
    if num_bytes <= SAMPLE_BYTES:
        for file in files:
            for part in read_file(file):
                yield from _texts(part, key)
        return
    num_stretches = max(1, SAMPLE_BYTES // STRETCH_BYTES)
    opened: dict[int, Iterator[tuple[int, FilePart]]] = {}
    for stretch in range(num_stretches):
        for part in _stretch(files, num_bytes * stretch // num_stretches, opened):
            try:
                yield from _texts(part, key)
            except DataError:
                if stretch == 0:
                    raise


def _special(is_masked: bool) -> tuple[str, ...]:
    return MASKED_TOKENS if is_masked else CAUSAL_TOKENS


def _texts(part: FilePart, key: str) -> Iterator[str]:
    return (str(text.text) for text in texts_of(part, key=key, keep_bytes=False) if text.text)


def _stretch(
    files: Sequence[InputFile], position: int, opened: dict[int, Iterator[tuple[int, FilePart]]]
) -> Iterator[FilePart]:
    """Yields about `STRETCH_BYTES` from byte `position` on, counted over all files, across ends of files.

    Args:
        files: the files, in order.
        position: not before that of the stretch before.
        opened: by the number of a compressed file, what stretches have not read of it, with its places; new ones are
            added.
    """
    starts = [0, *accumulate(file.num_bytes for file in files)]
    index = min(bisect_right(starts, position) - 1, len(files) - 1)
    whole = left = STRETCH_BYTES
    for number, file in enumerate(files[index:], index):
        start = position - starts[index] if number == index else 0
        if file.is_compressed:
            parts = _from_place(opened.setdefault(number, _with_places(file)), start)
        else:
            parts = read_file(file, start=start)
        for part in parts:
            cut = len(part.data) if len(part.data) <= left else _end_within(part.data, left, is_jsonl=file.is_jsonl)
            yield FilePart(file, part.data[:cut], part.line, part.is_end, 0)
            left -= len(part.data)
            if left <= 0:
                return
        if file.is_compressed and left == whole:
            return  # it has been read to its end by earlier stretches


def _with_places(file: InputFile) -> Iterator[tuple[int, FilePart]]:
    """The parts of a file, each with the byte of the file at which it begins, about."""
    place = 0
    for part in read_file(file):
        yield place, part
        place += part.num_read_bytes


def _from_place(parts: Iterator[tuple[int, FilePart]], start: int) -> Iterator[FilePart]:
    return (part for _, part in dropwhile(lambda found: found[0] < start, parts))


def _end_within(data: bytes, left: int, *, is_jsonl: bool) -> int:
    """Where to cut `data` after at most `left` bytes: after a line, else in a text; a JSON line is always whole."""
    end = data.rfind(b"\n", 0, left) + 1
    return end or (data.find(b"\n") + 1 or len(data) if is_jsonl else place_to_cut(data[:left]))
