"""The preparation: from input files to PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json."""

from __future__ import annotations

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
from jaxpipe.data.prepare.encoding import Tally, encode_block
from jaxpipe.data.prepare.reading import FilePart, InputFile, find_files, read_blocks
from jaxpipe.data.prepare.vocabulary import sample_texts, train_vocabulary, vocab_size_of
from jaxpipe.data.tokenizer import BYTE, load_tokenizer
from jaxpipe.errors import ConfigError, DataError, explain

TOKENIZER = ".tokenizer.json"


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
    train_s: float
    encode_s: float


def prepare(
    inputs: Sequence[str],
    *,
    tokenizer: str,
    output: str,
    file_format: str = "auto",
    jsonl_key: str = "text",
    is_masked: bool = False,
    overwrite: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Writes the tokens of all documents of `inputs`, in order of their files' paths, with a separator after each.

    Args:
        inputs: files or globs.
        tokenizer: "byte", the path of a tokenizer.json or of its folder, or "bpe:VOCAB" to train one.
        output: path of the written files without their endings.
        file_format: "text", "jsonl", or "auto", by the names of the files.
        jsonl_key: key of the text in a line's JSON object.
        is_masked: whether a masked model will use it, so that the tokenizer has [CLS], [SEP], [MASK] and [PAD].
        overwrite: whether existing files are replaced.
        log: takes a line about the progress.

    Raises:
        ConfigError: a file or tokenizer does not exist, or `output` already exists.
        DataError: a file is damaged, none has text, or `output` cannot be written.
    """
    vocab_size = vocab_size_of(tokenizer, is_masked=is_masked)
    files = find_files(inputs, file_format=file_format)
    _check_output(output, overwrite=overwrite)
    with TemporaryDirectory(prefix="jaxpipe_prepare_") as folder:
        start = time.perf_counter()
        if vocab_size:
            log(f"training   a vocabulary of {vocab_size:,} tokens")
            texts = sample_texts(files, key=jsonl_key)
            library = train_vocabulary(texts, vocab_size=vocab_size, is_masked=is_masked)
            library.save(str(Path(folder) / FILE))
            tokenizer = folder
        trained = time.perf_counter()
        loaded = load_tokenizer(tokenizer, is_masked=is_masked)
        beside = {} if tokenizer == BYTE else {TOKENIZER: _bytes_of(tokenizer)}
        num_text_bytes, replaced, empty = 0, Tally(0), Tally(0)
        with write_indexed(output, vocab_size=loaded.vocab_size, beside=beside) as writer, _progress(files) as shown:
            for parts in shown(read_blocks(files)):
                block = encode_block(parts, loaded, key=jsonl_key)
                writer.add(block.tokens, block.lengths, is_open=block.is_open)
                num_text_bytes += block.num_text_bytes
                replaced += block.replaced
                empty += block.empty
            if not writer.num_tokens:
                raise _no_text(files)
        if not beside:
            Path(f"{output}{TOKENIZER}").expanduser().unlink(missing_ok=True)  # of an older preparation
    return Prepared(
        prefix=output,
        tokenizer=f"{output}{TOKENIZER}" if beside else BYTE,
        vocab_size=loaded.vocab_size,
        num_files=len(files),
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        dtype=writer.dtype,
        num_text_bytes=num_text_bytes,
        replaced=replaced,
        empty=empty,
        train_s=trained - start if vocab_size else 0.0,
        encode_s=time.perf_counter() - trained,
    )


def _check_output(output: str, *, overwrite: bool) -> None:
    targets = [tokens_path(output), index_path(output), Path(f"{output}{TOKENIZER}").expanduser()]
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


def _bytes_of(tokenizer: str) -> bytes:
    path = Path(tokenizer).expanduser()
    return (path / FILE if path.is_dir() else path).read_bytes()


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
