"""How long schedules take to be built, simulated and lowered, and how large their round tables are.

Goes in: name, D and N. Comes out: a record, seconds of the processor in it.
"""

from __future__ import annotations

import time
from typing import Any

from jaxpipe.lowering import lower
from jaxpipe.schedules import build, simulate

WHOLE = ("1f1b", "bpipe", "bitpipe")
SPLIT = ("zb_h1", "v_half")  # their orders are searched, and their rounds fitted to costs
QUICK_ACTIONS = 20_000


def cases() -> list[tuple[str, int, int]]:
    """(name, D, N): first with D, then with N."""
    with_devices = [(name, d, 2 * d) for name in WHOLE for d in (8, 32, 128, 256)]
    with_devices += [(name, d, 2 * d) for name in SPLIT for d in (8, 16, 32)]
    with_microbatches = [(name, 8, n) for name in WHOLE for n in (64, 512, 4096)]
    with_microbatches += [(name, 8, n) for name in SPLIT for n in (64, 512)]
    return with_devices + with_microbatches


def measure(name: str, num_devices: int, num_microbatches: int) -> dict[str, Any]:
    """One case."""
    begun_s = time.process_time()
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    built_s = time.process_time()
    simulate(schedule)
    simulated_s = time.process_time()
    table = lower(schedule)
    lowered_s = time.process_time()
    return {
        "schedule": name,
        "D": num_devices,
        "N": num_microbatches,
        "actions": len(schedule.columns.kind),
        "types of rounds": table.num_types,
        "slots": table.num_slots,
        "rounds": table.num_rounds,
        "build_s": built_s - begun_s,
        "simulate_s": simulated_s - built_s,
        "lower_s": lowered_s - simulated_s,
    }
