"""How many bytes Megatron-LM of 2023 takes of each device: what BPipe's measurements stood on.

Counted from what a layer keeps there: 18 bytes a parameter, and every input of a product, a norm or a mask. jaxpipe
keeps less: it computes outputs of norms and activations again (`jaxpipe.estimate.residuals`). Left out: logits, which
stand on the last stage, not on the fullest.
"""

from __future__ import annotations

import numpy as np

from jaxpipe.estimate import Setting, traced_layer
from jaxpipe.models import parameter_shapes
from jaxpipe.schedules import peak_activations

# bfloat16 weights 2, float32 gradients 4, masters and two moments 12: Megatron-LM's table of its distributed optimizer,
# which with one copy of the pipeline splits nothing.
BYTES_PER_PARAMETER = 18


def kept_bytes(setting: Setting, *, mlp_again: bool = False, sequence_parallel: bool = True) -> float:
    """What one layer keeps for one microbatch on a device.

    Of each token and hidden unit, in bfloat16: inputs of both norms 4, their outputs 4, queries, keys and values 6,
    what was attended 2; for GPT, the inputs of the activation and of the last product 16, and 2 of masks where it
    drops: 34 in all. For LLaMA, in place of these 18, gate, what is gated, the activated gate and their product, each 2
    feed_forward / hidden. Of each score, where they are kept, 2 of probabilities, 3 of their mask and what is left.

    Args:
        setting: whose layer; with `recompute` or `attention` that keep no scores, without them.
        mlp_again: whether what the feed forward keeps is computed again.
        sequence_parallel: whether `tensor` splits norms and dropout, too, by positions; otherwise each device keeps
            their inputs, outputs and masks whole, and of a layer that is computed again the whole input.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, section 4.1;
    LLaMA's feed forward is counted by us in the same way.
    """
    model = setting.model
    tokens, hidden = setting.microbatch_size * setting.seq_len, model.anatomy.hidden
    num_parts = setting.tensor if sequence_parallel else 1  # of what stands between the parts that `tensor` splits
    if model.recompute == "full":
        return 2 * tokens * hidden / num_parts
    anatomy = model.anatomy
    masks = 2 * hidden if anatomy.hidden_dropout else 0
    feed_forward = 8 * anatomy.width if anatomy.num_up == 2 else 16 * hidden
    score = 5 if anatomy.attention_dropout else 2
    has_scores = (model.attention, model.recompute) == ("xla", "none")
    scores = score * anatomy.num_heads * setting.seq_len if has_scores else 0
    split = 8 * hidden + (0 if mlp_again else feed_forward) + scores
    return tokens * ((8 * hidden + masks) / num_parts + split / setting.tensor)


def num_parameters(setting: Setting) -> int:
    """Of the whole model."""
    shapes = parameter_shapes(setting.model)
    of_layer, shared = (sum(shape.size for shape in part) for part in (shapes.layer, shapes.shared))
    return of_layer * setting.model.num_layers + shared


def stage_bytes(setting: Setting, *, mlp_again: bool = False, sequence_parallel: bool = True) -> np.ndarray:
    """[stage] what its device takes when it holds most, parameters spread evenly; a schedule of one stage a device.

    Args:
        setting, mlp_again, sequence_parallel: as `kept_bytes` takes them.
    """
    states = BYTES_PER_PARAMETER * num_parameters(setting) / (setting.pipe * setting.tensor)
    # With a few microbatches more than stages there are as many at once as with any number.
    few = min(setting.num_microbatches, 4 * setting.pipe)
    slots = peak_activations(setting.schedule_spec.build(few))
    kept = kept_bytes(setting, mlp_again=mlp_again, sequence_parallel=sequence_parallel)
    return states + slots * np.array(setting.layers_per_stage) * kept


def mlp_share(setting: Setting, *, with_last: bool) -> float:
    """FLOPs of the feed forward, as a part of a layer's forward.

    Args:
        setting: whose layer.
        with_last: with the last product, which `torch.utils.checkpoint` computes again although backward needs its
            input and not its output.
    """
    products = traced_layer(setting).forward
    num_inner = setting.model.anatomy.num_up
    inner = products[-1 - num_inner : -1]
    counted = inner + products[-1:] if with_last else inner
    return sum(each.flops for each in counted) / sum(each.flops for each in products)
