"""Bytes of what a device sends, and how often: collectives of a layer, messages, rows of experts, a split head."""

from __future__ import annotations

from collections.abc import Callable

from jaxpipe.cluster.axes import EXPERT_ROWS, KEYS, ROWS, STAGE_AXIS, STREAM, Collectives
from jaxpipe.estimate.given import given_parts
from jaxpipe.estimate.setting import Group, Setting, places_of
from jaxpipe.estimate.sizes import FLOAT32_BYTES, ITEMSIZE, dispatch_of_setting, layer_sizes
from jaxpipe.estimate.work import predicted_tokens


def collectives_s(
    setting: Setting, gather_s: Callable[[Group, float], float], *, hides_keys_s: float = 0.0
) -> Callable[[Callable[[Collectives], int]], float]:
    """Seconds of all collectives of a kind, as `collectives_s(...)(lambda of: of.forward)` those of a layer's forward.

    Args:
        setting: the setting.
        gather_s: that of the source of times. An all-to-all takes as long as a gather of as many bytes.
        hides_keys_s: seconds of products behind which keys, or values, of other devices travel.
    """
    # A gather brings the whole stream; a message carries a device's part of it.
    num_bytes = {
        STREAM: message_bytes(setting) * setting.num_token_parts,
        EXPERT_ROWS: dispatch_bytes(setting),
        KEYS: key_bytes(setting),
    }
    groups = places_of(setting).along
    over = {row.name: row.collectives for row in ROWS if row.collectives}
    hidden_s = {KEYS: hides_keys_s}
    seconds = {
        name: max(0.0, gather_s(groups[name], num_bytes[of.moves]) - hidden_s.get(of.moves, 0.0))
        for name, of in over.items()
    }
    return lambda number: sum(number(of) * seconds[name] for name, of in over.items())


def statistics_bytes(setting: Setting) -> float:
    """Bytes of what all devices of a split head know of the logits of a microbatch: three numbers a token and part."""
    tokens = predicted_tokens(setting)
    # Every device gets the statistics of all parts, three numbers of each.
    return 3 * FLOAT32_BYTES * tokens * setting.pipe


def of_head_s(setting: Setting, gather_s: Callable[[Group, float], float]) -> tuple[float, float]:
    """Seconds of the collectives over `pipe` that S of a split head needs and brings, and of those of T.

    Args:
        setting: the setting.
        gather_s: that of the source of times.
    """
    pipe = places_of(setting).along[STAGE_AXIS]
    # An all-reduce is a scattered sum and a gather, which take a ring equally long.
    sum_s = 2 * gather_s(pipe, message_bytes(setting))
    return 2 * sum_s, 2 * sum_s + gather_s(pipe, statistics_bytes(setting))


def message_bytes(setting: Setting) -> float:
    """Bytes of one message between stages: a device's part of the stream of a microbatch."""
    if setting.is_given:
        return given_parts(setting).message_bytes
    tokens = setting.microbatch_size * setting.local_tokens
    return tokens * setting.anatomy.hidden * ITEMSIZE[setting.dtype] / setting.num_token_parts


def key_bytes(setting: Setting) -> float:
    """Bytes of the keys of whole sequences that attention gathers for a microbatch; 0 where a device has all."""
    if setting.num_sequence_parts == 1:
        return 0.0
    keys = layer_sizes(setting).keys
    if setting.anatomy.kept:  # latents of keys and values together, which `tensor` does not split
        num_heads, *sizes = setting.anatomy.kept
        keys = setting.microbatch_size * setting.local_tokens * num_heads * sum(sizes) / 2
    return keys * setting.num_sequence_parts * ITEMSIZE[setting.dtype]


def dispatch_bytes(setting: Setting) -> float:
    """Bytes of the rows of experts that one collective brings to a device, its own included; 0 where none moves them.

    With a capacity, the rows of all experts for its sequences; dropless, the tokens of all devices that share experts.
    """
    if setting.num_expert_parts == 1:
        return 0.0
    rows = dispatch_of_setting(setting).moved_rows(setting.microbatch_size, setting.local_tokens)
    return rows * setting.anatomy.hidden * ITEMSIZE[setting.dtype]
