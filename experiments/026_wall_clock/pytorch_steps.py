"""Times one step of PyTorch under one of its pipeline schedules, as `jaxpipe.bench` does with jaxpipe's.

`run.py` starts this script in two processes of one core and one thread each. Each turn times the pipelined step, the
unpipelined step of one process while the other waits, and that of both at once. Before, all gradients are compared.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

from jaxpipe.distributed.gloo import tune_gloo
from jaxpipe.measure import median, pinned, timed

NUM_LAYERS, NUM_HEADS, NUM_WORDS = 8, 8, 256
MICROBATCH_SIZE = 2
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # a device holds stages d and 2D - 1 - d


class Block(nn.Module):
    """A transformer layer: pre-norm, causal attention, GELU."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.query_key_value, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream "batch seq hidden" after the layer."""
        columns = self.query_key_value(self.norms[0](x)).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = columns.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Embedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(self, hidden: int, seq_len: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(NUM_WORDS, hidden), nn.Embedding(seq_len, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The stream "batch seq hidden" of tokens "batch seq"."""
        return self.tokens(tokens) + self.positions.weight


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, the mean over the tokens of a microbatch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stages_of(size: dict[str, int], num_stages: int) -> list[nn.Sequential]:
    """The whole model in `num_stages` parts, with the same numbers in every process and whatever `num_stages`."""
    torch.manual_seed(0)
    blocks = [Block(size["hidden"]) for _ in range(NUM_LAYERS)]
    first = Embedding(size["hidden"], size["seq_len"])
    last = nn.Sequential(nn.LayerNorm(size["hidden"]), nn.Linear(size["hidden"], NUM_WORDS, bias=False))
    ends = [round(stage * NUM_LAYERS / num_stages) for stage in range(num_stages + 1)]
    parts = [blocks[begin:end] for begin, end in pairwise(ends)]
    return [
        nn.Sequential(*[first] * (stage == 0), *part, *[last] * (stage == num_stages - 1))
        for stage, part in enumerate(parts)
    ]


def make_steps(
    name: str, size: dict[str, int], rank: int, num_devices: int
) -> tuple[Callable[[], Any], Callable[[], Any], str]:
    """The pipelined and the unpipelined step, with equal gradients, and the rows as CSV; none of 1F1B."""
    one_each = name == "Schedule1F1B"
    num_stages, num_microbatches = num_devices * (1 if one_each else 2), size["num_microbatches"]
    parts, whole = stages_of(size, num_stages), stages_of(size, 1)[0]
    numbers = [rank] if one_each else [rank, num_stages - 1 - rank if name in V_SHAPED else num_devices + rank]
    stages = [PipelineStage(parts[number], number, num_stages, torch.device("cpu")) for number in numbers]
    make = getattr(schedules, name)
    schedule = make(stages[0] if one_each else stages, num_microbatches, loss_fn=mean_loss)
    words = torch.randint(NUM_WORDS, (num_microbatches * MICROBATCH_SIZE, size["seq_len"] + 1))
    tokens, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    arguments = (tokens,) if 0 in numbers else ()
    told = {"target": targets, "losses": []} if num_stages - 1 in numbers else {}

    def pipelined() -> None:
        """A step ends when that of every process has ended."""
        for number in numbers:
            parts[number].zero_grad()
        schedule.step(*arguments, **told, return_outputs=False)
        dist.barrier()

    def unpipelined() -> None:
        whole.zero_grad()
        for some, wanted in zip(tokens.split(MICROBATCH_SIZE), targets.split(MICROBATCH_SIZE), strict=True):
            (mean_loss(whole(some), wanted) / num_microbatches).backward()

    pipelined()
    unpipelined()
    grads = iter([leaf.grad for leaf in whole.parameters()])
    wanted = [[next(grads) for _ in part.parameters()] for part in parts]
    for number in numbers:
        found = [leaf.grad for leaf in parts[number].parameters()]
        torch.testing.assert_close(found, wanted[number], rtol=1e-3, atol=1e-6)
    order = {} if one_each else schedule.pipeline_order
    lines = (",".join(str(cell) for cell in row if cell is not None and cell.is_compute_op) for row in order.values())
    return pipelined, unpipelined, "\n".join(lines)


def measure(name: str, size: dict[str, int], *, rank: int, num_devices: int, num_steps: int) -> dict[str, Any]:
    """The numbers of `jaxpipe.bench` that `run.py` reads, from the times of this process."""
    pipelined, unpipelined, rows = make_steps(name, size, rank, num_devices)
    tune_gloo()
    pipelines, alone, crowded = [], [], []
    for _ in range(num_steps):
        dist.barrier()
        pipelines.append(timed(pipelined))
        if rank == 0:
            alone.append(timed(unpipelined))
        dist.barrier()
        crowded.append(timed(unpipelined))
    if rank:
        return {}
    step_s, one_s, many_s = (median(found).wall_s for found in (pipelines, alone, crowded))
    return {
        "pipelined_wall_s": step_s,
        "unpipelined_wall_s": one_s,
        "efficiency": one_s / (num_devices * step_s),
        "efficiency_of_cores": one_s / many_s,
        "rows": rows,
        "torch_version": torch.__version__,
    }


def main() -> None:
    """Measures in one of the processes; the first tells what was found."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--size", type=json.loads, required=True)
    for flag in ("--num_steps", "--num_processes", "--process_id"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--coordinator_address", required=True)
    flags = parser.parse_args()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[flags.process_id]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    rank, num_devices = flags.process_id, flags.num_processes
    address = f"tcp://{flags.coordinator_address}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_devices)
    found = measure(flags.schedule, flags.size, rank=rank, num_devices=num_devices, num_steps=flags.num_steps)
    dist.barrier()
    pinned.tell(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
