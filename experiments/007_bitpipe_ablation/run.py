"""BitPipe's ablation on the asynchronous clock: what are the V and eager gradient exchange worth?

python experiments/007_bitpipe_ablation/run.py [LATENCY_MS ...]    # a second, no accelerator; so is --quick
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from experiments.bitpipe_table_5 import TABLE_5
from jaxpipe.cluster import HARDWARE
from jaxpipe.schedules import Costs, build, simulate

LAYERS, HIDDEN, SEQ_LEN, MICROBATCH_SIZE, NUM_CHUNKS = 64, 2560, 512, 4, 2
GPU = HARDWARE["a800-80g"]
MFU = 0.3153  # such that BitPipe reaches its published rate on 8 GPUs at a mini-batch of 32
VARIANTS = {
    "BitPipe": {},
    "without V": {"v_shape": False},
    "without eager sync": {"eager_sync": False},
    "without both": {"v_shape": False, "eager_sync": False},
}


def costs(num_devices: int, *, latency_s: float = 0.0) -> Costs:
    """Seconds of BERT-64's chunks and transfers on one node of A800.

    Args:
        num_devices: D; a chunk is 64 / 2D layers.
        latency_s: of every transfer, beside the time of its bytes.
    """
    num_layers = LAYERS // (NUM_CHUNKS * num_devices)
    num_tokens = MICROBATCH_SIZE * SEQ_LEN
    # A layer's forward, as in Narayanan et al., SC 2021, section 5.1; a backward is two forwards.
    flops = 24 * num_tokens * HIDDEN**2 + 4 * num_tokens * SEQ_LEN * HIDDEN
    forward_s = num_layers * flops / (MFU * GPU.bf16_flops_per_s)
    message_s = 2 * num_tokens * HIDDEN / GPU.nvlink_bytes_per_s + latency_s
    gradients_s = 2 * num_layers * 12 * HIDDEN**2 / GPU.nvlink_bytes_per_s + latency_s
    return Costs(
        forward=forward_s, backward=2 * forward_s, transfer=message_s, gradient_messages=gradients_s / message_s
    )


def samples_per_s(num_devices: int, batch_size: int, seconds: Costs) -> dict[str, float]:
    """Variant -> samples/s on the asynchronous clock."""
    num_microbatches = batch_size // MICROBATCH_SIZE
    rates = {}
    for name, options in VARIANTS.items():
        schedule = build("bitpipe", num_devices=num_devices, num_microbatches=num_microbatches, **options)
        rates[name] = batch_size / simulate(schedule, seconds).makespan
    return rates


def cells(rates: dict[str, float]) -> list[str]:
    """The rate of BitPipe, and how much less the others have."""
    full = rates["BitPipe"]
    return [f"{rate:.2f}" if name == "BitPipe" else f"{100 * (rate / full - 1):.3f} %" for name, rate in rates.items()]


def main() -> None:
    """Prints one row for every column of the paper's table; latencies as asked for, in milliseconds."""
    parser = argparse.ArgumentParser(description="BitPipe's ablation, as Markdown.")
    parser.add_argument("latencies_ms", nargs="*", type=float, help="of every transfer, beside the time of its bytes")
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    latencies_ms = parser.parse_args().latencies_ms or [0.0]
    published = [f"{name}, published" for name in next(iter(TABLE_5.values()))]
    head = ["GPUs", "mini-batch", "latency ms", *VARIANTS, *published]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for latency_ms in latencies_ms:
        for (num_devices, batch_size), rates in TABLE_5.items():
            found = samples_per_s(num_devices, batch_size, costs(num_devices, latency_s=latency_ms / 1e3))
            row = [str(num_devices), str(batch_size), f"{latency_ms:g}", *cells(found), *cells(rates)]
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
