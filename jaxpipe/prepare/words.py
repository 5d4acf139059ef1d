r"""Texts to tokens through the words in them, each of which is encoded once.

The library needs most of its time to cut a text into words. Where a tokenizer cuts as GPT-2 does, Python's regular
expressions cut the same way, and a table of the words met so far gives their tokens: four times as fast. GPT-2's rule:

    '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

Python's have no \p{L} and \p{N}, so a stretch with other letters than ASCII is looked up whole, up to a space: the
library cuts it further. Both ends of it are ends of words by the rule too, so its tokens depend on nothing around it.
Source: ByteLevel in pre_tokenizers/byte_level.rs of huggingface/tokenizers; the rule is encoder.py's of openai/gpt-2.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import numpy as np
import tokenizers

MOST_WORDS = 2**20  # and four times as many tokens the table holds before it begins anew; about 0.2 GB

# White_Space of Unicode; Python's \s has four control characters more.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ASCII_FOLLOWS = r"(?![^\x00-\x7f])"
WORD = re.compile(
    "'(?:[sdmt]|ll|ve|re)"
    f"| ?[A-Za-z]++{_ASCII_FOLLOWS}"
    f"| ?[0-9]++{_ASCII_FOLLOWS}"
    rf"| ?[^{_SPACE}A-Za-z0-9\x80-\U0010ffff]++{_ASCII_FOLLOWS}"
    f"|[{_SPACE}]+(?![^{_SPACE}])"
    f"| ?[^{_SPACE}]++"
    f"|[{_SPACE}]+"
)


def cuts_like_gpt2(library: tokenizers.Tokenizer) -> bool:
    """Whether `library` cuts a text by GPT-2's rule and by no other, and changes nothing of it before."""
    state = json.loads(library.to_str())
    cutting = state["pre_tokenizer"] or {}
    return (
        state["normalizer"] is None
        and (cutting.get("type"), cutting.get("add_prefix_space"), cutting.get("use_regex", True))
        == ("ByteLevel", False, True)
        and state["model"]["type"] == "BPE"
        and not state["model"].get("dropout")
        and library.encode_special_tokens
        and all(token["special"] for token in state["added_tokens"])
    )


class WordTable:
    """The tokens of all words met so far.

    Attributes:
        library: a tokenizer that cuts like GPT-2.
    """

    def __init__(self, library: tokenizers.Tokenizer):
        self.library = library
        self._clear()

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all `texts`, "tokens", int32, and how many each has, "text"."""
        if max(len(self._places), len(self._tokens) // 4) >= MOST_WORDS:
            self._clear()
        place_of = self._places.__getitem__
        rows = [np.fromiter(map(place_of, words), np.int64, len(words)) for words in map(WORD.findall, texts)]
        self._learn()
        words = np.concatenate([np.zeros(0, np.int64), *rows])
        lengths = self._lengths[words]
        ends = np.cumsum(lengths)
        # A token's place in the table: its word's first, and how far it is from its word's first in the text.
        sources = np.repeat(self._firsts[words] - (ends - lengths), lengths) + np.arange(lengths.sum())
        last_words = np.cumsum([len(row) for row in rows], dtype=np.int64)
        text_ends = np.concatenate([[0], ends])[last_words]
        return self._tokens[sources], np.diff(text_ends, prepend=0)

    def _clear(self) -> None:
        self._places: defaultdict[str, int] = defaultdict()
        self._places.default_factory = self._places.__len__  # a new word gets the next place
        self._tokens = np.zeros(0, np.int32)
        self._lengths = np.zeros(0, np.int64)
        self._firsts = np.zeros(0, np.int64)

    def _learn(self) -> None:
        """Encodes the words that have a place and no tokens yet."""
        num_new = len(self._places) - len(self._lengths)
        new = list(islice(reversed(self._places), num_new))[::-1]
        ids = [encoding.ids for encoding in self.library.encode_batch_fast(new, add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter((token for word in ids for token in word), np.int32, lengths.sum())
        self._firsts = np.concatenate([self._firsts, len(self._tokens) + np.cumsum(lengths) - lengths])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._tokens = np.concatenate([self._tokens, tokens])
