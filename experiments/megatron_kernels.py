"""Attention as Megatron-LM's kernels of 2023 took it: the softmax is one kernel, or a chain of five.

Goes in: a roofline. Comes out: a source of times that adds what the chain reads and writes. Nothing is fitted: when the
one kernel is taken, and what the chain consists of, stands in Megatron-LM's code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpipe.estimate import Group, Link, Roofline, Setting, Times
from jaxpipe.models import ModelConfig

# Of one score, read and written. The chain: to float32 (2, 4), scaled (4, 4), masked in place (4, 1 of the mask, 4),
# softmax (4, 4), to bfloat16 (4, 2); backward the same in reverse, its softmax reading two arrays. The kernel reads and
# writes bfloat16 once; backward reads two arrays.
# Source: Megatron-LM, megatron/model/fused_softmax.py, FusedScaleMaskSoftmax.forward_torch_softmax and
# forward_fused_softmax, with softmax_in_fp32 and a scale, as its query-key layer scaling has them.
CHAIN_FORWARD_BYTES = (2 + 4) + (4 + 4) + (4 + 1 + 4) + (4 + 4) + (4 + 2)
CHAIN_BACKWARD_BYTES = (2 + 4) + (4 + 4 + 4) + (4 + 1 + 4) + (4 + 4) + (4 + 2)
KERNEL_FORWARD_BYTES = 2 + 2
KERNEL_BACKWARD_BYTES = 2 + 2 + 2
DIVISOR = 4  # of microbatch size x heads of a GPU, for the one kernel: `is_kernel_available`, there


@dataclass(frozen=True)
class MegatronKernels:
    """Times of a roofline, and of the chain where the one kernel is not to be had.

    Attributes:
        roofline: whose softmax of "xla" attention reads and writes as the one kernel.
        always_fused: whether the one kernel is taken for any number of heads, as it is not.
    """

    roofline: Roofline
    always_fused: bool = False

    def times(self, setting: Setting) -> Times:
        """The times of `setting`'s actions; other attention than "xla" has no such softmax.

        Dropout draws its masks at the memory's pace there, not at that of jaxpipe's own generator: it is left out.
        """
        found = self.roofline.times(replace(setting, model=_without_dropout(setting.model)))
        if setting.model.attention != "xla" or self.always_fused or is_fused(setting):
            return found
        forward_s = self._seconds(setting, CHAIN_FORWARD_BYTES - KERNEL_FORWARD_BYTES)
        backward_s = self._seconds(setting, CHAIN_BACKWARD_BYTES - KERNEL_BACKWARD_BYTES)
        if setting.model.recompute != "none":
            backward_s += forward_s
        return replace(
            found,
            layer_forward_s=found.layer_forward_s + forward_s,
            layer_backward_s=found.layer_backward_s + backward_s,
            layer_input_gradient_s=found.layer_input_gradient_s + backward_s,
        )

    def link(self, *, in_node: bool) -> Link:
        """The roofline's."""
        return self.roofline.link(in_node=in_node)

    def gather_s(self, group: Group, num_bytes: float) -> float:
        """The roofline's."""
        return self.roofline.gather_s(group, num_bytes)

    def _seconds(self, setting: Setting, bytes_per_score: int) -> float:
        num_scores = setting.microbatch_size * heads_per_gpu(setting) * setting.seq_len**2
        return self.roofline.memory_s(num_scores * bytes_per_score)


def _without_dropout(model: ModelConfig) -> ModelConfig:
    rates = ("embedding_dropout", "attention_dropout", "hidden_dropout")
    return replace(model, **{name: 0.0 for name in rates if hasattr(model, name)})


def heads_per_gpu(setting: Setting) -> int:
    """Of queries."""
    return setting.model.anatomy.num_heads // setting.tensor


def is_fused(setting: Setting) -> bool:
    """Whether Megatron-LM takes the one kernel."""
    return setting.microbatch_size * heads_per_gpu(setting) % DIVISOR == 0
