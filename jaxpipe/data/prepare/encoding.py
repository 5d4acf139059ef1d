"""Encodes parts of files: their documents as tokens, and what was replaced or left out.

The tokens are those of the tokenizer's own `encode_batch`, which uses all cores. Left to others: the text of a part
(`texts`), and of a conversation (`chat`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import add

import numpy as np

from jaxpipe.data.prepare.chat import ChatOptions, MarkedText, marked_text
from jaxpipe.data.prepare.reading import FilePart
from jaxpipe.data.prepare.texts import json_lines, replace_surrogates, texts_of
from jaxpipe.data.protocols import Tokenizer
from jaxpipe.data.tokenizer import ByteTokenizer, with_beginning
from jaxpipe.errors import DataError


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
class Notes:
    """What was replaced or left out of a text; notes of several texts can be added."""

    num_text_bytes: int = 0  # in UTF-8
    replaced: Tally = Tally(0)  # places of invalid UTF-8
    empty: Tally = Tally(0)  # documents without text, which are left out
    unknown: Tally = Tally(0)  # tokens that stand for what the vocabulary lacks
    # Characters that the vocabulary lacks, and how often, if the tokenizer leaves them out.
    dropped: Counter[str] = field(default_factory=Counter)
    markup: Tally = Tally(0)  # prompts and answers with the name of a special token, which was read as text

    def __add__(self, other: Notes) -> Notes:
        return Notes(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class EncodedBlock:
    """The tokens of a block of files."""

    tokens: np.ndarray  # "tokens", with a separator after every document that ends
    lengths: np.ndarray  # "document", tokens of each; together all of `tokens`
    is_open: bool  # whether the last document continues in the next block
    notes: Notes
    learned: np.ndarray | None = None  # for each token 1 if it is learned, 0 if it is only read; None: all are


def encode_chat(parts: Sequence[FilePart], tokenizer: Tokenizer, options: ChatOptions) -> EncodedBlock:
    """Returns the tokens of the conversations of `parts`, in which answers alone are learned.

    A prompt with its answer ends with a separator, which is learned; messages end as their template ends them.

    Raises:
        DataError: a line is no conversation, or is longer than a row; `chat.marked_text` has the others.
    """
    lines = [line for part in parts for line in json_lines(part, has_twins=False)]
    marked = [marked_text(line.value, options, place=line.place) for line in lines]
    # One letter for another: the spans stay where they are.
    texts = [replace(text, text=replace_surrogates(text.text)[0]) for text in marked]
    rendered = iter(_rendered([text for text in texts if text.is_rendered], tokenizer))
    answered = [(text, line.place) for text, line in zip(texts, lines, strict=True) if not text.is_rendered]
    following = iter(_answered(answered, tokenizer, options))
    # An empty first document gives the dtype, and something to concatenate where there is no line.
    documents: list[tuple[np.ndarray, np.ndarray]] = [(tokenizer.encode(""), np.zeros(0, np.uint8))]
    for line, text in zip(lines, texts, strict=True):
        tokens, learned = next(rendered if text.is_rendered else following)
        # - 1: nothing predicts the first token.
        if len(tokens) - 1 > options.seq_len:
            raise DataError(
                f"{line.place} is longer than a row",
                rule="chat-length: a conversation is not cut, so it fits into a row of data.seq_len tokens",
                picture=f"{len(tokens) - 1} tokens to predict, --seq_len={options.seq_len}",
                repair="set a larger --seq_len, and train with data.seq_len as large; or shorten or remove the line",
            )
        if not learned[1:].any():
            raise DataError(
                f"{line.place} has nothing to learn",
                rule="chat-answer: a conversation has an answer of one token or more, after its first token",
                picture="its answers are empty, once the chat template has written them",
                repair="correct or remove the line; or mark the answers in the template by {% generation %} ..."
                " {% endgeneration %}",
            )
        documents.append((tokens, learned))
    tokens, learned = (np.concatenate(some) for some in zip(*documents, strict=True))
    dropped = (_dropped(tokenizer, [text.text], text.is_rendered or options.reads_markup) for text in texts)
    is_text = [(line, text.markup) for line, text in zip(lines, texts, strict=True) if text.markup]
    return EncodedBlock(
        tokens,
        np.array([len(ids) for ids, _ in documents[1:]], np.int64),
        is_open=False,
        notes=Notes(
            num_text_bytes=sum(len(text.text.encode()) for text in texts),
            replaced=_tally((line.num_replaced, line.place) for line in lines),
            unknown=_unknown(tokenizer, [ids for ids, _ in documents[1:]], [line.place for line in lines]),
            dropped=sum(dropped, Counter()),
            markup=_tally((1, f"{name!r} in {line.place}") for line, name in is_text),
        ),
        learned=learned,
    )


def _rendered(texts: Sequence[MarkedText], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens of rendered conversations, and which are learned: those with any character of an answer.

    So a word of an answer is learned with the space before it, as in transformers.
    """
    encoded = tokenizer.encode_places([text.text for text in texts])
    for text, (tokens, first, stop) in zip(texts, encoded, strict=True):
        learned = np.zeros(len(tokens), np.uint8)
        for begin, end in text.spans:
            # Spans and tokens are half open, so these overlap.
            learned |= (begin < stop) & (first < end)
        yield tokens, learned


