"""Sequences in which every token is predicted from those before it, as GPT and LLaMA are trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.data.protocols import Batch, Documents, Tokens


@dataclass(frozen=True)
class CausalSequences:
    """Consecutive sequences of a source of tokens, without overlap; every epoch has the same ones.

    Documents are packed by concatenating and splitting: each is followed by a separator, and a sequence may end one
    document and begin the next. Nothing is padded, and only the end of the source is left out.

    Attributes:
        tokens: the source, at least `seq_len + 1` tokens; read only where a sequence is taken. Of Documents that are
            not learned as a whole, only what is learned is a target.
        seq_len: tokens of one sequence.

    Example:
        >>> CausalSequences(np.arange(100), seq_len=4).take(np.array([2]), epoch=0)["targets"]
        array([[ 9, 10, 11, 12]], dtype=int32)
    """

    tokens: Tokens | Documents
    seq_len: int

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch; each needs one token more, the target of its last one."""
        return (len(self.tokens) - 1) // self.seq_len

    def take(self, indices: np.ndarray, *, epoch: int) -> Batch:
        """Returns the arrays "tokens" and "targets", the next tokens, each "sequence seq", int32."""
        del epoch
        positions = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        window = self.tokens[positions].astype(np.int32)
        targets = window[:, 1:]
        if isinstance(self.tokens, Documents) and self.tokens.learned is not None:
            targets = self.tokens.targets(positions[:, 1:])
        return {"tokens": window[:, :-1], "targets": targets}

    def fill(self, num_sequences: int) -> Batch:
        """Returns rows whose targets are all -1, which the loss ignores."""
        shape = (num_sequences, self.seq_len)
        return {"tokens": np.zeros(shape, np.int32), "targets": np.full(shape, -1, np.int32)}
