"""The training run's model and steps as one writes them in PyTorch: bfloat16 weights, float32 masters, fused AdamW."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import nn
from torch.nn import functional

from experiments.gpu.cells import Record, Size
from experiments.gpu.torch_block import Case, TorchBlock, new_norm
from jaxpipe.config import model_config
from jaxpipe.models import model_flops


class TorchModel(nn.Module):
    """Embedding, blocks, norm, and the loss of the next tokens."""

    def __init__(self, case: Case):
        super().__init__()
        model: Any = case.model
        self.embedding = nn.Embedding(model.vocab_size, model.hidden)
        self.blocks = nn.ModuleList(TorchBlock(case) for _ in range(model.num_layers))
        self.norm, self.head = new_norm(model), nn.Linear(model.hidden, model.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of "batch seq" tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def train(config: ConfigDict, size: Size, *, warm_up: int) -> Record:
    """Tokens a second of the config's steps on random tokens, with as many microbatches, and bytes at the peak."""
    if size.is_gpu and not torch.cuda.is_available():
        return {"left_out": "PyTorch has no CUDA here"}
    model: Any = model_config(config)
    data = config.data
    num_microbatches, device = config.pipeline.num_microbatches, "cuda" if size.is_gpu else "cpu"
    batch = data.batch_size // num_microbatches
    case = Case(model, batch, data.seq_len, "bfloat16", size.device.platform)
    network = TorchModel(case).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, fused=size.is_gpu)
    run = torch.compile(network) if size.is_gpu else network
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=(num_microbatches, batch, data.seq_len + 1))
    microbatches = torch.from_numpy(tokens).to(device)
    seconds = []
    for _ in range(min(config.train.steps, warm_up + 20)):
        begun_s = time.perf_counter()
        for microbatch in microbatches:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = run(microbatch[:, :-1], microbatch[:, 1:]) / num_microbatches
            loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if size.is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun_s)
    step_s = statistics.median(seconds[warm_up:])
    record: Record = {"steps": len(seconds), "tokens_per_s": data.batch_size * data.seq_len / step_s}
    if size.hardware:
        flops = model_flops(model, seq_len=data.seq_len, num_predicted=None) * data.batch_size
        record["mfu"] = flops / step_s / size.hardware.bf16_flops_per_s
    if size.is_gpu:
        record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        del network, optimizer, run
        torch.cuda.empty_cache()  # the next run is in a process of its own
    return record
