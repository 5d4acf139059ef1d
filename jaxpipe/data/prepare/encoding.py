"""Encodes parts of files: their documents as tokens, and what was replaced or left out.

JSON lines are parsed, and invalid UTF-8 is replaced by U+FFFD and counted. The tokens are those of the tokenizer's own
`encode_batch`, which uses all cores.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpipe.data.prepare.chat import ChatForm, MarkedText, marked_text
from jaxpipe.data.prepare.reading import FilePart
from jaxpipe.data.protocols import Tokenizer
from jaxpipe.data.tokenizer import ByteTokenizer, with_beginning
from jaxpipe.errors import DataError, explain

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Tally:
    """The number of times that something happened, and where it happened first.

    Example:
        >>> Tally(0) + Tally(2, "a.txt") + Tally(1, "b.txt")
        Tally(num=3, first='a.txt')
    """

    num: int
    first: str = ""

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.num + other.num, self.first or other.first)


@dataclass(frozen=True)
class EncodedBlock:
    """The tokens of a block of files.

    Attributes:
        tokens: "tokens", with a separator after every document that ends.
        lengths: "document", tokens of each; together all of `tokens`.
        is_open: whether the last document continues in the next block.
        num_text_bytes: bytes of the text in UTF-8.
        replaced: places of invalid UTF-8.
        empty: documents without text, which are left out.
        unknown: tokens that stand for what the vocabulary lacks.
        dropped: characters that the vocabulary lacks, if the tokenizer leaves them out.
        learned: for each token 1 if it is learned, 0 if it is only read; None: all are.
        markup: prompts and answers with the name of a special token, which was read as text.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_open: bool
    num_text_bytes: int
    replaced: Tally
    empty: Tally
    unknown: Tally
    dropped: Counter[str]
    learned: np.ndarray | None = None
    markup: Tally = Tally(0)


def encode_chat(parts: Sequence[FilePart], tokenizer: Tokenizer, form: ChatForm) -> EncodedBlock:
    """Returns the tokens of the conversations of `parts`, in which answers alone are learned.

    A prompt with its answer ends with a separator, which is learned; messages end as their template ends them.

    Raises:
        DataError: a line is no conversation, or is longer than a row; `chat.marked_text` has the others.
    """
    lines = [line for part in parts for line in _json_lines(part, has_twins=False)]
    found = [marked_text(line.value, form, place=line.place) for line in lines]
    # One letter for another: the spans stay where they are.
    texts = [replace(text, text=_replace_surrogates(text.text)[0]) for text in found]
    rendered = iter(_rendered([text for text in texts if text.is_rendered], tokenizer))
    answered = [(text, line.place) for text, line in zip(texts, lines, strict=True) if not text.is_rendered]
    following = iter(_answered(answered, tokenizer, form))
    documents: list[tuple[np.ndarray, np.ndarray]] = [(tokenizer.encode(""), np.zeros(0, np.uint8))]
    for line, text in zip(lines, texts, strict=True):
        tokens, learned = next(rendered if text.is_rendered else following)
        _check_length(len(tokens) - 1, form.seq_len, line.place)
        if not learned[1:].any():
            raise DataError(
                explain(
                    f"{line.place} has nothing to learn",
                    rule="chat-answer: a conversation has an answer of one token or more, after its first token",
                    picture="its answers are empty, once the chat template has written them",
                    repair="correct or remove the line; or mark the answers in the template by {% generation %} ..."
                    " {% endgeneration %}",
                )
            )
        documents.append((tokens, learned))
    tokens, learned = (np.concatenate(some) for some in zip(*documents, strict=True))
    dropped = (_dropped(tokenizer, [text.text], text.is_rendered or form.reads_markup) for text in texts)
    is_text = [(line, text.markup) for line, text in zip(lines, texts, strict=True) if text.markup]
    return EncodedBlock(
        tokens,
        np.array([len(one) for one, _ in documents[1:]], np.int64),
        is_open=False,
        num_text_bytes=sum(len(text.text.encode()) for text in texts),
        replaced=sum((Tally(line.num_replaced, line.place) for line in lines if line.num_replaced), Tally(0)),
        empty=Tally(0),
        unknown=_unknown(tokenizer, [one for one, _ in documents[1:]], [line.place for line in lines]),
        dropped=sum(dropped, Counter()),
        learned=learned,
        markup=sum((Tally(1, f"{name!r} in {line.place}") for line, name in is_text), Tally(0)),
    )


