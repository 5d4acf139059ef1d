"""A head that is split over `pipe`: whether it can be, and the bytes that a microbatch leaves from S to T."""

from __future__ import annotations

from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.sizes import FLOAT32_BYTES, ITEMSIZE
from jaxpipe.estimate.work import local_rows, predicted_tokens
from jaxpipe.models.cross_entropy import chunks_of
from jaxpipe.models.kinds import layer_of_head


def exponential_bytes(setting: Setting) -> int:
    """Bytes that one microbatch leaves from S to T: exponentials; three numbers a token and the order, own and all."""
    num_chunks, size = chunks_of(predicted_tokens(setting), local_rows(setting))
    # Beside them a microbatch's statistics: its own part's and those of all `pipe` devices.
    statistics = 3 * num_chunks * size + setting.anatomy.sentence_order
    exponentials = ITEMSIZE[setting.dtype] * num_chunks * size * local_rows(setting)
    return exponentials + FLOAT32_BYTES * statistics * (1 + setting.pipe)


def can_split_vocabulary(setting: Setting) -> bool:
    """Whether the model's embedding and head can be split over `pipe` by rows, as far as it goes."""
    if setting.is_given or layer_of_head(setting.model) is not None:
        return False
    return setting.anatomy.num_rows % (setting.num_kernel_parts * setting.pipe) == 0
