"""Bytes of what a device sends, and how often: collectives of a layer, messages, rows of experts, a split head."""

from __future__ import annotations

from collections.abc import Callable

from jaxpipe.estimate.residuals import FLOAT32_BYTES, ITEMSIZE, dispatch_of_setting
from jaxpipe.estimate.setting import Group, Setting, places_of

# Collectives of the stream over `tensor`, of one layer (`jaxpipe.models.linear`): forward gathers it before two
# matmuls and scatters sums of it after two. Backward does the same the other way around, and gathers it before the
# two for the gradients of their kernels. A layer that is computed again lacks the last sum.
FORWARD_COLLECTIVES = 4
INPUT_GRADIENT_COLLECTIVES = 4
WEIGHT_GRADIENT_COLLECTIVES = 2
AGAIN_COLLECTIVES = 3
# Of rows of experts over `expert`, of one layer (`jaxpipe.models.dispatch`): to the experts and back, and in backward
# the same of their gradients. For the gradients of kernels rows go to the experts once more; where W is apart, so do
# the gradients. A layer that is computed again sends rows to the experts.
FORWARD_DISPATCHES = 2
INPUT_GRADIENT_DISPATCHES = 2
WEIGHT_GRADIENT_DISPATCHES = 2
BACKWARD_DISPATCHES = 3
AGAIN_DISPATCHES = 1


def statistics_bytes(setting: Setting) -> float:
    """Bytes of what all devices of a split head know of the logits of a microbatch: three numbers a token and part."""
    tokens = setting.microbatch_size * (setting.num_predicted or setting.seq_len)
    return 3 * FLOAT32_BYTES * tokens * setting.pipe


def of_head_s(setting: Setting, gather_s: Callable[[Group, float], float]) -> tuple[float, float]:
    """Seconds of the collectives over `pipe` that S of a split head needs and brings, and of those of T.

    Args:
        setting: the setting.
        gather_s: that of the source of times.
    """
    pipe = places_of(setting).pipe
    sum_s = 2 * gather_s(pipe, message_bytes(setting))
    return 2 * sum_s, 2 * sum_s + gather_s(pipe, statistics_bytes(setting))


def message_bytes(setting: Setting) -> float:
    """Bytes of one message between stages: a device's part of the stream of a microbatch."""
    tokens = setting.microbatch_size * setting.seq_len
    return tokens * setting.anatomy.hidden * ITEMSIZE[setting.dtype] / setting.tensor


def dispatch_bytes(setting: Setting) -> float:
    """Bytes of the rows that one collective over `expert` brings to a device, its own included; 0 without experts.

    With a capacity, the rows of all experts for its sequences; dropless, the tokens of all devices of `expert`.
    """
    if setting.expert == 1:
        return 0.0
    rows = dispatch_of_setting(setting).moved_rows(setting.microbatch_size, setting.seq_len)
    return rows * setting.anatomy.hidden * ITEMSIZE[setting.dtype]
