"""How fast the paper's machines are: what a layer, a head, an update and a message take there.

Two numbers are fitted (`calibration`): the share of the peak that matrix products reach, and what a message costs
besides its bytes. All others are data sheets and counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from runs import GPUS_PER_NODE, Model, Run

from jaxpipe.cluster.hardware import HARDWARE

GPU = HARDWARE["a800-80g"]

# Megatron-LM's mixed precision, bytes read and written for a parameter: 16-bit gradients made 32-bit (2 + 4),
# unscaled (4 + 4), their norm (4), clipped (4 + 4); Adam (16 + 12); weights made 16-bit (4 + 2).
UPDATE_BYTES = 60


@dataclass(frozen=True)
class Machine:
    """What is fitted, and the network.

    Attributes:
        product_ratio: of the peak, that matrix products reach.
        hop_s: of a message, besides its bytes, while which its sender computes nothing: a blocking exchange ends in a
            synchronization of the whole GPU in Megatron-LM, and kernels are queued anew.
        network_bytes_per_s: of a node, whose GPUs share it: one adapter of 200 Gb/s, as published.
    """

    product_ratio: float
    hop_s: float
    network_bytes_per_s: float = 25e9


def layer_forward_s(machine: Machine, model: Model, microbatch_size: int) -> float:
    """Of one layer: matrix products at a share of the peak, and what it saves, written once and read once.

    Source: operations of Narayanan et al., SC 2021, section 5.1; bytes saved of Korthikanti et al., MLSys 2023,
        section 4.1.
    """
    tokens, hidden, seq_len = microbatch_size * model.seq_len, model.hidden, model.seq_len
    flops = 24 * tokens * hidden**2 + 4 * tokens * seq_len * hidden
    moved_bytes = 2 * saved_bytes(model, microbatch_size)
    return flops / (machine.product_ratio * GPU.bf16_flops_per_s) + moved_bytes / GPU.memory_bytes_per_s


def saved_bytes(model: Model, microbatch_size: int) -> float:
    """Of one layer's forward, kept for its backward: Korthikanti et al., equation 1."""
    tokens = microbatch_size * model.seq_len
    return tokens * model.hidden * (34 + 5 * model.num_heads * model.seq_len / model.hidden)


def head_forward_s(machine: Machine, model: Model, microbatch_size: int) -> float:
    """Logits and loss: a product, and 32-bit logits written, read for the softmax and read again."""
    logits = microbatch_size * model.seq_len * model.vocab_size
    flops = 2 * logits * model.hidden
    return flops / (machine.product_ratio * GPU.bf16_flops_per_s) + 3 * 4 * logits / GPU.memory_bytes_per_s


def num_params(run: Run) -> int:
    """On a device that has the most: layers, and the table of words, which first and last stage both hold."""
    model = run.model
    replicas = 2 if run.method.is_bidirectional else 1
    return replicas * (12 * model.hidden**2 * model.num_layers // run.pipe + model.vocab_size * model.hidden)


def update_s(run: Run) -> float:
    """Once a step."""
    return UPDATE_BYTES * num_params(run) / GPU.memory_bytes_per_s


def nodes_of(run: Run) -> list[int]:
    """[device] -> node.

    Megatron-LM numbers GPUs with the pipelines inside, so that the W GPUs of a device are neighbours. For two replicas
    the published code puts device k at place k where k is even, at D - k where it is odd.
    """
    places = range(run.pipe)
    if run.method.is_bidirectional:
        of_place = [place if place % 2 == 0 else run.pipe - place for place in places]
        places = [of_place.index(device) for device in range(run.pipe)]
    return [place * run.data // GPUS_PER_NODE for place in places]


def message_s(machine: Machine, run: Run, source: int, target: int) -> float:
    """One message between devices; those that leave a node at the same time share its adapter.

    Where devices of a node are no neighbours in the pipeline, as with two replicas, all of them send at the same time;
    else those of one device do.
    """
    if source == target:
        return 0.0
    size = 2 * run.microbatch_size * run.model.seq_len * run.model.hidden
    nodes = nodes_of(run)
    if nodes[source] == nodes[target]:
        return machine.hop_s + size / GPU.nvlink_bytes_per_s
    num_senders = run.data * (nodes.count(nodes[source]) if run.method.is_bidirectional else 1)
    return machine.hop_s + num_senders * size / machine.network_bytes_per_s


def exchange_s(machine: Machine, run: Run, first: int, second: int, num_bytes: float) -> float:
    """Two devices exchange and sum as many bytes, in each of the W pipelines at the same time."""
    nodes = nodes_of(run)
    if nodes[first] == nodes[second]:
        return num_bytes / GPU.nvlink_bytes_per_s
    return min(run.data, GPUS_PER_NODE) * num_bytes / machine.network_bytes_per_s


def reduce_s(machine: Machine, run: Run) -> float:
    """16-bit gradients summed over the pipelines, in a ring within the node, behind the last backward.

    The table of words is summed between the first and the last stage besides.
    """
    ring = 2 * (run.data - 1) / run.data * 2 * num_params(run) / GPU.nvlink_bytes_per_s
    words = 2 * run.model.vocab_size * run.model.hidden
    return ring + exchange_s(machine, run, 0, run.pipe - 1, words)
