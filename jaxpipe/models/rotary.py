"""Rotary position embedding: queries and keys turn by an angle that grows with their position.

Goes in: queries or keys of whole sequences. Comes out: the same, rotated. The tables of cosines and sines
are made where they are used, in forward and again in backward, and never saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import ContextAxis

_ONE_DEVICE = ContextAxis()

ROTARY_SCALINGS = ("llama3", "linear")
_FACTOR = "rope_scaling_factor"

# Fields of `model` of a family with rotary positions.
ROTARY_FIELDS = {
    "rope_scaling": "llama3",  # which frequencies are divided: "llama3", the low ones, as Llama 3.1; "linear", all
    _FACTOR: 1.0,  # what they are divided by; 1.0: none are, and rope_scaling and the next
    "rope_low_frequency_factor": 1.0,  # three have no effect: low ones turn at most so often in these positions,
    "rope_high_frequency_factor": 4.0,  # high ones, which stay as they are, at least so often
    "rope_original_positions": 8192,  # tokens of a sequence before they were stretched
}


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of the rotary frequencies, for sequences longer than those of the first training."""

    # "linear": all frequencies are divided by `factor`, and the rest has no effect; "llama3", as Llama 3.1: only the
    # low ones, and those between low and high by less.
    kind: str = "llama3"
    factor: float = 8.0  # low frequencies are divided by it
    low_freq_factor: float = 1.0  # a frequency that turns fewer times than this in `original_max_position` is low
    high_freq_factor: float = 4.0  # one that turns more times is high and stays; between the two it is interpolated
    original_max_position: int = 8192  # the longest sequence of the first training, in tokens


def frequencies(head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> tuple[float, ...]:
    """Angle per position of each of the `head_dim / 2` planes, in radians.

    Args:
        theta: base of the geometric sequence of frequencies: 1e4 for LLaMA, 5e5 for Llama 3.

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.2; scaling "llama3" as in Meta's llama-models,
    `apply_scaling`; "linear" as in Chen et al., Position Interpolation, arXiv 2306.15595, equation 4.
    """
    plain = [theta ** (-2 * plane / head_dim) for plane in range(head_dim // 2)]
    return tuple(plain if scaling is None else (_scaled(frequency, scaling) for frequency in plain))


def _scaled(frequency: float, scaling: RotaryScaling) -> float:
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # How often the plane turns in the first training's longest sequence decides how much of its frequency stays.
    num_turns = scaling.original_max_position * frequency / (2 * math.pi)
    part_kept = (num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    part_kept = min(max(part_kept, 0.0), 1.0)
    return frequency * (part_kept + (1 - part_kept) / scaling.factor)


def rotate(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    frequencies: tuple[float, ...],
    context: ContextAxis = _ONE_DEVICE,
) -> jax.Array:
    """Returns `x` with plane i, of elements i and i + head_dim / 2, turned by position * frequencies[i].

    Args:
        x: "batch seq head head_dim", queries or keys.
        positions: int32 "batch seq"; None: 0, 1, ... in every sequence.
        frequencies: one for each plane, in radians per position.
        context: the devices that split a sequence, of which `x` has one's tokens.

    Returns:
        Shape and dtype of `x`; computed in float32.
    """
    return _rotate(x, positions, frequencies, context)


# Its own jit, so that the table of frequencies is a constant inside; a layer that is recomputed would save it.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@partial(jax.jit, static_argnums=(2, 3))
def _rotate(
    x: jax.Array, positions: jax.Array | None, frequencies: tuple[float, ...], context: ContextAxis
) -> jax.Array:
    # Float32, since bfloat16 has no integer between 256 and 258, and angles grow with the position.
    if positions is None and context.size > 1:
        # Not an argument, which backward would keep for each layer.
        positions = context.positions(x.shape[1] * context.size)
    position = jnp.arange(x.shape[1], dtype=jnp.float32) if positions is None else positions.astype(jnp.float32)
    angle = position[..., None, None] * jnp.array(frequencies, jnp.float32)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    # Halves and not neighbours are a plane, as Hugging Face's and Meta's converted weights have them.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# The transpose of a rotation is the rotation by the negative angle.
_rotate.defvjp(
    lambda x, positions, frequencies, context: (_rotate(x, positions, frequencies, context), positions),
    # None: positions are integers.
    lambda frequencies, context, positions, gradient: (
        _rotate(gradient, positions, tuple(-frequency for frequency in frequencies), context),
        None,
    ),
)


def with_rotary_scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fields` of a config with "rope_scaling" a RotaryScaling or None in place of all ROTARY_FIELDS."""
    scaling = RotaryScaling(
        kind=fields["rope_scaling"],
        factor=fields[_FACTOR],
        low_freq_factor=fields["rope_low_frequency_factor"],
        high_freq_factor=fields["rope_high_frequency_factor"],
        original_max_position=fields["rope_original_positions"],
    )
    others = {name: value for name, value in fields.items() if name not in ROTARY_FIELDS}
    return others | {"rope_scaling": None if scaling.factor == 1.0 else scaling}


def check_rotary_scaling(fields: Mapping[str, Any], seq_len: int) -> None:
    """Raises ConfigError for a scaling of the rotary frequencies that does nothing or has no range between."""
    del seq_len
    changed = [name for name, default in ROTARY_FIELDS.items() if name != _FACTOR and fields[name] != default]
    values = ", ".join(f"model.{name}={fields[name]!r}" for name in changed)
    if changed and fields[_FACTOR] == 1.0:
        raise ConfigError(
            f"{values} with model.rope_scaling_factor=1.0",
            # A factor of 1.0 leaves the other fields without effect, and such a field is an error and not
            # ignored.
            rule="rope-scaling: a factor of 1.0 scales nothing, so what it would scale has no effect",
            repair=f"set model.rope_scaling_factor, 8.0 for Llama 3.1, or leave {' and '.join(changed)} out",
        )
    if fields["rope_scaling"] == "linear" and len(changed) > 1:
        raise ConfigError(
            values,
            rule="rope-scaling: 'linear' divides all frequencies, so what is a low or a high one has no effect",
            repair=f"set model.rope_scaling='llama3', or leave {' and '.join(changed[1:])} out",
        )
    low = fields["rope_low_frequency_factor"]
    high = fields["rope_high_frequency_factor"]
    if low >= high:
        raise ConfigError(
            f"model.rope_low_frequency_factor={low} with model.rope_high_frequency_factor={high}",
            rule="rope-frequencies: low frequencies turn less often than high ones",
            repair=f"set model.rope_low_frequency_factor less than {high}, for example {high / 4}",
        )
