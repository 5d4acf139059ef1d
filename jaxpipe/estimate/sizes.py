"""Sizes of the arrays of a transformer's layer for one microbatch on one device, from the model's anatomy.

Memory traffic and workspaces follow from them; what a layer saves and multiplies is traced (`traced`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxpipe.cluster.axes import EXPERT_AXES
from jaxpipe.estimate.products import FLOAT32_BYTES
from jaxpipe.estimate.setting import Setting
from jaxpipe.mesh.collectives import Axis
from jaxpipe.models.dispatch import Dispatch, dispatch_of

ITEMSIZE = {"float32": FLOAT32_BYTES, "bfloat16": 2}


@dataclass(frozen=True)
class LayerSizes:
    """Elements of the arrays of one layer and microbatch on one device.

    Attributes:
        stream: "batch local_seq hidden", split along the sequence.
        queries: "batch seq local_head head_dim", and the attended values.
        keys: elements of the local key-value heads; the same for the values.
        width: "batch seq local_width", between the matmuls of the feed forward; of experts, "tile row local_width".
        scores: "batch local_head seq seq", of this device's queries.
        rows: "batch local_head seq", of queries.
    """

    stream: int
    queries: int
    keys: int
    width: int
    scores: int
    rows: int


def layer_sizes(setting: Setting) -> LayerSizes:
    """Sizes of the arrays of `setting`."""
    anatomy = setting.anatomy
    num_parts = setting.num_kernel_parts
    num_tokens = setting.microbatch_size * setting.local_tokens
    # A device has whole heads, so that the number of heads is divided first.
    rows = num_tokens * (anatomy.num_heads // num_parts)
    return LayerSizes(
        stream=num_tokens * anatomy.hidden // setting.num_token_parts,
        queries=rows * anatomy.head_size,
        keys=num_tokens * (anatomy.num_kv_heads // num_parts) * anatomy.head_size,
        width=feed_forward_rows(setting) * anatomy.width // num_parts,
        scores=rows * setting.seq_len,
        rows=rows,
    )


def feed_forward_rows(setting: Setting) -> int:
    """Rows that a layer's feed forward computes for a microbatch: its tokens, or the rows of its experts' tiles."""
    anatomy = setting.anatomy
    num_tokens = setting.microbatch_size * setting.local_tokens
    if anatomy.num_experts == 1:
        return num_tokens
    return math.prod(dispatch_of_setting(setting).shape(setting.microbatch_size, setting.local_tokens))


def dispatch_of_setting(setting: Setting) -> Dispatch:
    """How tokens come to the experts of a layer that has several."""
    of = setting.anatomy
    over = Axis(" ".join(EXPERT_AXES), setting.num_expert_parts)  # of which the size alone is read
    return dispatch_of(of.num_experts, of.experts_per_token, of.capacity_factor, over)
