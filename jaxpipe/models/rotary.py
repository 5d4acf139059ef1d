"""Rotary position embedding: queries and keys turn by an angle that grows with their position.

Goes in: queries or keys of whole sequences. Comes out: the same, rotated. The tables of cosines and sines
are made where they are used, in forward and again in backward, and never saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

ROTARY_SCALINGS = ("llama3", "linear")


@dataclass(frozen=True)
class RotaryScaling:
    """How frequencies are slowed down, for sequences longer than those of the first training.

    Attributes:
        kind: "linear": all frequencies are divided by `factor`, and the rest has no effect; "llama3", as Llama 3.1:
            only the low ones, and those between low and high by less.
        factor: low frequencies are divided by it.
        low_freq_factor: a frequency that turns fewer times than this in `original_max_position` is low.
        high_freq_factor: one that turns more times is high and stays; between the two it is interpolated.
        original_max_position: the longest sequence of the first training, in tokens.
    """

    kind: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def frequencies(head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> tuple[float, ...]:
    """The angle per position of each of the `head_dim / 2` planes, in radians.

    Args:
        head_dim: even.
        theta: base of the geometric sequence of frequencies: 1e4 for LLaMA, 5e5 for Llama 3.
        scaling: None leaves the frequencies as they are.

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.2; scaling "llama3" as in Meta's llama-models,
    `apply_scaling`; "linear" as in Chen et al., Position Interpolation, arXiv 2306.15595, equation 4.
    """
    plain = [theta ** (-2 * plane / head_dim) for plane in range(head_dim // 2)]
    return tuple(plain if scaling is None else (_scaled(frequency, scaling) for frequency in plain))


def _scaled(frequency: float, scaling: RotaryScaling) -> float:
    if scaling.kind == "linear":
        return frequency / scaling.factor
    num_turns = scaling.original_max_position * frequency / (2 * math.pi)
    part_kept = (num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    part_kept = min(max(part_kept, 0.0), 1.0)
    return frequency * (part_kept + (1 - part_kept) / scaling.factor)


def rotate(x: jax.Array, *, frequencies: tuple[float, ...]) -> jax.Array:
    """`x` with plane i, of elements i and i + head_dim / 2, turned by position * frequencies[i].

    Args:
        x: "batch seq head head_dim", queries or keys; the first is at position 0.
        frequencies: one for each plane, in radians per position.

    Returns:
        Shape and dtype of `x`; computed in float32.
    """
    return _rotate(x, frequencies)


# Its own jit, so that the table of frequencies is a constant inside; a layer that is recomputed would save it.
@partial(jax.custom_vjp, nondiff_argnums=(1,))
@partial(jax.jit, static_argnums=1)
def _rotate(x: jax.Array, frequencies: tuple[float, ...]) -> jax.Array:
    position = jnp.arange(x.shape[1], dtype=jnp.float32)
    angle = position[:, None, None] * jnp.array(frequencies, jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# The transpose of a rotation is the rotation by the negative angle.
_rotate.defvjp(
    lambda x, frequencies: (_rotate(x, frequencies), None),
    lambda frequencies, _, gradient: (_rotate(gradient, tuple(-frequency for frequency in frequencies)),),
)
