"""From input files to PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from jaxpipe.data.huggingface_tokenizer import FILE
from jaxpipe.data.indexed_format import index_path, tokens_path
from jaxpipe.data.indexed_writer import write_indexed
from jaxpipe.data.tokenizer import BYTE, load_tokenizer
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.prepare.encoding import Counted, Job
from jaxpipe.prepare.input_files import InputFile, find_files
from jaxpipe.prepare.reading import PART_BYTES, Part, read_blocks
from jaxpipe.prepare.sample import sample_texts
from jaxpipe.prepare.vocabulary import train_vocabulary, vocab_size_of
from jaxpipe.prepare.workers import encode_blocks

TOKENIZER = ".tokenizer.json"


@dataclass(frozen=True)
class Prepared:
    """What was prepared.

    Attributes:
        prefix: of the files that were written.
        tokenizer: what to set data.tokenizer to.
        vocab_size: of the tokenizer.
        num_files: that were read.
        num_documents: written.
        num_tokens: written, a separator behind every document among them.
        dtype: of a token.
        num_text_bytes: of text, in UTF-8.
        replaced: places that were no UTF-8.
        empty: documents without text, which were left out.
        num_workers: processes.
        train_s: for training a vocabulary, if one was.
        encode_s: for reading, encoding and writing.
    """

    prefix: str
    tokenizer: str
    vocab_size: int
    num_files: int
    num_documents: int
    num_tokens: int
    dtype: np.dtype
    num_text_bytes: int
    replaced: Counted
    empty: Counted
    num_workers: int
    train_s: float
    encode_s: float


def prepare(
    inputs: Sequence[str],
    *,
    tokenizer: str,
    output: str,
    form: str = "auto",
    jsonl_key: str = "text",
    is_masked: bool = False,
    num_workers: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Writes the tokens of all documents of `inputs`, in order of their files' paths, a separator behind each.

    Args:
        inputs: files or globs.
        tokenizer: "byte", the path of a tokenizer.json or of its folder, or "bpe:VOCAB" to train one.
        output: prefix of the files that are written.
        form: "text", "jsonl", or "auto", by the names of the files.
        jsonl_key: of the text in a line's JSON object.
        is_masked: whether a masked model will use it, so that the tokenizer has [CLS], [SEP], [MASK] and [PAD].
        num_workers: processes; None is one for each core, as far as there is work for them.
        overwrite: whether files that are there are replaced.
        say: takes a line about what goes on.

    Raises:
        ConfigError: no such files or tokenizer, or `output` is there.
        DataError: a file is damaged, none has text, or `output` cannot be written.
    """
    vocab_size = vocab_size_of(tokenizer, is_masked=is_masked)
    files = find_files(inputs, form=form)
    _check_output(output, overwrite=overwrite)
    num_workers = _num_workers(files, num_workers)
    with TemporaryDirectory(prefix="jaxpipe_prepare_") as folder:
        start = time.perf_counter()
        if vocab_size:
            say(f"training   a vocabulary of {vocab_size:,} words")
            texts = sample_texts(files, key=jsonl_key)
            library = train_vocabulary(texts, vocab_size=vocab_size, is_masked=is_masked)
            library.save(str(Path(folder) / FILE))
            tokenizer = folder
        trained = time.perf_counter()
        vocabulary = load_tokenizer(tokenizer, is_masked=is_masked)
        beside = {} if tokenizer == BYTE else {TOKENIZER: _bytes_of(tokenizer)}
        job = Job(tokenizer, is_masked, jsonl_key)
        num_text_bytes, replaced, empty = 0, Counted(0), Counted(0)
        with write_indexed(output, vocab_size=vocabulary.vocab_size, beside=beside) as writer, _progress(files) as seen:
            for block in encode_blocks(seen(read_blocks(files)), job, num_workers=num_workers):
                writer.add(block.tokens, block.lengths, is_open=block.is_open)
                num_text_bytes += block.num_text_bytes
                replaced += block.replaced
                empty += block.empty
            if not writer.num_tokens:
                raise _no_text(files)
        if not beside:
            Path(f"{output}{TOKENIZER}").expanduser().unlink(missing_ok=True)  # of what was there before
    return Prepared(
        prefix=output,
        tokenizer=f"{output}{TOKENIZER}" if beside else BYTE,
        vocab_size=vocabulary.vocab_size,
        num_files=len(files),
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        dtype=writer.dtype,
        num_text_bytes=num_text_bytes,
        replaced=replaced,
        empty=empty,
        num_workers=num_workers,
        train_s=trained - start if vocab_size else 0.0,
        encode_s=time.perf_counter() - trained,
    )


def _check_output(output: str, *, overwrite: bool) -> None:
    targets = [tokens_path(output), index_path(output), Path(f"{output}{TOKENIZER}").expanduser()]
    there = [str(path) for path in targets if path.exists()]
    if there and not overwrite:
        raise ConfigError(
            f"--output={output} is there already\n"
            "  rule output-files: nothing is written over unasked\n"
            f"      there: {', '.join(there)}\n"
            "  repair: name another --output, or add --overwrite"
        )


def _num_workers(files: Sequence[InputFile], num_workers: int | None) -> int:
    """Processes: as many as asked for, else as many as there are cores and have some blocks each."""
    if num_workers is not None:
        return num_workers
    num_blocks = sum(file.num_bytes for file in files) // PART_BYTES
    return max(1, min(len(os.sched_getaffinity(0)), num_blocks // 4))


def _bytes_of(tokenizer: str) -> bytes:
    path = Path(tokenizer).expanduser()
    return (path / FILE if path.is_dir() else path).read_bytes()


@contextmanager
def _progress(files: Sequence[InputFile]) -> Iterator[Callable[[Iterator[list[Part]]], Iterator[list[Part]]]]:
    """Passes blocks on and draws how many bytes of the files are read, where someone sees it."""
    num_bytes = sum(file.num_bytes for file in files)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None) as bar:

        def seen(blocks: Iterator[list[Part]]) -> Iterator[list[Part]]:
            for block in blocks:
                yield block
                bar.update(sum(part.num_read_bytes for part in block))

        yield seen


def _no_text(files: Sequence[InputFile]) -> DataError:
    return DataError(
        f"no text in {len(files)} files\n"
        "  rule input-text: there is at least one document that is not empty\n"
        f"      first: {files[0].path}, {files[0].num_bytes} bytes\n"
        "  repair: name other files with --input"
    )
