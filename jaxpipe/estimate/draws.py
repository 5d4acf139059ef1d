"""How many random numbers does dropout draw? Masks are not kept: backward draws them again."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.estimate.flops import seen_scores
from jaxpipe.estimate.residuals import sizes
from jaxpipe.estimate.setting import Setting
from jaxpipe.models import LlamaConfig

# Of one number: 20 rounds of an addition, a rotation and an exclusive or; 6 times a key is added to both words.
# Source: `jaxpipe.models.dropout.threefry`.
OPERATIONS = 20 * 3 + 6 * 2
# 32-bit integer additions, shifts or logical operations of a core in a clock, of capability 8.0 and 9.0.
# Source: NVIDIA, CUDA C++ Programming Guide, throughput of native arithmetic instructions.
OPERATIONS_PER_CLOCK = 64


@dataclass(frozen=True)
class Draws:
    """Numbers drawn for one microbatch on one device.

    Attributes:
        forward, backward: of one layer; backward has those that it computes again; of its halves I draws all.
        embed: of the embedding, in forward and as many in backward.
    """

    forward: int
    backward: int
    embed: int


def draws(setting: Setting) -> Draws:
    """Those of `setting`: one for each probability of attention and for each number that a layer adds to the stream."""
    model = setting.model
    if isinstance(model, LlamaConfig):
        return Draws(0, 0, 0)
    of_attention = seen_scores(setting) if model.attention_dropout else 0
    of_stream = 2 * sizes(setting).stream if model.hidden_dropout else 0
    forward = of_attention + of_stream
    again = {"none": 0, "attention": of_attention, "full": forward}[model.recompute]
    return Draws(forward, forward + again, sizes(setting).stream if model.embedding_dropout else 0)
