"""Settings of large runs in which gathers and sums over `data` take long: the rows of the page's first table."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.cluster import parse_topology
from jaxpipe.estimate import Setting, Shard
from jaxpipe.models import GPTConfig, LlamaConfig, ModelConfig
from jaxpipe.schedules import ScheduleSpec


def gpt(num_layers: int, hidden: int, num_heads: int, vocab_size: int, num_positions: int) -> GPTConfig:
    """A GPT with attention in one kernel."""
    return GPTConfig(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        vocab_size=vocab_size,
        num_positions=num_positions,
        attention="cudnn",
    )


def llama3(num_layers: int, hidden: int, num_heads: int, feed_forward: int) -> LlamaConfig:
    """A Llama 3 with attention in one kernel."""
    return LlamaConfig(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=8,
        feed_forward=feed_forward,
        vocab_size=128256,
        rope_theta=500000.0,
        attention="cudnn",
    )


@dataclass(frozen=True)
class Case:
    """A row: model and mesh, and the method with its number of chunks, 0 where it takes none."""

    name: str
    model: ModelConfig
    topology: str
    mesh: tuple[int, int, int]  # tensor, pipe, data
    schedule: str
    num_chunks: int
    num_microbatches: int
    seq_len: int
    microbatch_size: int = 1

    def setting(self, shard: Shard = Shard.OPTIMIZER) -> Setting:
        """The setting, with what copies share."""
        tensor, pipe, data = self.mesh
        options = f"num_chunks={self.num_chunks}" if self.num_chunks else ""
        num_stages = ScheduleSpec(self.schedule, pipe, options).smallest.num_stages
        return Setting(
            model=self.model,
            dtype="bfloat16",
            seq_len=self.seq_len,
            batch_size=data * self.num_microbatches * self.microbatch_size,
            num_predicted=None,
            schedule_name=self.schedule,
            options=options,
            num_microbatches=self.num_microbatches,
            layers_per_stage=(self.model.num_layers // num_stages,) * num_stages,
            data=data,
            pipe=pipe,
            tensor=tensor,
            order="contiguous",
            shard=shard,
            topology=parse_topology(self.topology),
        )


GPT_175B, GPT_70B, GPT_16B = (
    gpt(96, 12288, 96, 51200, 2048),
    gpt(84, 8192, 64, 131072, 4096),
    gpt(32, 6144, 48, 131072, 4096),
)
LLAMA_8B, LLAMA_70B = llama3(32, 4096, 32, 14336), llama3(80, 8192, 64, 28672)
INTERLEAVED = "interleaved_1f1b"
CASES = (
    Case("GPT 175B", GPT_175B, "h100-80g:64x8", (4, 8, 16), INTERLEAVED, 6, 64, 2048),
    Case("GPT 70B", GPT_70B, "h100-80g:96x8", (8, 2, 48), "1f1b", 0, 8, 4096),
    Case("GPT 70B", GPT_70B, "h100-80g:96x8", (8, 2, 48), INTERLEAVED, 2, 8, 4096),
    Case("GPT 16B", GPT_16B, "h100-80g:24x8", (4, 1, 48), "1f1b", 0, 4, 4096),
    Case("GPT 16B", GPT_16B, "h100-80g:24x8", (4, 1, 48), "1f1b", 0, 2, 4096, 2),
    Case("GPT 175B", GPT_175B, "a100-80g:1536x8", (8, 8, 192), INTERLEAVED, 6, 32, 2048),
    Case("Llama 3 70B", LLAMA_70B, "h100-80g:32x8", (8, 4, 8), "1f1b", 0, 32, 8192),
    Case("Llama 3 70B", LLAMA_70B, "h100-80g:32x8", (8, 4, 8), "1f1b", 0, 8, 8192),
    Case("Llama 3 70B", LLAMA_70B, "h100-80g:128x8", (8, 4, 32), INTERLEAVED, 5, 16, 4096),
    Case("Llama 3 70B", LLAMA_70B, "h100-80g:128x8", (8, 4, 32), INTERLEAVED, 5, 8, 4096),
    Case("Llama 3 8B", LLAMA_8B, "h100-80g:1x8", (1, 1, 8), "1f1b", 0, 16, 8192),
)