def _rendered(texts: Sequence[MarkedText], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens of rendered conversations, and which are learned: those with any character of an answer.

    So a word of an answer is learned with the space before it, as in transformers.
    """
    encoded = tokenizer.encode_places([text.text for text in texts])
    for text, (tokens, first, stop) in zip(texts, encoded, strict=True):
        learned = np.zeros(len(tokens), np.uint8)
        for begin, end in text.spans:
            learned |= (begin < stop) & (first < end)
        yield tokens, learned


# A letter before an answer where its prompt cannot stand: those first that no pre-tokenizer takes for nothing.
_BEFORE = (":", "a", "0", ")", "\n", " ")


def _answered(
    texts: Sequence[tuple[MarkedText, str]], tokenizer: Tokenizer, form: ChatForm
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens of prompts, each with its answer and a separator, as if the model went on from the prompt.

    A prompt has the tokens that `jaxpipe.sample` gives the model, with no second beginning if it writes one itself. An
    answer has those that it has behind its prompt: many tokenizers put a space before a text, not before its rest.
    Where a token has letters of both, as " on" of "sat " and "on", the answer follows another letter. It ends with the
    separator, unless it writes a token itself at which a generated text ends.

    Args:
        texts: prompts with their answers, and file and line of each.
        tokenizer: encodes them.
        form: whether names of special tokens are these tokens, and which of them end a text.
    """
    reads_markup = form.reads_markup
    pairs = [(text.text[: text.spans[0][0]], text.text[text.spans[0][0] :]) for text, _ in texts]
    prompts = [tokens for tokens, _, _ in tokenizer.encode_places([prompt for prompt, _ in pairs], reads_markup)]
    answers = _following(pairs, prompts, tokenizer, reads_markup)
    for (_, place), prompt, answer in zip(texts, prompts, answers, strict=True):
        if answer is None:
            raise DataError(
                explain(
                    f"{place} has an answer that the tokenizer does not tell from what is before it",
                    rule="chat-answer: some token begins with the answer, after its prompt or after one letter",
                    picture=f"tried {', '.join(map(repr, _BEFORE))}",
                    repair="correct or remove the line",
                )
            )
        before = with_beginning(prompt.tolist(), tokenizer, reads_special=reads_markup)
        is_ended = answer[-1] in form.ends
        tokens = np.array([*before, *answer.tolist(), *([] if is_ended else [tokenizer.separator])], prompt.dtype)
        yield tokens, (np.arange(len(tokens)) >= len(before)).astype(np.uint8)


def _following(
    pairs: Sequence[tuple[str, str]], prompts: Sequence[np.ndarray], tokenizer: Tokenizer, reads_markup: bool
) -> list[np.ndarray | None]:
    """The tokens of the answers of `pairs` behind their prompts, whose tokens are given; None: they cannot be told."""
    answers: list[np.ndarray | None] = [None] * len(pairs)
    befores = [prompt for prompt, _ in pairs]
    of_befores = prompts
    for letter in (None, *_BEFORE):
        left = [i for i, answer in enumerate(answers) if answer is None]
        if not left:
            break
        if letter is not None:
            if tokenizer.lacking([letter]):
                continue
            ((of_letter, _, _),) = tokenizer.encode_places([letter], reads_markup)
            befores = [letter] * len(pairs)
            of_befores = [of_letter] * len(pairs)
        both = tokenizer.encode_places([befores[i] + pairs[i][1] for i in left], reads_markup)
        for i, (tokens, _, stop) in zip(left, both, strict=True):
            num = len(of_befores[i])
            # Places alone do not tell: some tokenizers leave spaces out of them. Unknown words look alike as tokens.
            is_before = np.array_equal(tokens[:num], of_befores[i]) and (stop[:num] <= len(befores[i])).all()
            if is_before and len(tokens) > num:
                answers[i] = tokens[num:]
    return answers


def _check_length(num_predicted: int, seq_len: int, place: str) -> None:
    if num_predicted > seq_len:
        raise DataError(
            explain(
                f"{place} is longer than a row",
                rule="chat-length: a conversation is not cut, so it fits into a row of data.seq_len tokens",
                picture=f"{num_predicted} tokens to predict, --seq_len={seq_len}",
                repair="set a larger --seq_len, and train with data.seq_len as large; or shorten or remove the line",
            )
        )


def encode_block(parts: Sequence[FilePart], tokenizer: Tokenizer, *, key: str) -> EncodedBlock:
    """Returns the tokens of `parts`.

    Args:
        parts: consecutive parts of files.
        tokenizer: encodes the text of each document.
        key: key of the text in a line's JSON object.

    Raises:
        DataError: a line contains no document.
    """
    keep_bytes = isinstance(tokenizer, ByteTokenizer)
    texts = [text for part in parts for text in texts_of(part, key=key, keep_bytes=keep_bytes)]
    full = [text for text in texts if text.text]
    rows = tokenizer.encode_batch([text.text for text in full])
    lengths = np.array([len(row) for row in rows], np.int64)
    is_end = np.array([text.is_end for text in full], bool)
    tokens = np.concatenate([tokenizer.encode(""), *rows])
    return EncodedBlock(
        np.insert(tokens, np.cumsum(lengths)[is_end], tokenizer.separator),
        _document_lengths(lengths + is_end, is_end),
        is_open=bool(full) and not full[-1].is_end,
        num_text_bytes=sum(len(_as_bytes(text.text)) for text in full),
        replaced=sum((Tally(text.num_replaced, text.place) for text in texts if text.num_replaced), Tally(0)),
        empty=sum((Tally(1, text.place) for text in texts if not text.text), Tally(0)),
        unknown=_unknown(tokenizer, rows, [text.place for text in full]),
        dropped=_dropped(tokenizer, [text.text for text in full]),
    )


def _dropped(tokenizer: Tokenizer, texts: Sequence[str | bytes], reads_special: bool = False) -> Counter[str]:
    """The characters of `texts` that the tokenizer has left out; if it leaves none out, they were an error before."""
    return tokenizer.lacking(texts, reads_special=reads_special) if tokenizer.drops else Counter()


def _unknown(tokenizer: Tokenizer, rows: Sequence[np.ndarray], places: Sequence[str]) -> Tally:
    """The number of unknown tokens of `rows`, which come from `places`."""
    if tokenizer.unknown is None:
        return Tally(0)
    counts = (int(np.count_nonzero(row == tokenizer.unknown)) for row in rows)
    return sum((Tally(num, place) for num, place in zip(counts, places, strict=True) if num), Tally(0))


def _document_lengths(lengths: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """Returns the lengths of documents, given those of parts of documents, some of which end one.

    Example:
        >>> _document_lengths(np.array([5, 7, 2, 4]), np.array([True, False, True, False]))
        array([5, 9, 4])
    """
    if not len(lengths):
        return lengths
    firsts = np.flatnonzero(np.concatenate([[True], is_end[:-1]]))
    return np.add.reduceat(lengths, firsts)


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


@dataclass(frozen=True)
class Text:
    """A document, or a part of one.

    Attributes:
        text: characters, or the unchanged bytes of a text file if tokens are bytes.
        is_end: whether the document ends with it.
        num_replaced: places of invalid UTF-8, which were replaced by U+FFFD.
        place: the file, and the line if it is one of JSON lines.
    """

    text: str | bytes
    is_end: bool
    num_replaced: int
    place: str


def texts_of(part: FilePart, *, key: str, keep_bytes: bool) -> Iterator[Text]:
    """Yields the texts of `part`.

    Args:
        part: the part of a file.
        key: key of the text in a line's JSON object.
        keep_bytes: whether the bytes of a text file stay as they are.

    Raises:
        DataError: a line is not a JSON object with a text under `key`.
    """
    if part.file.is_jsonl:
        for line in _json_lines(part):
            yield _text_under(key, line)
    elif keep_bytes:
        yield Text(part.data, part.is_end, 0, str(part.file.path))
    else:
        text, num_replaced = _decode(part.data)
        yield Text(text, part.is_end, num_replaced, str(part.file.path))


_JSONL = "jsonl: every line is a JSON object with the text of a document"


@dataclass(frozen=True)
class _Line:
    """A line of JSON: its value, its text, the file and line, and how often invalid UTF-8 was replaced."""

    value: Any
    text: str
    place: str
    num_replaced: int


def _json_lines(part: FilePart, *, has_twins: bool = True) -> Iterator[_Line]:
    """Yields the lines that are not empty; unless it `has_twins`, a key twice in an object is an error."""
    for line, data in enumerate(part.data.split(b"\n"), part.line):
        if data.strip():
            data = data.removeprefix(_BYTE_ORDER_MARK) if line == 1 else data
            yield _parse_line(data, f"{part.file.path}:{line}", None if has_twins else _without_twins)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, each key of which is there once: of two, JSON's own parser takes the last in silence."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return made


def _parse_line(data: bytes, place: str, make: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None) -> _Line:
    text, num_replaced = _decode(data)
    try:
        return _Line(json.loads(text, object_pairs_hook=make), text, place, num_replaced)
    except (ValueError, RecursionError) as error:
        raise DataError(
            explain(
                f"{place} is not JSON",
                rule=_JSONL,
                picture=f"{error}: {_shorten(text)}",
                repair="correct or remove the line; --format=text takes a file that is plain text",
            )
        ) from error


def _text_under(key: str, line: _Line) -> Text:
    document = line.value
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, str):
        keys = f"; its keys: {', '.join(document)}" if isinstance(document, dict) else ""
        raise DataError(
            explain(
                f"{line.place} has no text under {key!r}",
                rule=_JSONL,
                picture=f"found {_shorten(line.text)}{keys}",
                repair="name the key of the text with --jsonl_key, or --format=chat for chats, or correct the line",
            )
        )
    text, num_surrogates = _replace_surrogates(value)
    return Text(text, True, line.num_replaced + num_surrogates, line.place)


def _decode(data: bytes) -> tuple[str, int]:
    """Returns the text of `data`, and the number of places where invalid UTF-8 was replaced."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def _replace_surrogates(text: str) -> tuple[str, int]:
    r"""Returns `text` with U+FFFD for lone surrogates, and their number: JSON can spell "\ud800", UTF-8 cannot."""
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError:
        replaced = "".join(REPLACEMENT if "\ud800" <= letter <= "\udfff" else letter for letter in text)
        return replaced, replaced.count(REPLACEMENT) - text.count(REPLACEMENT)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."
