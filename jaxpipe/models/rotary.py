"""Rotary position embedding: queries and keys turn by an angle that grows with their position.

Goes in: queries or keys of whole sequences. Comes out: the same, rotated. The tables of cosines and sines
are made where they are used, in forward and again in backward, and never saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import ContextAxis

_ONE_DEVICE = ContextAxis()

_FACTOR = "rope_scaling_factor"

# Fields of `model` of a family with rotary positions.
ROTARY_FIELDS = {
    # Which frequencies are divided: "llama3", the low ones, as Llama 3.1; "yarn", the same by plane, and queries and
    # keys grow; "linear", all; "dynamic", none, for sequences up to rope_original_positions.
    "rope_scaling": "llama3",
    _FACTOR: 1.0,  # what they are divided by; 1.0: none are, and the others have no effect
    "rope_low_frequency_factor": 1.0,  # of llama3: low ones turn at most so often in the original positions,
    "rope_high_frequency_factor": 4.0,  # high ones, which stay as they are, at least so often
    "rope_original_positions": 8192,  # tokens of a sequence before they were stretched
    "rope_beta_slow": 1.0,  # of yarn, as the two of llama3: where the plane lies that turns so often,
    "rope_beta_fast": 32.0,  # and where the one that turns so often
    "rope_attention_factor": 0.0,  # of yarn: queries and keys are multiplied by it; 0.0: by 0.1 ln(factor) + 1
    "rope_truncate": True,  # of yarn: whether both places are rounded outwards to whole planes
}


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of the rotary frequencies, for sequences longer than those of the first training."""

    kind: str = "llama3"  # a key of `ROTARY_SCALINGS`, which says what of the rest has an effect
    factor: float = 8.0  # low frequencies are divided by it
    low_freq_factor: float = 1.0  # a frequency that turns fewer times than this in `original_max_position` is low
    high_freq_factor: float = 4.0  # one that turns more times is high and stays; between the two it is interpolated
    original_max_position: int = 8192  # the longest sequence of the first training, in tokens
    beta_slow: float = 1.0  # as `low_freq_factor`, but what lies between is interpolated by the planes' numbers
    beta_fast: float = 32.0  # as `high_freq_factor`
    attention_factor: float = 0.0  # rotated queries and keys are multiplied by it; 0.0: by 0.1 ln(factor) + 1
    truncate: bool = True  # whether the planes between begin and end at whole ones

    @property
    def amplitude(self) -> float:
        """What rotated queries and keys are multiplied by, each."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0


@dataclass(frozen=True)
class _Kind:
    """A kind of scaling: the part of a plane's frequency that stays; the rest is divided by the factor."""

    fields: Mapping[str, str]  # of ROTARY_FIELDS, those that have an effect: attributes of RotaryScaling
    part_kept: Callable[[RotaryScaling, int, int, float], float]  # (scaling, plane, head_dim, theta) -> 0.0 to 1.0


