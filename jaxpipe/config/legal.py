"""The legal values of a field, declared beside it: a range of numbers, or a choice of words.

A number without a declaration is positive. The most of a size is several times that of any model, batch or cluster that
was trained so far, so that a slip of a few digits is refused before anything is allocated; sizes below it are believed.
Left to others: whether numbers fit together (`checks`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpipe.cluster.axes import AXES
from jaxpipe.errors import ConfigError, check_choice

INT32 = 2**31 - 1  # steps, tokens and ids are counted in int32
UINT32 = 2**32 - 1  # of a seed
MOST_DEVICES = 2**20  # as of a topology
SMALLEST, LARGEST = (float(bound) for bound in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))  # of float32


@dataclass(frozen=True)
class Legal:
    """The legal values of a field.

    Attributes:
        least: the least number; None: more than 0, of a whole number 1 or more.
        most: the largest; None: INT32 of a whole number, that of float32 of others.
        is_below_one: whether it is less than 1 in float32.
        choices: the legal words, if only these are.
    """

    least: float | None = None
    most: float | None = None
    is_below_one: bool = False
    choices: tuple[str, ...] = ()

    def check(self, path: str, value: object) -> None:
        """Raises ConfigError unless `value` of the field `path` is legal; its type is checked before."""
        if self.choices:
            check_choice(path, str(value), self.choices)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (bound := self._broken(value)):
            return
        # Python writes no number of thousands of digits.
        is_short = isinstance(value, float) or abs(value) < 10**100
        written = value if is_short else f"10^{int(value.bit_length() * 0.30103)}"  # pyright: ignore
        raise ConfigError(f"{path}={written}", rule=f"field-range: {path} is {bound}", repair=f"set {path} to {bound}")

    def _broken(self, value: float) -> str:
        """The bound that a number breaks; empty if none."""
        takes_zero = self.least == 0
        with np.errstate(over="ignore"):
            # In float32, as the program computes: 1e-50 is 0 there, and 0.99999999 is 1.
            as_computed = float(np.float32(value)) if isinstance(value, float) else value
        if isinstance(value, float) and not math.isfinite(as_computed):  # an int may be too large for a float
            return f"a finite number, at most {LARGEST:.1e}"
        if 0 < value < SMALLEST:
            return f"{'0, or ' * takes_zero}at least {SMALLEST:.1e}"
        if value < 0 or (value == 0 and not takes_zero):
            return "0 or more" if takes_zero else "1 or more" if isinstance(value, int) else "more than 0"
        if self.least and value < self.least:
            return f"{self.least:g} or more"
        if (most := self.most_of(value)) is not None and value > most:
            return f"at most {most}"
        return "less than 1.0" if self.is_below_one and as_computed >= 1 else ""

    def most_of(self, value: float) -> float | None:
        """The most that a number of the type of `value` may be; None for one without a bound."""
        return INT32 if self.most is None and isinstance(value, int) else self.most


def positive(default: Any, *, most: float | None = None, is_below_one: bool = False) -> Any:
    """A field of a dataclass: a number above 0."""
    return field(default=default, metadata={"legal": Legal(None, most, is_below_one)})


def at_least(least: float, default: Any, *, most: float | None = None, is_below_one: bool = False) -> Any:
    """A field of a dataclass: a number of `least` or more."""
    return field(default=default, metadata={"legal": Legal(least, most, is_below_one)})


def one_of(choices: tuple[str, ...], default: str) -> Any:
    """A field of a dataclass: one of a few words."""
    return field(default=default, metadata={"legal": Legal(choices=choices)})


_FRACTION = Legal(0, is_below_one=True)  # dropout scales what it keeps by 1 / (1 - dropout)
# Fields of `model`, which families define: those of one name have one meaning.
OF_MODEL: dict[str, Legal] = {
    "num_layers": Legal(most=10_000),
    "hidden": Legal(most=2**20),
    "num_heads": Legal(most=2**16),
    "num_kv_heads": Legal(most=2**16),
    "head_size": Legal(most=2**16),
    "feed_forward": Legal(most=2**22),
    "vocab_size": Legal(most=2**26),
    "vocab_multiple": Legal(most=2**26),
    "num_positions": Legal(most=2**26),
    "num_token_types": Legal(most=2**16),
    "num_experts": Legal(most=2**16),
    "experts_per_token": Legal(most=2**16),
    "num_dense": Legal(0, most=10_000),
    "dense_width": Legal(most=2**22),
    "num_shared": Legal(0, most=2**16),
    "plain_size": Legal(most=2**16),
    "rotary_size": Legal(most=2**16),
    "value_size": Legal(most=2**16),
    "latent_size": Legal(most=2**20),
    "num_groups": Legal(most=2**16),
    "groups_per_token": Legal(most=2**16),
    "score_mscale": Legal(0),
    "embedding_dropout": _FRACTION,
    "attention_dropout": _FRACTION,
    "hidden_dropout": _FRACTION,
    "balance_loss": Legal(0),
    "z_loss": Legal(0),
    "bias_rate": Legal(0),
    "mtp_factor": Legal(0),
    "lora_rank": Legal(0, most=2**16),
    "rope_scaling_factor": Legal(1),  # a factor below 1 would squeeze positions, not stretch them
    "rope_attention_factor": Legal(0),
    "full_first": Legal(0, most=10_000),
    "full_every": Legal(0, most=10_000),
    "dtype": Legal(choices=("float32", "bfloat16")),
}

# The most that the product of several fields may be, since they allocate memory together.
TOGETHER: dict[tuple[str, ...], int] = {
    ("data.batch_size", "data.seq_len"): INT32,  # tokens of a step
    tuple(f"mesh.{axis}" for axis in AXES): MOST_DEVICES,
    ("model.num_layers", "model.hidden"): 2**31,  # GPT-3 has 2^20
}


def check_together(paths: tuple[str, ...], values: Mapping[str, int]) -> None:
    """Raises ConfigError if the product of fields, a key of `TOGETHER`, is more than can be meant."""
    numbers = [values[path] for path in paths]
    product = math.prod(numbers)
    if product > (most := TOGETHER[paths]):
        raise ConfigError(
            ", ".join(f"{path}={values[path]}" for path in paths),
            rule=f"field-product: {' x '.join(paths)} is at most {most:,}",
            picture=f"{' x '.join(map(str, numbers))} = {product:,}",
            repair="set smaller ones",
        )
