"""Rotary positions in a config.json, as transformers 4 and 5 write them.

Version 4 has `rope_theta` and `rope_scaling`, with the kind under "type" or "rope_type"; version 5 has all
of it in `rope_parameters`. We write what version 4 does: 5 reads it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.fields import refusal
from jaxpipe.models.rotary import RotaryScaling

# What each kind needs, in the order of RotaryScaling's fields.
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DEFAULT_THETA = 10000.0  # PreTrainedConfig.default_theta, and of the three configs of version 4


def read_rope(theirs: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Our rope_theta and rope_scaling.

    Raises:
        ConfigError: a kind of scaling that we do not have, or heads that turn in part.
    """
    name = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(name) or {}
    for key, value in rope.items():
        if isinstance(value, dict):  # one for each kind of layer
            raise refusal(where, f"{name}.{key}", value, ())
    part = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0))
    if part not in (None, 1.0):
        raise refusal(where, "partial_rotary_factor", part, (1.0,))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in NEEDED:
        raise refusal(where, f"{name}.rope_type", kind, tuple(NEEDED))
    theta = rope.get("rope_theta", theirs.get("rope_theta", DEFAULT_THETA))
    # transformers 5 takes the longest sequence where the original one is left out.
    rope = {"original_max_position_embeddings": theirs.get("max_position_embeddings"), **rope}
    missing = [key for key in NEEDED[kind] if rope.get(key) is None]
    if missing:
        raise ConfigError(
            f"{where}: {name} of rope_type={kind!r} lacks {', '.join(missing)}\n"
            f"  rule huggingface-rope: {kind} needs {', '.join(NEEDED[kind])}\n"
            f"  repair: take the config.json that the model was saved with"
        )
    return {"rope_theta": theta, "rope_scaling": _scaling(kind, [rope[key] for key in NEEDED[kind]])}


def _scaling(kind: str, numbers: Sequence[Any]) -> RotaryScaling | None:
    return None if kind == "default" or numbers[0] == 1.0 else RotaryScaling(kind, *numbers)


def write_rope(rope_theta: float, scaling: RotaryScaling | None) -> dict[str, Any]:
    """Their rope_theta and rope_scaling."""
    if scaling is None:
        return {"rope_theta": rope_theta, "rope_scaling": None}
    numbers = zip(NEEDED[scaling.kind], astuple(scaling)[1:], strict=False)
    rope = {"rope_type": scaling.kind, **dict(numbers)}
    return {"rope_theta": rope_theta, "rope_scaling": rope}
