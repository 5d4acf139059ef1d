"""A vocabulary of byte pairs, trained on a sample of the text that is prepared.

Goes in: "bpe:VOCAB" and the input files. Comes out: the library's tokenizer. Left to others: saving and loading it
(`preparation`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, dropwhile

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxpipe.data.prepare.reading import FilePart, InputFile, place_to_cut, read_file
from jaxpipe.data.prepare.texts import texts_of
from jaxpipe.errors import ConfigError, DataError

BPE = "bpe:"
CAUSAL_TOKENS = ("<|endoftext|>",)
MASKED_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

MOST_TOKENS = 10_000_000
SAMPLE_BYTES = 2**26
STRETCH_BYTES = 2**20


def vocab_size_of(tokenizer: str, *, is_masked: bool) -> int | None:
    """The size of the vocabulary to train, of bpe:VOCAB; None for other tokenizers, ConfigError for a wrong VOCAB."""
    if not tokenizer.startswith(BPE):
        return None
    # + 1: at least one pair of bytes.
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + len(_special(is_masked)) + 1
    number = tokenizer.removeprefix(BPE)
    # A number of more digits is too large in any case, and `int` refuses thousands of them with an error of its own.
    is_number = number.isascii() and number.isdigit() and len(number) < 10
    if not (is_number and smallest <= int(number) <= MOST_TOKENS):
        raise ConfigError(
            f"--tokenizer={tokenizer} does not name the size of a vocabulary",
            rule=f"vocabulary-size: {BPE}VOCAB with more tokens than the 256 bytes and the special tokens, at most"
            f" {MOST_TOKENS}",
            picture=f"special tokens: {', '.join(_special(is_masked))}",
            repair=f"set --tokenizer={BPE}32000, or a size of at least {smallest}",
        )
    return int(number)


def train_vocabulary(texts: Iterable[str], *, vocab_size: int, is_masked: bool) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE like that of GPT-2: it encodes every text, and decodes it to the same text.

    Args:
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
        # Sorted, since the library gives the bytes in any order, and tokens are numbered by it.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def sample_texts(files: Sequence[InputFile], *, key: str) -> Iterator[str]:
    """Yields all texts of `files` if these have at most `SAMPLE_BYTES`; else stretches evenly spread over them.

    A compressed file is read once, up to its last stretch. The sample skips damaged lines after its first stretch:
    the preparation of the whole text reports them.

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
            # A line that is damaged further on is told with its place when all text is read.
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
        position: not before that of the stretch before.
        opened: by the number of a compressed file, what stretches have not read of it, with its places; new ones are
            added.
    """
    starts = [0, *accumulate(file.num_bytes for file in files)]
    # - 1: the file whose start is not behind the position; at the very end there is none further.
    index = min(bisect_right(starts, position) - 1, len(files) - 1)
    whole = left = STRETCH_BYTES
    for number, file in enumerate(files[index:], index):
        start = position - starts[index] if number == index else 0
        if file.is_compressed:
            placed = opened.setdefault(number, _with_places(file))
            parts = (part for _, part in dropwhile(lambda entry, start=start: entry[0] < start, placed))
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


def _end_within(data: bytes, left: int, *, is_jsonl: bool) -> int:
    """Where to cut `data` after at most `left` bytes: after a line, else in a text; a JSON line is always whole."""
    # + 1: the line's end stays with the line; 0 if there is none.
    end = data.rfind(b"\n", 0, left) + 1
    return end or (data.find(b"\n") + 1 or len(data) if is_jsonl else place_to_cut(data[:left]))
