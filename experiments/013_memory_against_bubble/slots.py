"""What a slot holds where backwards are whole and where they are in two parts: an Ma is not the same bytes in both.

python experiments/013_memory_against_bubble/slots.py    # half a minute; shapes alone, nothing is compiled
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpipe.compile import training_step
from jaxpipe.config import base_config, check
from jaxpipe.mesh import choose_devices

NUM_DEVICES, NUM_MICROBATCHES, MICROBATCH_SIZE, SEQ_LEN, HIDDEN = 8, 32, 2, 128, 128
SCHEDULES = ("1f1b", "bpipe", "zb_h1", "zb_v", "v_half", "v_min")
CASES = [("gpt", "none"), ("gpt", "full"), ("llama", "none"), ("llama", "full")]
NUM_LAYERS = 32


def pools(family: str, recompute: str, schedule: str, devices: Sequence[Any]) -> list[tuple[float, float]]:
    """Of each pool: numbers of a page for a token, in hidden widths, and pages for one layer of a device."""
    config = base_config(family)
    config.model.update(num_layers=NUM_LAYERS, hidden=HIDDEN, num_heads=4, recompute=recompute, attention="chunked")
    config.data.update(batch_size=MICROBATCH_SIZE * NUM_MICROBATCHES, seq_len=SEQ_LEN)
    config.pipeline.update(schedule=schedule, num_microbatches=NUM_MICROBATCHES)
    config.mesh.update(pipe=NUM_DEVICES, platform="cpu")
    check(config)
    of = training_step(config, devices)
    width = MICROBATCH_SIZE * SEQ_LEN * HIDDEN * 4  # bytes of float32
    found = of.pipeline.shapes(of.state.params, of.batch).storage.pools
    return [(pool.page_bytes / width, pool.num_pages * NUM_DEVICES / NUM_LAYERS) for pool in found]


def main() -> None:
    """Prints the table."""
    devices = choose_devices(NUM_DEVICES, platform="cpu").devices
    print(
        "| model, recompute | schedule | from F to B or W | from I to W | together |\n| --- | --- | --- | --- | --- |"
    )
    for family, recompute in CASES:
        for schedule in SCHEDULES:
            found = pools(family, recompute, schedule, devices)
            cells = [f"{size:.1f} h x {number:g}" for size, number in found] + ["-"] * (2 - len(found))
            together = sum(size * number for size, number in found)
            print(f"| {family}, {recompute} | {schedule} | {' | '.join(cells)} | {together:.1f} h |", flush=True)


if __name__ == "__main__":
    main()
