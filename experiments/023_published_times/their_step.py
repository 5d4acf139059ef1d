"""How the published systems run a step: Megatron-LM's kernels and messages, and Zero Bubble's steps that do not wait.

Goes in: a roofline. Comes out: a source of times, and how a schedule is run. Each mechanism is a field, so that the
page can leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from experiments.megatron_kernels import MegatronKernels
from jaxpipe.cluster import HARDWARE
from jaxpipe.estimate import Group, Link, Matmul, Program, Roofline, Setting, Times, traced_layer

A100 = HARDWARE["a100-80g"]
ITEM = 2  # bytes of a number in 16 bits

# Fraction of the peak that products reach within a step, from the published times of W of the four models (T_W): these
# are products alone. In isolation the best of many reach 0.859 (`jaxpipe.estimate.roofline`).
PRODUCT_FRACTION = 0.77
# Seconds of a message besides its bytes: the intercept of a line through the published T_comm, 10 to 28 MB.
MESSAGE_S = 0.23e-3
# A mask of dropout: a byte for each score, and the scores read and written once more, forward and backward.
DROPOUT_BYTES = 2 + 2 + 1
# A logit in Megatron-LM's cross entropy, whose steps are kernels of their own: made 32-bit (2 + 4), largest (4), its
# difference (4 + 4), exponential (4 + 4), sum (4), softmax (4 + 4), gradient (4 + 4), made 16-bit (4 + 2).
# Source: Megatron-LM, megatron/core/tensor_parallel/cross_entropy.py.
LOGIT_BYTES = 52
OUR_LOGIT_BYTES = 14
# The same by actions of a split head: S up to the softmax, T its gradient; and ours.
LOGIT_BYTES_OF_S, OUR_LOGIT_BYTES_OF_S = 38, 10
LOGIT_BYTES_OF_T, OUR_LOGIT_BYTES_OF_T = 14, 4
# A logit in T besides: the softmax is that of a device's rows, and is multiplied by what makes it that of all rows.
# Source: VocabularyParallelism, megatron/core/tensor_parallel/vocab_output.py, `_ForwardImpl.backward`.
CORRECTED_BYTES = 4 + 4
# Of one number of [sequence, hidden] before S: it arrives as 32 bits, is copied (4 + 4) and made 16-bit (4 + 2).
# Source: the same, megatron/core/pipeline_parallel/vocab_parallel_schedule.py, `receive_lm_head_input`.
ARRIVAL_BYTES = 14
# The embedding on every device, of one number of [sequence, hidden], forward: looked up (2 + 2), made zero for words of
# other devices (2), copied (2 + 2), copied for the sum (2 + 2), copied behind it (2 + 2); backward: made zero (2 + 2),
# added to rows (2 + 2). Source: the same, vocab_input.py, and `input_embedding_forward_step_helper`.
LOOKED_UP_BYTES, LOOKED_UP_BACKWARD_BYTES = 18, 8
# The embedding's gradient has all rows, also those of no word at hand, one number: made zero (2), and added to the sum
# (2, 2 + 2). With fp16 Megatron-LM's sums are fp16. Source: PyTorch's `embedding_dense_backward`; Megatron-LM,
# megatron/training/arguments.py, accumulate_allreduce_grads_in_fp32.
DENSE_BYTES = 2 + 2 + 4
# F and B of the layers with the split head / with the head on the last stage: the mean of eight settings on 8 GPUs.
# Source: the authors' profile, `profile` in published.json, which times actions, not steps.
BESIDE_COLLECTIVES = 1.066
# What the published MFU divides by. Source: the TFLOP/s of the same profile / the MFU of the table, in all 24 cells.
PEAK_FLOPS_PER_S = 320e12


@dataclass(frozen=True)
class TheirStep:
    """A source of times, and the mechanisms in which their step differs from ours.

    Attributes:
        product_fraction: of the peak, that products reach; None: that of the estimator.
        fused_sums: whether W adds to 32-bit sums within its products (Apex), instead of in kernels of its own.
        keeps_masks: whether dropout keeps its masks.
        short_products_wait: whether attention's products write their results only when they have computed: of 64 to
            128 numbers in depth, they are over before the first write could hide.
        chain_of_loss: whether the cross entropy is a chain of kernels.
        message_s: seconds of a message besides its bytes.
        messages_block: whether 1F1B and interleaved 1F1B compute nothing while a message travels.
        steps_wait: whether all devices wait for each other after a step of Zero Bubble's schedules.
        head_waits: whether devices wait for the collectives of a split head, which theirs run in a stream of their own.
        copies_of_head: whether S and T copy what arrives, and correct the softmax.
        dense_embedding: whether the embedding's gradient has rows for all words, and every device looks up its rows of
            a split one.
        beside_collectives: how many times as long a layer takes where a split head's collectives run beside it.
        peak_flops_per_s: peak of a GPU, for MFU.
    """

    product_fraction: float | None = PRODUCT_FRACTION
    fused_sums: bool = True
    keeps_masks: bool = True
    short_products_wait: bool = True
    chain_of_loss: bool = True
    message_s: float = MESSAGE_S
    messages_block: bool = True
    steps_wait: bool = False
    head_waits: bool = False
    copies_of_head: bool = True
    dense_embedding: bool = True
    beside_collectives: float = BESIDE_COLLECTIVES
    peak_flops_per_s: float = PEAK_FLOPS_PER_S

    @cached_property
    def kernels(self) -> MegatronKernels:
        """Times with the kernels of attention that Megatron-LM takes."""
        return MegatronKernels(Roofline(A100, matmul_fraction=self.product_fraction, halves_copy=False))

    @cached_property
    def _without_collectives(self) -> MegatronKernels:
        return MegatronKernels(replace(self.roofline, exposed_fraction=0.0))

    @property
    def roofline(self) -> Roofline:
        """Times of kernels."""
        return self.kernels.roofline

    def program(self, schedule: str) -> Program:
        """How `schedule` is run."""
        if schedule in ("1f1b", "interleaved_1f1b"):
            return Program(reduces_in_rounds=False, messages_block=self.messages_block)
        return Program(reduces_in_rounds=False, waits_between_steps=self.steps_wait)

    def times(self, setting: Setting) -> Times:
        """The times of `setting`'s actions."""
        found, memory_s = self.kernels.times(setting), self.roofline.memory_s
        forward_s, gradient_s, weight_s = (
            found.layer_forward_s,
            found.layer_input_gradient_s,
            found.layer_weight_gradient_s,
        )
        if self.fused_sums:
            matmuls = [replace(each, summed=True) for each in traced_layer(setting).weight_gradient]
            weight_s = sum(self.roofline.matmul_s(each, setting.dtype) for each in matmuls)
        if self.keeps_masks and setting.anatomy.attention_dropout:
            scores = _tokens(setting) * setting.seq_len * setting.anatomy.num_heads
            forward_s += memory_s(DROPOUT_BYTES * scores)
            gradient_s += memory_s(DROPOUT_BYTES * scores)
        if self.short_products_wait and setting.model.attention == "xla":
            products = _attention_products(setting)
            forward_s += self._hidden_s(products, setting.dtype)
            gradients = [gradient for each in products for gradient in (each.of_inputs, each.of_weights)]
            gradient_s += self._hidden_s(gradients, setting.dtype)
        head_s = found.head_s
        if self.chain_of_loss:
            logits = _tokens(setting) * setting.anatomy.num_rows
            head_s += memory_s((LOGIT_BYTES - OUR_LOGIT_BYTES) * logits)
        split = found if self.head_waits else self._without_collectives.times(setting)
        statistics_s, gradients_s = split.statistics_s, split.gradients_s
        assert statistics_s is not None
        assert gradients_s is not None
        if self.chain_of_loss:
            logits = _tokens(setting) * setting.anatomy.num_rows // setting.pipe
            statistics_s += memory_s((LOGIT_BYTES_OF_S - OUR_LOGIT_BYTES_OF_S) * logits)
            gradients_s += memory_s((LOGIT_BYTES_OF_T - OUR_LOGIT_BYTES_OF_T) * logits)
        if self.copies_of_head:
            rows = setting.anatomy.num_rows // setting.pipe
            statistics_s += memory_s(ARRIVAL_BYTES * _tokens(setting) * setting.anatomy.hidden)
            gradients_s += memory_s(CORRECTED_BYTES * _tokens(setting) * rows)
        slower = self.beside_collectives if setting.vocab_over_pipe else 1.0
        return self._embedded(
            setting,
            replace(
                found,
                statistics_s=statistics_s,
                gradients_s=gradients_s,
                layer_forward_s=slower * forward_s,
                layer_backward_s=slower * (gradient_s + weight_s),
                layer_input_gradient_s=slower * gradient_s,
                layer_weight_gradient_s=slower * weight_s,
                head_s=head_s,
            ),
        )

    def _embedded(self, setting: Setting, times: Times) -> Times:
        """`times` with a dense gradient of the embedding, whose part every device has beside its S and T if split."""
        if not self.dense_embedding:
            return times
        memory_s, numbers = self.roofline.memory_s, setting.anatomy.num_rows * setting.anatomy.hidden
        if not setting.vocab_over_pipe:
            return replace(times, embed_backward_s=times.embed_backward_s + memory_s(DENSE_BYTES * numbers))
        assert times.statistics_s is not None
        assert times.gradients_s is not None
        stream = _tokens(setting) * setting.anatomy.hidden
        backward_s = memory_s(LOOKED_UP_BACKWARD_BYTES * stream + DENSE_BYTES * numbers / setting.pipe)
        return replace(
            times,
            statistics_s=times.statistics_s + memory_s(LOOKED_UP_BYTES * stream),
            gradients_s=times.gradients_s + backward_s,
            embed_forward_s=0.0,
            embed_backward_s=0.0,
        )

    def link(self, *, in_node: bool) -> Link:
        """The roofline's, with what a message takes besides."""
        found = self.roofline.link(in_node=in_node)
        return replace(found, latency_s=max(found.latency_s, self.message_s))

    def gather_s(self, group: Group, num_bytes: float) -> float:
        """The roofline's."""
        return self.roofline.gather_s(group, num_bytes)

    def _hidden_s(self, matmuls: Iterable[Matmul], dtype: str) -> float:
        """Seconds that reading and writing, or computing, takes behind the other of the two."""
        computing = replace(self.roofline, memory_fraction=math.inf)
        return sum(
            computing.matmul_s(each, dtype)
            + self.roofline.memory_s(each.num_bytes(ITEM))
            - self.roofline.matmul_s(each, dtype)
            for each in matmuls
        )


def _tokens(setting: Setting) -> int:
    """Tokens of a microbatch, all of which are predicted; every device has them whole."""
    return setting.microbatch_size * setting.seq_len


def _attention_products(setting: Setting) -> tuple[Matmul, Matmul]:
    """The products in forward of queries and keys, and of probabilities and values; every query sees all keys."""
    anatomy = setting.anatomy
    group_size = anatomy.num_heads // anatomy.num_kv_heads
    num_groups = setting.microbatch_size * anatomy.num_kv_heads
    scores = Matmul(group_size * setting.seq_len, setting.seq_len, anatomy.head_size, num_groups)
    return scores, Matmul(scores.rows, scores.depth, scores.columns, scores.num)