# A letter before an answer where its prompt cannot stand: those first that no pre-tokenizer takes for nothing.
_BEFORE = (":", "a", "0", ")", "\n", " ")


def _answered(
    texts: Sequence[tuple[MarkedText, str]], tokenizer: Tokenizer, options: ChatOptions
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens of prompts, each with its answer and a separator, as if the model went on from the prompt.

    A prompt has the tokens that `jaxpipe.sample` gives the model, with no second beginning if it writes one itself. An
    answer has those that it has behind its prompt: many tokenizers put a space before a text, not before its rest.
    Where a token has letters of both, as " on" of "sat " and "on", the answer follows another letter. An answer ends
    with the separator, unless it writes a token itself at which a generated text ends.
    """
    reads_markup = options.reads_markup
    pairs = [(text.text[: text.spans[0][0]], text.text[text.spans[0][0] :]) for text, _ in texts]
    prompts = [tokens for tokens, _, _ in tokenizer.encode_places([prompt for prompt, _ in pairs], reads_markup)]
    answers = _following(pairs, prompts, tokenizer, reads_markup)
    for (_, place), prompt, answer in zip(texts, prompts, answers, strict=True):
        if answer is None:
            raise DataError(
                f"{place} has an answer that the tokenizer does not tell from what is before it",
                rule="chat-answer: some token begins with the answer, after its prompt or after one letter",
                picture=f"tried {', '.join(map(repr, _BEFORE))}",
                repair="correct or remove the line",
            )
        before = with_beginning(prompt.tolist(), tokenizer, reads_special=reads_markup)
        is_ended = answer[-1] in options.ends
        tokens = np.array([*before, *answer.tolist(), *([] if is_ended else [tokenizer.separator])], prompt.dtype)
        yield tokens, (np.arange(len(tokens)) >= len(before)).astype(np.uint8)


def _following(
    pairs: Sequence[tuple[str, str]], prompts: Sequence[np.ndarray], tokenizer: Tokenizer, reads_markup: bool
) -> list[np.ndarray | None]:
    """The tokens of the answers of `pairs` behind their prompts, whose tokens are given; None: they cannot be told."""
    answers: list[np.ndarray | None] = [None] * len(pairs)
    befores = [prompt for prompt, _ in pairs]
    of_befores = prompts
    # The prompt itself first, since a letter in its place may change the answer's tokens.
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


def encode_block(parts: Sequence[FilePart], tokenizer: Tokenizer, *, key: str) -> EncodedBlock:
    """Returns the tokens of `parts`; DataError if a line contains no document."""
    keep_bytes = isinstance(tokenizer, ByteTokenizer)
    texts = [text for part in parts for text in texts_of(part, key=key, keep_bytes=keep_bytes)]
    full = [text for text in texts if text.text]
    rows = tokenizer.encode_batch([text.text for text in full])
    lengths = np.array([len(row) for row in rows], np.int64)
    is_end = np.array([text.is_end for text in full], bool)
    # No text: its tokens are none and give the dtype.
    tokens = np.concatenate([tokenizer.encode(""), *rows])
    return EncodedBlock(
        # A document that goes on in the next block gets its separator there.
        np.insert(tokens, np.cumsum(lengths)[is_end], tokenizer.separator),
        _document_lengths(lengths + is_end, is_end),
        is_open=bool(full) and not full[-1].is_end,
        notes=Notes(
            num_text_bytes=sum(len(text.text.encode() if isinstance(text.text, str) else text.text) for text in full),
            replaced=_tally((text.num_replaced, text.place) for text in texts),
            empty=_tally((1, text.place) for text in texts if not text.text),
            unknown=_unknown(tokenizer, rows, [text.place for text in full]),
            dropped=_dropped(tokenizer, [text.text for text in full]),
        ),
    )


def _tally(counts: Iterable[tuple[int, str]]) -> Tally:
    """The sum of numbers, and the place of the first that is not 0."""
    return sum((Tally(num, place) for num, place in counts if num), Tally(0))


def _dropped(tokenizer: Tokenizer, texts: Sequence[str | bytes], reads_special: bool = False) -> Counter[str]:
    """The characters of `texts` that the tokenizer has left out; if it leaves none out, they were an error before."""
    return tokenizer.lacking(texts, reads_special=reads_special) if tokenizer.drops else Counter()


def _unknown(tokenizer: Tokenizer, rows: Sequence[np.ndarray], places: Sequence[str]) -> Tally:
    """The number of unknown tokens of `rows`, which come from `places`."""
    if tokenizer.unknown is None:
        return Tally(0)
    return _tally(zip((int(np.count_nonzero(row == tokenizer.unknown)) for row in rows), places, strict=True))


def _document_lengths(lengths: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """Returns the lengths of documents, given those of parts of documents, some of which end one.

    Example:
        >>> _document_lengths(np.array([5, 7, 2, 4]), np.array([True, False, True, False]))
        array([5, 9, 4])
    """
    if not len(lengths):
        return lengths
    # A part begins a document if the part before it ended one.
    firsts = np.flatnonzero(np.concatenate([[True], is_end[:-1]]))
    return np.add.reduceat(lengths, firsts)
