"""Rows of tokens that are each predicted from those before them, as GPT and LLaMA are trained.

A row is a window over the running text (`CausalSequences`), or has whole documents (`PackedSequences`): one, padded, or
several back to back that do not see each other. Goes in: tokens, or documents. Comes out: rows for `Batches`. A
document of n tokens has n - 1 to predict, so it takes n - 1 columns of a row; a longer one than a row is cut into
pieces, of which all but the last fill a row. Left to others: attention inside a document
(`models.attention_blocks.Visible`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.data.protocols import Batch, Documents, Tokens


@dataclass(frozen=True)
class CausalSequences:
    """Consecutive sequences of a source of tokens, without overlap; every epoch has the same ones.

    Documents are packed by concatenating and splitting: each is followed by a separator, and a sequence may end one
    document and begin the next. Nothing is padded, and only the end of the source is left out.

    Example:
        >>> CausalSequences(np.arange(100), seq_len=4).take(np.array([2]), epoch=0)["targets"]
        array([[ 9, 10, 11, 12]], dtype=int32)
    """

    # The source, at least `seq_len + 1` tokens; read only where a sequence is taken. Of Documents that are not learned
    # as a whole, only what is learned is a target.
    tokens: Tokens | Documents
    seq_len: int  # tokens of one sequence

    @property
    def learned(self) -> Tokens | None:
        """For each token of the source 1 if it is learned, else 0; None: all are."""
        return self.tokens.learned if isinstance(self.tokens, Documents) else None

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch; each needs one token more, the target of its last one."""
        # - 1: the last token is a target alone.
        return (len(self.tokens) - 1) // self.seq_len

    def take(self, indices: np.ndarray, *, epoch: int) -> Batch:
        """Returns the arrays "tokens" and "targets", the next tokens, each "sequence seq", int32."""
        del epoch
        # + 1: the target of the last token.
        positions = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        window = self.tokens[positions].astype(np.int32)
        targets = window[:, 1:]
        if isinstance(self.tokens, Documents) and self.learned is not None:
            targets = self.tokens.targets(positions[:, 1:])
        return {"tokens": window[:, :-1], "targets": targets}