def _by_turns(scaling: RotaryScaling, plane: int, head_dim: int, theta: float) -> float:
    # How often the plane turns in the first training's longest sequence decides how much of its frequency stays.
    num_turns = scaling.original_max_position * theta ** (-2 * plane / head_dim) / (2 * math.pi)
    part = (num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return min(max(part, 0.0), 1.0)


def _by_plane(scaling: RotaryScaling, plane: int, head_dim: int, theta: float) -> float:
    def turning(num_turns: float) -> float:
        """The plane, of real numbers, that turns so often in the first training's longest sequence."""
        period = scaling.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(theta))

    first = turning(scaling.beta_fast)
    last = turning(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    # Bounds as in transformers, whose last one is the last dim and not the last plane.
    first = max(first, 0)
    last = min(last, head_dim - 1)
    part_divided = (plane - first) / (last - first or 0.001)
    return 1 - min(max(part_divided, 0.0), 1.0)


_BY_FACTOR = {_FACTOR: "factor"}
_FROM_LENGTH = {**_BY_FACTOR, "rope_original_positions": "original_max_position"}
ROTARY_SCALINGS: dict[str, _Kind] = {
    "llama3": _Kind(
        {
            **_FROM_LENGTH,
            "rope_low_frequency_factor": "low_freq_factor",
            "rope_high_frequency_factor": "high_freq_factor",
        },
        _by_turns,
    ),
    "linear": _Kind(_BY_FACTOR, lambda *_: 0.0),
    "yarn": _Kind(
        {
            **_FROM_LENGTH,
            "rope_beta_slow": "beta_slow",
            "rope_beta_fast": "beta_fast",
            "rope_attention_factor": "attention_factor",
            "rope_truncate": "truncate",
        },
        _by_plane,
    ),
    # Longer sequences would have another base each.
    "dynamic": _Kind(_FROM_LENGTH, lambda *_: 1.0),
}


def frequencies(head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> tuple[float, ...]:
    """Angle per position of each of the `head_dim / 2` planes, in radians.

    Args:
        theta: base of the geometric sequence of frequencies: 1e4 for LLaMA, 5e5 for Llama 3.

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.2; scaling "llama3" as in Meta's llama-models,
    `apply_scaling`; "linear" as in Chen et al., Position Interpolation, arXiv 2306.15595, equation 4; "yarn" as in
    Peng et al., YaRN, arXiv 2309.00071, section 3, with transformers' `_compute_yarn_parameters` for its bounds.
    """
    plain = [theta ** (-2 * plane / head_dim) for plane in range(head_dim // 2)]
    if scaling is None:
        return tuple(plain)
    part_kept = ROTARY_SCALINGS[scaling.kind].part_kept
    parts = [part_kept(scaling, plane, head_dim, theta) for plane in range(len(plain))]
    return tuple(f * (part + (1 - part) / scaling.factor) for f, part in zip(plain, parts, strict=True))


def rotate(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    frequencies: tuple[float, ...],
    amplitude: float = 1.0,
    context: ContextAxis = _ONE_DEVICE,
) -> jax.Array:
    """Returns `x` with plane i, of elements i and i + head_dim / 2, turned by position * frequencies[i].

    Args:
        x: "batch seq head head_dim", queries or keys.
        positions: int32 "batch seq"; None: 0, 1, ... in every sequence.
        frequencies: one for each plane, in radians per position.
        amplitude: what the result is multiplied by: see `RotaryScaling.amplitude`.
        context: the devices that split a sequence, of which `x` has one's tokens.

    Returns:
        Shape and dtype of `x`; computed in float32.
    """
    return _rotate(x, positions, frequencies, amplitude, context)


# Its own jit, so that the table of frequencies is a constant inside; a layer that is recomputed would save it.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
@partial(jax.jit, static_argnums=(2, 3, 4))
def _rotate(
    x: jax.Array, positions: jax.Array | None, frequencies: tuple[float, ...], amplitude: float, context: ContextAxis
) -> jax.Array:
    # Float32, since bfloat16 has no integer between 256 and 258, and angles grow with the position.
    if positions is None and context.size > 1:
        # Not an argument, which backward would keep for each layer.
        positions = context.positions(x.shape[1] * context.size)
    position = jnp.arange(x.shape[1], dtype=jnp.float32) if positions is None else positions.astype(jnp.float32)
    angle = position[..., None, None] * jnp.array(frequencies, jnp.float32)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    if amplitude != 1.0:
        cos *= amplitude
        sin *= amplitude
    # Halves and not neighbours are a plane, as Hugging Face's and Meta's converted weights have them.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# The transpose of a rotation is the rotation by the negative angle.
_rotate.defvjp(
    lambda x, positions, *statics: (_rotate(x, positions, *statics), positions),
    # None: positions are integers.
    lambda frequencies, amplitude, context, positions, gradient: (
        _rotate(gradient, positions, tuple(-frequency for frequency in frequencies), amplitude, context),
        None,
    ),
)


def with_rotary_scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fields` of a config with "rope_scaling" a RotaryScaling or None in place of all ROTARY_FIELDS."""
    kind = fields["rope_scaling"]
    others = {name: value for name, value in fields.items() if name not in ROTARY_FIELDS}
    if fields[_FACTOR] == 1.0:
        return others | {"rope_scaling": None}
    attributes = {attribute: fields[name] for name, attribute in ROTARY_SCALINGS[kind].fields.items()}
    return others | {"rope_scaling": RotaryScaling(kind, **attributes)}


def scaling_fields(scaling: RotaryScaling) -> dict[str, Any]:
    """The fields of `model` that a scaling comes from, as far as they have an effect."""
    fields = ROTARY_SCALINGS[scaling.kind].fields
    return {"rope_scaling": scaling.kind} | {name: getattr(scaling, own) for name, own in fields.items()}


def check_rotary_scaling(fields: Mapping[str, Any], seq_len: int) -> None:
    """Raises ConfigError for a scaling of the rotary frequencies that does nothing or cannot be computed."""
    kind = fields["rope_scaling"]
    changed = [name for name, default in ROTARY_FIELDS.items() if name != _FACTOR and fields[name] != default]
    if changed and fields[_FACTOR] == 1.0:
        raise ConfigError(
            f"{_values(fields, changed)} with model.rope_scaling_factor=1.0",
            # A factor of 1.0 leaves the other fields without effect, and such a field is an error and not
            # ignored.
            rule="rope-scaling: a factor of 1.0 scales nothing, so what it would scale has no effect",
            repair=f"set model.rope_scaling_factor, 8.0 for Llama 3.1, or leave {' and '.join(changed)} out",
        )
    idle = [name for name in changed if name not in ROTARY_SCALINGS[kind].fields and name != "rope_scaling"]
    if idle:
        raise ConfigError(
            _values(fields, [*(["rope_scaling"] if "rope_scaling" in changed else []), *idle]),
            rule=f"rope-scaling: of {kind!r} only {', '.join(ROTARY_SCALINGS[kind].fields)} have an effect",
            repair=f"set another model.rope_scaling, or leave {' and '.join(idle)} out",
        )
    for low, high in (
        ("rope_low_frequency_factor", "rope_high_frequency_factor"),
        ("rope_beta_slow", "rope_beta_fast"),
    ):
        if fields[low] >= fields[high]:
            raise ConfigError(
                _values(fields, [low, high]),
                rule="rope-frequencies: low frequencies turn less often than high ones",
                repair=f"set model.{low} less than {fields[high]}, for example {fields[high] / 4}",
            )
    if kind == "yarn" and fields["rope_theta"] <= 1.0:
        raise ConfigError(
            _values(fields, ["rope_scaling", "rope_theta"]),
            rule="rope-base: 'yarn' looks for the plane that turns so often, and planes turn less and less often",
            repair="set model.rope_theta more than 1.0, for example 10000.0",
        )
    if kind == "dynamic" and seq_len > fields["rope_original_positions"]:
        raise ConfigError(
            f"{_values(fields, ['rope_scaling', 'rope_original_positions'])} with data.seq_len={seq_len}",
            rule="rope-dynamic: a longer sequence has frequencies of its own length, and all sequences share theirs",
            repair=f"set data.seq_len={fields['rope_original_positions']} or less, or model.rope_scaling='yarn'",
        )


def _values(fields: Mapping[str, Any], names: list[str]) -> str:
    return ", ".join(f"model.{name}={fields[name]!r}" for name in names)
