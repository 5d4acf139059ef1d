"""Memory traffic of F, B, I and W besides their matmuls, of embedding and head, and of the update.

Goes in: a setting. Comes out: bytes read and written by norms, activations, residual sums, the softmax of attention,
head transposes, page writes, and gradients added to their float32 sums. Each of these is one kernel that reads its
inputs and writes its outputs once. Dropout saves no masks: backward draws them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.estimate.given import given_parts
from jaxpipe.estimate.parameters import are_ends_trained, layer_parameters, owned_of, shared_by_copies
from jaxpipe.estimate.setting import Setting, layers_of_devices, placement_of
from jaxpipe.estimate.sizes import FLOAT32_BYTES, ITEMSIZE, feed_forward_rows, layer_sizes
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.estimate.work import predicted_tokens, seen_scores
from jaxpipe.models.kinds import layer_of_head


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written for one microbatch on one device.

    Attributes:
        forward, input_gradient, weight_gradient: bytes of F, I and W of one layer; B does the work of I and W.
        deferred: bytes that I reads and writes besides where W is apart, to copy what W needs into a page; W moves as
            many to copy it out.
        embed_forward, embed_backward: bytes of the embedding.
        head: bytes of head and loss.
        statistics, gradients: bytes of S and T, where the head is split over `pipe`.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    deferred: float
    embed_forward: float
    embed_backward: float
    head: float
    statistics: float
    gradients: float


def traffic(setting: Setting) -> Traffic:
    """Bytes that the actions of `setting` read and write: norms, sums and activations read and write their arrays.

    A layer's backward reads and writes twice as much for each: the saved array and its gradient. Backward
    recomputes norms and activations from saved arrays, or the whole layer. The embedding's backward adds the gathered
    gradient to rows of a sum, at the speed of the memory: in a run of 1.1 B on an H100 the kernel that adds 8192 rows
    of 2048 takes 50 us, and reading and writing them 59. That is the kernel's own time in a trace. The 1.8 ms of a
    table of 128k words in docs/measured.md are what a fit of whole stages left over, and no kernel was seen to take so
    long.
    """
    item = ITEMSIZE[setting.dtype]
    residuals = traced_layer(setting)
    # A layer's gradient is the output of a kernel of its own; another one adds it: reads it, reads and writes its sum.
    added = layer_parameters(setting.model).of_device(setting) * (item + 2 * FLOAT32_BYTES)
    if setting.is_given:
        parts = given_parts(setting)
        return Traffic(
            forward=parts.layer_forward.num_bytes + 2 * residuals.page_bytes,
            input_gradient=parts.layer_input_gradient.num_bytes,
            weight_gradient=parts.layer_weight_gradient.num_bytes + added,
            deferred=2 * residuals.deferred_bytes,
            embed_forward=parts.embed_forward.num_bytes,
            embed_backward=parts.embed_backward.num_bytes,
            head=parts.head.num_bytes,
            statistics=0.0,
            gradients=0.0,
        )
    of = layer_sizes(setting)
    softmax = _softmax_bytes(setting)
    # A kernel reads its input and writes its output: a factor of 2 wherever an array passes through one.
    again = item * (2 * 2 * of.stream + (setting.anatomy.num_up + 1) * of.width)  # two norms, the activation
    moved = item * 2 * (2 * of.queries + 2 * of.keys)  # split into heads, and merged
    if setting.anatomy.num_experts > 1:  # tokens spread into rows, and summed from them
        moved += item * 3 * feed_forward_rows(setting) * setting.anatomy.hidden
    forward = again + moved + softmax + item * 2 * 3 * of.stream  # two sums of two streams
    recomputed = {"none": again, "attention": again + softmax, "full": forward}[setting.model.recompute]
    # Logits of the rows that a device of `pipe` has.
    part = predicted_tokens(setting) * (setting.anatomy.num_rows // (setting.num_kernel_parts * setting.pipe))
    return Traffic(
        # Saved arrays are written once more, into their page, and read from the layer's.
        forward=forward + 2 * residuals.page_bytes,
        # Of adapters I makes all gradients.
        input_gradient=2 * forward + recomputed + (0 if residuals.weight_gradient else added),
        weight_gradient=added if residuals.weight_gradient else 0,
        deferred=2 * residuals.deferred_bytes,  # XLA copies to a page and from it
        embed_forward=item * 3 * of.stream,
        embed_backward=are_ends_trained(setting.model)
        * (item * 3 * of.stream + (item + 2 * FLOAT32_BYTES) * of.stream * setting.num_token_parts),
        head=_head_bytes(setting),
        # Float32 logits are read twice, for their statistics and for the exponentials, which are read in T.
        statistics=item * 3 * of.stream + part * (2 * FLOAT32_BYTES + item),
        gradients=item * 6 * of.stream + part * 2 * item,
    )


def _softmax_bytes(setting: Setting) -> int:
    """Softmax bytes in forward: "xla" reads scores, writes probabilities; "chunked" reads float32 scores twice."""
    item = ITEMSIZE[setting.dtype]
    bytes_of_score = {"xla": 2 * item, "chunked": 2 * FLOAT32_BYTES + item, "cudnn": 0}
    # cuDNN keeps scores on the chip.
    return seen_scores(setting) * bytes_of_score[setting.model.attention]


def _head_bytes(setting: Setting) -> int:
    """Bytes of head and loss besides its matmuls, one of which adds to the sum of the kernel's gradient.

    Float32 logits are read twice, for their statistics and for their gradients, which are written.
    """
    item = ITEMSIZE[setting.dtype]
    logits = predicted_tokens(setting) * (setting.anatomy.num_rows // setting.num_kernel_parts)
    of_head = item * 6 * layer_sizes(setting).stream + logits * (2 * FLOAT32_BYTES + item)
    if layer_of_head(setting.model) is None:
        return of_head
    # Two more norms, and the stream beside the embeddings.
    return 2 * of_head + item * 18 * layer_sizes(setting).stream


def update_bytes(setting: Setting) -> float:
    """Bytes that a device reads and writes once a step: compute copies, zeroed sums, gradient norm, AdamW.

    AdamW reads masters, gradients and two moments, and writes all but the gradients; the norm reads the gradients once
    more; all are float32, and with ZeRO-1 a device does this for its part. Compute copies are cast from the masters.
    """
    parameters = layer_parameters(setting.model)
    most = max(layers_of_devices(setting))
    layers = most * parameters.of_device(setting)
    by_copies = shared_by_copies(setting)
    shared = sum(number for _, number in by_copies)
    # With two replicas a device has the masters of half of the layers that it computes.
    of_layers = most * parameters.owned_by_device(setting) / placement_of(setting).num_replicas
    masters = of_layers + owned_of(setting, by_copies)
    copied = FLOAT32_BYTES + ITEMSIZE[setting.dtype]
    # AdamW: 4 arrays read, 3 written, 1 more read for the norm; an average of the weights is read and written. Zeroed
    # sums: one write for all that a device computes.
    num_arrays = 8 + 2 * setting.keeps_average
    return masters * (num_arrays * FLOAT32_BYTES + copied) + (layers + shared) * FLOAT32_BYTES