PACKING = ("none", "windows", "documents")  # what a row is, `data.packing` of a config
NONE, WINDOWS, DOCUMENTS = PACKING


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Rows of documents; every epoch has the same ones.

        row        | A A A A A | B B B | . . |       two documents of 6 and 4 tokens, and padding
        positions  | 0 1 2 3 4 | 0 1 2 | 0 1 |

    Example:
        >>> documents = Documents.ending_at(np.arange(10), lambda: np.array([6, 10]))
        >>> PackedSequences(documents, seq_len=10).take(np.array([0]), epoch=0)["positions"]
        array([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]], dtype=int32)
    """

    documents: Documents  # the source; read only where a row is taken
    seq_len: int  # tokens of a row
    one_each: bool = False  # whether a row has one document, or piece of one; else as many as fit, by best fit
    tells_padding: bool = False  # whether a batch says which columns are padding, for routers of experts

    @property
    def learned(self) -> Tokens | None:
        """For each token of the source 1 if it is learned, else 0; None: all are."""
        return self.documents.learned

    @property
    def num_sequences(self) -> int:
        """Rows of one epoch."""
        return len(self._rows[1]) - 1

    @property
    def padding(self) -> float:
        """The fraction of all columns that hold no document."""
        # At least 1: without a row there is no fraction.
        return 1 - self._lengths.sum() / max(1, self.num_sequences * self.seq_len)

    @property
    def num_documents(self) -> int:
        """Documents of the source."""
        return len(self.documents.spans[0])

    @property
    def num_cut(self) -> int:
        """Documents that are longer than a row, and so in pieces."""
        starts, ends = self.documents.spans
        return int((ends - starts - 1 > self.seq_len).sum())

    def take(self, indices: np.ndarray, *, epoch: int) -> Batch:
        """Returns the arrays "tokens", "targets"; "positions" of documents back to back; "is_token" if asked for.

        Each is int32 "sequence seq". Targets are the next tokens, -1 where there is none or it is not learned;
        positions are counted from the beginning of a piece, and once more in the padding, where "is_token" is 0.
        """
        del epoch
        shape = (len(indices), self.seq_len)
        batch = {"tokens": np.zeros(shape, np.int32), "targets": np.full(shape, -1, np.int32)}
        if not self.one_each:
            batch["positions"] = np.tile(np.arange(self.seq_len, dtype=np.int32), (len(indices), 1))
        if self.tells_padding:
            batch["is_token"] = np.zeros(shape, np.int32)
        first = self._rows[1][indices]
        end = self._rows[1][indices + 1]
        row = np.repeat(np.arange(len(indices)), end - first)
        pieces = self._rows[0][ranges(first, end - first)]
        lengths = self._lengths[pieces]
        position = ranges(np.zeros_like(lengths), lengths)
        source = np.repeat(self._pieces[0][pieces], lengths) + position
        before = np.cumsum(lengths) - lengths  # columns of all rows before a piece
        num_before_row = before[np.searchsorted(row, np.arange(len(indices)))]
        # Columns before a piece are counted over all rows; less those of the rows before, the count is of its own
        # row.
        place = np.repeat(row, lengths), np.repeat(before - num_before_row[row], lengths) + position
        batch["tokens"][place] = self.documents[source]
        batch["targets"][place] = self.documents.targets(source + 1)
        if self.tells_padding:
            batch["is_token"][place] = 1
        if not self.one_each:
            num_filled = np.bincount(row, lengths, len(indices)).astype(np.int64)
            # Padding counts from 0 again, and so sees itself alone.
            batch["positions"] -= num_filled[:, None].astype(np.int32)
            batch["positions"][place] = position
        return batch

    @cached_property
    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each piece begins in the source, and its columns, "piece" each."""
        return cut_documents(*self.documents.spans, self.seq_len)

    @property
    def _lengths(self) -> np.ndarray:
        """Columns of each piece, "piece"."""
        return self._pieces[1]

    @cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The pieces in the order of their rows, "piece", and where those of each row begin among these, "row + 1"."""
        lengths = self._lengths
        row = np.arange(len(lengths)) if self.one_each else best_fit(lengths, self.seq_len)
        by_row = np.argsort(row, kind="stable")
        # + 2: where each row begins, and behind the last one the end; -1 if there is no row.
        return by_row, np.searchsorted(row[by_row], np.arange(row.max(initial=-1) + 2))


def cut_documents(starts: np.ndarray, ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where pieces of documents begin, and how many tokens each predicts: 1 .. `seq_len`; "piece" each.

    The next piece of a document begins with the last token that the one before it predicts.

    Args:
        starts: "document", where each begins.
        ends: "document", where each ends.

    Example:
        >>> cut_documents(np.array([0, 6, 7]), np.array([6, 7, 20]), 5)
        (array([ 0,  7, 12, 17]), array([5, 5, 5, 2]))
    """
    # A document without tokens has nothing to predict, and not less.
    to_predict = np.maximum(ends - starts - 1, 0)
    num_pieces = -(-to_predict // seq_len)
    begun = ranges(np.zeros_like(num_pieces), num_pieces) * seq_len  # columns of the pieces before, of one document
    return np.repeat(starts, num_pieces) + begun, np.minimum(np.repeat(to_predict, num_pieces) - begun, seq_len)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each piece, "piece": each goes where the least room is left, the longest pieces first.

    All pieces of one length are placed together, so the work grows with the different lengths, not with the pieces. At
    most 11/9 of the rows that are needed, and four more, are used.

    Args:
        lengths: "piece", each 1 .. `capacity`.
        capacity: columns of a row.

    Source: Ding et al., Fewer Truncations Improve Language Modeling, ICML 2024 (arXiv 2404.10830), algorithm 1; the
    bound: Johnson et al., SIAM Journal on Computing 3(4), 1974.

    Example:
        >>> best_fit(np.array([3, 5, 2, 6, 4]), 8)
        array([1, 1, 0, 0, 2])
    """
    rows = np.empty(len(lengths), np.int64)
    # Stable, so that rows do not depend on the sorting algorithm.
    order = np.argsort(-lengths, kind="stable")
    by_room: dict[int, list[np.ndarray]] = {}  # rows, by the columns that are left in them
    num_rows = first = 0
    # Negative, because `searchsorted` takes ascending numbers.
    falling = -lengths[order]
    while first < len(order):
        length = -int(falling[first])
        end = int(np.searchsorted(falling, -length, side="right"))
        pieces = order[first:end]
        first = end
        for room in sorted(room for room in by_room if room >= length):
            open_rows = np.concatenate(by_room.pop(room))
            pieces = _place(pieces, open_rows, room, length, rows, by_room)
            if not len(pieces):
                break
        if len(pieces):
            # Rounded up: the last new row may not be full.
            new = num_rows + np.arange(-(-len(pieces) // (capacity // length)))
            num_rows += len(new)
            _place(pieces, new, capacity, length, rows, by_room)
    return rows


def _place(
    pieces: np.ndarray,
    open_rows: np.ndarray,
    room: int,
    length: int,
    rows: np.ndarray,
    by_room: dict[int, list[np.ndarray]],
) -> np.ndarray:
    """Fills the rows `open_rows`, one after the other, with `pieces` of one length; returns the pieces that are left.

    Args:
        open_rows: rows with `room` columns left.
        room: at least `length`.
        rows: the row of each piece, to be written.
        by_room: rows by the columns that are left in them, to be added to.
    """
    in_each = room // length
    placed = min(len(pieces), len(open_rows) * in_each)
    rows[pieces[:placed]] = np.repeat(open_rows, in_each)[:placed]
    num_full, in_last = divmod(placed, in_each)
    # Filled rows, the row in which the pieces end, and rows that stay as they were.
    for some, num_placed in (
        (open_rows[:num_full], in_each),
        (open_rows[num_full : num_full + 1], in_last),
        (open_rows[num_full + 1 :], 0),
    ):
        if len(some):
            by_room.setdefault(room - num_placed * length, []).append(some)
    return pieces[placed:]


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenation of the numbers starts[i] .. starts[i] + lengths[i] - 1.

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3]))
        array([5, 6, 0, 1, 2])
    """
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
