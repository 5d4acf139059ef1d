"""Times of actions on a kind of GPU, from sizes, peaks and a few constants; nothing is measured here.

Goes in: hardware, and the fractions of its peaks that programs reach. Comes out: `Times`, and links. A matmul takes as
long as its waves of tiles, or as its bytes; all else as long as its bytes; a collective of a layer as long as its
bytes on the slowest link; nothing overlaps. Left to others: the step (`step`), and the time that the program's loops
and guards take between kernels, for which there is no source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from jaxpipe.cluster.axes import STREAM, Collectives
from jaxpipe.cluster.hardware import Hardware
from jaxpipe.errors import ConfigError
from jaxpipe.estimate.buffers import TracedPart
from jaxpipe.estimate.communication import collectives_s, of_head_s
from jaxpipe.estimate.given import given_parts
from jaxpipe.estimate.kinds import layer_of_head_in
from jaxpipe.estimate.parameters import update_matmuls
from jaxpipe.estimate.products import Matmul
from jaxpipe.estimate.setting import Group, Setting
from jaxpipe.estimate.sizes import ITEMSIZE
from jaxpipe.estimate.tiles import padded_flops
from jaxpipe.estimate.times import Link, Times, ring_s
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.estimate.traffic import traffic, update_bytes
from jaxpipe.estimate.work import OPERATIONS, dropout_draws, head_matmuls, own_keys_scores, split_head_matmuls

CONSTANTS = Path(__file__).parent / "gpus"  # constants measured on GPUs, a file for each kind

# 32-bit integer additions, shifts or logical operations of a core in a clock, of capability 7.0 to 10.0.
# Sources: NVIDIA, CUDA C++ Programming Guide, throughput of native arithmetic instructions; of 10.0 also XLA's target.
OPERATIONS_PER_CLOCK = 64

# Fraction of the peak that the best of many large matmuls reach, of a GPU by its name, else by its compute capability.
# Sources: (a) Bekman, Machine Learning Engineering, Maximum Achievable Matmul FLOPS comparison table; (b) measurements
# that users sent to github.com/zzc0721/torch-performance-test-data, issues 43, 77, 78 and 140, one of each GPU.
MATMUL_FRACTION: dict[str | tuple[int, int], float] = {
    (7, 0): 0.924,  # (b) 14.51 of 15.7 TFLOP/s in float32, V100 SXM2
    (8, 0): 0.859,  # (a) 267.9 of 312, A100 SXM
    (8, 9): 0.743,  # (b) 269.15 of 362.05, L40S
    "rtx4090": 0.998,  # (b) 164.81 of 165.2: its clock goes beyond the one of the peak
    (9, 0): 0.803,  # (a) 794.5 of 989, H100 or H200 SXM
    "h20": 0.961,  # (b) 142.25 of 148
    (10, 0): 0.776,  # (a) 1745 of 2250, B200
    "gb200": 0.729,  # (a) 1822 of 2500
}

# Fraction of the peak that cuDNN's attention reaches, forward and backward together: bfloat16, causal, head size 128,
# the mean of 2048 and 4096 tokens; FLOPs of what a causal mask hides do not count.
# Source: NVIDIA/cudnn-frontend, benchmark/attention_training/results/llama3.1/, the files of 28 September 2026, cuDNN
# 9.27. To compare: on an A100 SXM FlashAttention-2 reaches 155 and 173 of 312 TFLOP/s (Dao, FlashAttention-2, 2023,
# figure 4), 0.53; on an H100 SXM cuDNN reaches 484 and 518 of 989 in forward, and 465 and 499 in backward without the
# mask (Shah et al., FlashAttention-3, 2024, figures 5 and 6), 0.49.
FUSED_FRACTION: dict[str | tuple[int, int], float] = {
    (8, 0): 0.41,  # 118.7 and 138.2 of 312 TFLOP/s, A100 PCIe
    (8, 9): 0.41,  # assumed to be as on 8.0
    (9, 0): 0.48,  # 432.2 and 524.0 of 989.5, H200
    (10, 0): 0.41,  # 889.2 and 1155.6 of 2500, GB200
}


@dataclass(frozen=True)
class Protocol:
    """A way in which NCCL moves bytes around a ring; of several it takes the fastest for the size at hand.

    Attributes:
        start_s: seconds of a collective besides its steps.
        nvlink_step_s, network_step_s: seconds of a step without bytes, within a node and between two.
        fraction: fraction of the reached bandwidth, the rest of which are flags.
    """

    start_s: float
    nvlink_step_s: float
    network_step_s: float
    fraction: float


# Low latency (LL), LL128 and simple. Source: NCCL, src/graph/tuning.cc, commit 01afd20: baseLat and hwLat of rings.
PROTOCOLS = (
    Protocol(3.6e-6, 0.47e-6, 2.7e-6, 1 / 3),
    Protocol(10.0e-6, 1.9e-6, 4.0e-6, 0.92),
    Protocol(8.4e-6, 3.4e-6, 9.6e-6, 1.0),
)


@dataclass(frozen=True)
class Roofline:
    """A source of times: the peaks of `hardware`, and the fractions of them that are reached.

    Attributes:
        hardware: the kind of GPU.
        matmul_fraction: fraction of the peak reached by matmuls whose tiles fill all cores; None: `MATMUL_FRACTION`.
        fused_fraction: fraction of the peak reached by attention in one kernel; None: `FUSED_FRACTION`.
        memory_fraction: fraction of the memory's bandwidth. Assumed.
        nvlink_fraction: fraction of NVLink's bandwidth: collectives reach 200 to 208 of 300 GB/s on A100s. Source:
            nccl-tests, issues 149 and 178. Assumed of other GPUs, and of PCIe.
        network_fraction: fraction of the network's bandwidth: collectives reach 85 of 100 GB/s a node. Source:
            nccl-tests, issue 119.
        message_bytes_per_s: bandwidth of a message between two GPUs of a node, for which NCCL uses fewer channels than
            for a collective: the slope of a line through the transfers of 10 to 28 MB in Qi et al., Zero Bubble
            Pipeline Parallelism, 2024, table 6, A100s. Assumed of other GPUs, but where `nvlink_fraction` is less.
        kernel_s: seconds from a kernel's end to the start of the next. Assumed.
        forward_kernels, backward_kernels: kernels of one layer. Assumed.
        nvlink_latency_s, network_latency_s: latency of a message: a simple step of `PROTOCOLS` with its start.
        protocols: of collectives.
        exposed_fraction: fraction of a collective's time that computing does not hide: 1 as in our program; other
            programs hide part of it.
        halves_copy: whether what W needs of I is copied to a page and from it, as XLA does in our program.
        halves_fraction: what I and W take besides in our program, as a fraction of both. Source: I + W / B of a stage
            of LLaMA-3 8B on an H100 is 1.130, and 1.104 with the copies alone (docs/measured.md, 2026-11-26); of layers
            alone, without pages, 1.046 to 1.095. Assumed of other GPUs.
    """

    hardware: Hardware
    matmul_fraction: float | None = None
    fused_fraction: float | None = None
    memory_fraction: float = 0.85
    nvlink_fraction: float = 0.68
    network_fraction: float = 0.85
    message_bytes_per_s: float = 73e9
    kernel_s: float = 2e-6
    forward_kernels: int = 20
    backward_kernels: int = 40
    nvlink_latency_s: float = 12e-6
    network_latency_s: float = 18e-6
    protocols: tuple[Protocol, ...] = PROTOCOLS
    exposed_fraction: float = 1.0
    halves_copy: bool = True
    halves_fraction: float = 1.130 / 1.104 - 1

    @classmethod
    def of(cls, hardware: Hardware, folder: Path = CONSTANTS) -> Roofline:
        """The roofline of `hardware` with the constants measured on such a GPU, if there are any.

        Args:
            hardware: the kind of GPU.
            folder: where the file NAME.json of a GPU is: `constants.json` as `python -m experiments.gpu` writes it.
                Entries that have the name of a field here replace its default.
        """
        path = folder / f"{hardware.name}.json"
        measured = json.loads(path.read_text()) if path.is_file() else {}
        # A file of constants has others too, as of kernels; `hardware` is what the caller asks for.
        own = {field.name for field in fields(cls)} - {"hardware"}
        return cls(hardware, **{name: value for name, value in measured.items() if name in own})

    def times(self, setting: Setting) -> Times:
        """Times of the actions of `setting`.

        Raises:
            ConfigError: the GPU reaches a fraction of its peak that is not known.
        """
        # It alone depends on the schedule, on layers by stage, and on what copies share.
        computed_s = sum(self.matmul_s(matmul, "float32") for matmul in update_matmuls(setting))
        update_s = self.memory_s(update_bytes(setting)) + computed_s
        return replace(_times_of_actions(self, setting.of_actions), update_s=update_s)

    def times_of_actions(self, setting: Setting) -> Times:
        """As `times`, without the update, which takes 0 s."""
        matmuls = traced_layer(setting)
        moved = traffic(setting)
        drawn = dropout_draws(setting)
        dtype = setting.dtype
        is_again = setting.model.recompute == "full"
        sent_s = collectives_s(setting, self.gather_s, hides_keys_s=self.matmul_s(own_keys_scores(setting), dtype))

        kernels = self._kernels(setting)

        def part_s(
            of: Iterable[Matmul],
            num_bytes: float,
            num_drawn: int,
            number: Callable[[Collectives], int],
            part: str,
        ) -> float:
            computed_s = sum(self.matmul_s(matmul, dtype) for matmul in of) + self.draw_s(num_drawn)
            return computed_s + self.memory_s(num_bytes) + sent_s(number) + kernels.get(part, 0) * self.kernel_s

        has_w = bool(matmuls.weight_gradient)  # of adapters I is all of B
        # B is I and W in one, without what W repeats of I's collectives and without copies of pages.
        input_gradient_s = part_s(
            matmuls.input_gradient,
            moved.input_gradient,
            drawn.backward,
            lambda over: (over.input_gradient if has_w else over.backward) + is_again * over.again,
            "layer_input_gradient",
        )
        weight_gradient_s = part_s(
            matmuls.weight_gradient,
            moved.weight_gradient,
            0,
            lambda over: has_w * over.weight_gradient,
            "layer_weight_gradient",
        )
        # By W.
        repeated_s = sent_s(lambda over: has_w * (over.input_gradient + over.weight_gradient - over.backward))
        copied_s = self.memory_s(moved.deferred) if self.halves_copy else 0.0
        apart = 1.0 + (self.halves_fraction if self.halves_copy else 0.0)
        layer_backward_s = input_gradient_s + weight_gradient_s - repeated_s
        layer_forward_s = part_s(
            matmuls.forward, moved.forward, drawn.forward, lambda over: over.forward, "layer_forward"
        )
        # Of a pair the collectives of both travel behind the products of both, but for the first of a layer over
        # `tensor`, as `jaxpipe.program.side_by_side` says: what is longer decides.
        travelling_s = sent_s(lambda over: over.forward + over.backward + is_again * over.again)
        alone_s = sent_s(lambda over: min(over.forward, 1) * (over.moves == STREAM))
        computed_s = layer_forward_s + layer_backward_s - travelling_s
        times = Times(
            layer_forward_s=layer_forward_s,
            layer_backward_s=layer_backward_s,
            layer_input_gradient_s=apart * (input_gradient_s + copied_s),
            layer_weight_gradient_s=apart * (weight_gradient_s + copied_s),
            embed_forward_s=part_s((), moved.embed_forward, drawn.embed, lambda over: over.embed, "embed_forward"),
            embed_backward_s=part_s((), moved.embed_backward, drawn.embed, lambda over: over.embed, "embed_backward"),
            head_s=part_s(head_matmuls(setting), moved.head, 0, lambda over: over.head, "head"),
            update_s=0.0,
            layer_hidden_s=min(travelling_s - alone_s, computed_s),
        )
        if of_head := layer_of_head_in(setting):
            # Its layer forward and backward, the embedding of next tokens likewise, and the gather of what it ends in.
            layer = self.times_of_actions(of_head)
            layer_s = layer.layer_forward_s + layer.layer_backward_s + sent_s(lambda over: over.head)
            times = replace(times, head_s=times.head_s + layer_s + times.embed_forward_s + times.embed_backward_s)
        if setting.is_given:  # whose head is one function
            return times
        # Devices that are between two actions wait for collectives over `pipe`.
        of_statistics, of_gradients = split_head_matmuls(setting)
        before_s, after_s = of_head_s(setting, self.gather_s)
        statistics_s = part_s(of_statistics, moved.statistics, 0, lambda over: over.statistics, "statistics")
        gradients_s = part_s(of_gradients, moved.gradients, 0, lambda over: over.gradients, "gradients")
        return replace(times, statistics_s=statistics_s + before_s, gradients_s=gradients_s + after_s)

    def _kernels(self, setting: Setting) -> dict[str, float]:
        """Kernels of the parts of actions, by part."""
        if setting.is_given:
            parts = given_parts(setting)
            return {name: part.num_kernels for name, part in vars(parts).items() if isinstance(part, TracedPart)}
        # A split backward runs as many kernels in I as in W; of adapters I runs all.
        of_w = self.backward_kernels / 2 if traced_layer(setting).weight_gradient else 0.0
        backward = {"layer_input_gradient": self.backward_kernels - of_w, "layer_weight_gradient": of_w}
        return {"layer_forward": self.forward_kernels, **backward, "embed_forward": 1, "embed_backward": 1}

    def link(self, *, in_node: bool) -> Link:
        """Link that messages take between two devices of a node, or of two nodes."""
        latency_s = self.nvlink_latency_s if in_node else self.network_latency_s
        # A message never is faster than a collective on the same link.
        return Link(latency_s, min(self.message_bytes_per_s, self._bytes_per_s(in_node=in_node)))

    def gather_s(self, group: Group, num_bytes: float) -> float:
        """Seconds of a gather or a scattered sum that computing does not hide, by the fastest of `protocols`."""
        # No ring, and not even the start of a collective.
        if group.size == 1:
            return 0.0

        def seconds(protocol: Protocol) -> float:
            def step(in_node: bool) -> Link:
                latency_s = protocol.nvlink_step_s if in_node else protocol.network_step_s
                return Link(latency_s, protocol.fraction * self._bytes_per_s(in_node=in_node))

            return protocol.start_s + ring_s(group, num_bytes, step)

        return self.exposed_fraction * min(map(seconds, self.protocols))

    def _bytes_per_s(self, *, in_node: bool) -> float:
        """Bandwidth that collectives reach between two devices, one way."""
        if in_node:
            return self.nvlink_fraction * self.hardware.nvlink_bytes_per_s
        return self.network_fraction * self.hardware.network_bytes_per_s

    def matmul_s(self, matmul: Matmul, dtype: str) -> float:
        """Seconds of matmuls: their waves of tiles at the reached fraction of the peak, or their bytes if longer.

        Raises:
            ConfigError: the fraction is not known for this GPU.
        """
        # XLA computes float32 matmuls in TF32 on GPUs.
        peak = {"bfloat16": self.hardware.bf16_flops_per_s, "float32": self.hardware.tf32_flops_per_s}[dtype]
        if matmul.fused:
            fraction = fused_fraction_of(self.hardware) if self.fused_fraction is None else self.fused_fraction
            return matmul.flops / (peak * fraction)
        fraction = matmul_fraction_of(self.hardware) if self.matmul_fraction is None else self.matmul_fraction
        computed_s = padded_flops(matmul, self.hardware.num_cores) / (peak * fraction)
        # Compute and memory traffic overlap within a matmul; the slower one decides. Not so of experts' kernels: on an
        # H100 products of Mixtral's and Qwen3's experts take 0.99 to 1.17 times the sum, forward and backward.
        # Source: experiments/gpu/h100, products of experts, at the fraction 0.708 fitted to its dense layers.
        apart_s = self.memory_s(ITEMSIZE[dtype] * matmul.apart)
        return max(computed_s + apart_s, self.memory_s(matmul.num_bytes(ITEMSIZE[dtype])))

    def memory_s(self, num_bytes: float) -> float:
        """Seconds of kernels that read and write `num_bytes` in all."""
        return num_bytes / (self.memory_fraction * self.hardware.memory_bytes_per_s)

    def draw_s(self, num_drawn: int) -> float:
        """Seconds to draw `num_drawn` random numbers."""
        hardware = self.hardware
        return num_drawn * OPERATIONS / (OPERATIONS_PER_CLOCK * hardware.num_cores * hardware.clock_rate_ghz * 1e9)


@cache
def _times_of_actions(source: Roofline, setting: Setting) -> Times:
    return source.times_of_actions(setting)


def matmul_fraction_of(hardware: Hardware) -> float:
    """The fraction of the peak that large matmuls reach on `hardware`.

    Raises:
        ConfigError: it is not known.
    """
    repair = "give Roofline(hardware, matmul_fraction=...) a measured one"
    return _known(MATMUL_FRACTION, hardware, "matmul_fraction", repair=repair)


def fused_fraction_of(hardware: Hardware) -> float:
    """The fraction of the peak that attention in one kernel reaches on `hardware`.

    Raises:
        ConfigError: it is not known, as where cuDNN has no such kernel.
    """
    repair = "set model.attention='chunked', or give Roofline(hardware, fused_fraction=...) a measured one"
    return _known(FUSED_FRACTION, hardware, "fused_fraction", repair=repair)


def _known(fractions: Mapping[str | tuple[int, int], float], hardware: Hardware, field: str, *, repair: str) -> float:
    """The fraction of a GPU by its name, else by its compute capability."""
    # The name first: GPUs of one capability differ in clock and power.
    for key in (hardware.name, hardware.compute_capability):
        if key in fractions:
            return fractions[key]
    capabilities = [hardware.compute_capability, *(key for key in fractions if not isinstance(key, str))]
    unknown, *known = (f"{major}.{minor}" for major, minor in capabilities)
    raise ConfigError(
        f"{field} of {hardware.description}: what it reaches of its peak is not known",
        rule="roofline-fraction: a time needs the fraction of the peak that programs reach on that GPU",
        picture=f"compute capability {unknown}; known are {', '.join(known)}",
        repair=repair,
    )
