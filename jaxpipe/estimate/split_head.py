"""Bytes that a microbatch leaves from S to T, where the head is split over `pipe`."""

from __future__ import annotations

from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.sizes import FLOAT32_BYTES, ITEMSIZE
from jaxpipe.estimate.work import local_rows, predicted_tokens
from jaxpipe.models.cross_entropy import chunks_of


def exponential_bytes(setting: Setting) -> int:
    """Bytes that one microbatch leaves from S to T: exponentials; three numbers a token and the order, own and all."""
    num_chunks, size = chunks_of(predicted_tokens(setting), local_rows(setting))
    # Beside them a microbatch's statistics: its own part's and those of all `pipe` devices.
    statistics = 3 * num_chunks * size + setting.anatomy.sentence_order
    exponentials = ITEMSIZE[setting.dtype] * num_chunks * size * local_rows(setting)
    return exponentials + FLOAT32_BYTES * statistics * (1 + setting.pipe)
