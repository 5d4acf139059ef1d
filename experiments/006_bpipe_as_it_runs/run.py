"""BPipe as it runs: what do meetings of paired devices cost, and what does the compiled program save?

python experiments/006_bpipe_as_it_runs/run.py             # needs the extra gpu-aot; about five minutes on 2 cores
python experiments/006_bpipe_as_it_runs/run.py --quick     # without D=16: half a minute
python experiments/006_bpipe_as_it_runs/run.py --write     # draws memory.png, too
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path

import jax

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import absent_gpus, compile_step, report
from jaxpipe.config import check
from jaxpipe.lowering import RoundTable, lower, replay
from jaxpipe.lowering.lower import Folding, compute_schedule
from jaxpipe.lowering.rounds import periodic_rounds
from jaxpipe.schedules import Costs, Schedule, build, simulate

CONFIG = Path(__file__).parents[2] / "configs" / "gpt3_6b7.py"
LAYERS_PER_STAGE = 8
PICTURE = Path(__file__).parent / "memory.png"
SHOW = (
    *("bpipe", "--num_devices=8", "--num_microbatches=16", "--transfer=0.005"),
    *("--format=memory", "--compare=1f1b", "--slot_bytes=2.15e9", f"--output={PICTURE}"),
)


def clock(nums_devices: tuple[int, ...]) -> None:
    """Prints SPMD / asynchronous makespan, 1F1B's on the asynchronous clock being 1."""
    head = ["D", "N", "backward / forward", "as laid out for", "a tenth less", "a tenth more"]
    head += ["messages of 0.1 forward", "1F1B's four rounds", "slots"]
    print(f"| {' | '.join(head)} |")
    print(f"|{'---|' * 9}")
    for num_devices, backward in product(nums_devices, (1.0, 2.0, 3.0)):
        num_microbatches = 4 * num_devices
        schedule = build("bpipe", num_devices=num_devices, num_microbatches=num_microbatches)
        layers, costs = (LAYERS_PER_STAGE,) * num_devices, Costs(backward=backward)
        table = lower(schedule, layers_per_stage=layers, costs=costs)
        less, more = Costs(backward=backward / 1.1), Costs(backward=backward * 1.1)
        messages = Costs(backward=backward, transfer=0.1, slot_messages=0.0)
        pairs = [(table, costs), (table, less), (table, more), (table, messages), (in_four(schedule), costs)]
        ratios = [f"{ratio(*pair):.3f}" for pair in pairs]
        print(f"| {num_devices} | {num_microbatches} | {backward:g} | {' | '.join(ratios)} | {table.num_slots:g} |")


def in_four(schedule: Schedule) -> RoundTable:
    """The same transfers in the four rounds of a body that suit 1F1B alone."""
    steps = compute_schedule(schedule)
    rounds = periodic_rounds(steps, 4)
    assert rounds is not None
    return Folding(schedule, (LAYERS_PER_STAGE,) * steps.num_stages).fold(rounds, num_positions=4)


def ratio(table: RoundTable, costs: Costs) -> float:
    """Of the table's makespan to that of the same actions on devices that need not keep step."""
    return replay(table, costs).makespan / simulate(table.schedule, costs).makespan


def compiled(nums_devices: tuple[int, ...]) -> None:
    """Prints bytes and overlap of the training step on one and two nodes of A100s."""
    print("| D | schedule | slots | total GiB | predicted GiB | fewer slots than 1F1B | evict, load overlapped |")
    print("|---|---|---|---|---|---|---|")
    for num_devices in nums_devices:
        topology = parse_topology(f"a100-80g:{num_devices // 8}x8")
        devices, plain_bytes = absent_gpus(topology), 0
        for name in ("1f1b", "bpipe"):
            config = runpy.run_path(str(CONFIG))["get_config"]()
            config.model.update(num_layers=LAYERS_PER_STAGE * num_devices, attention="xla", recompute="attention")
            config.mesh.update(data=1, pipe=num_devices, tensor=1)
            config.pipeline.update(schedule=name, num_microbatches=2 * num_devices)
            config.data.batch_size = 2 * num_devices
            check(config)
            step = compile_step(config, devices, gpus_per_node=topology.gpus_per_node)
            found = report(step, hardware_bytes=topology.hardware.memory_bytes)
            plain_bytes = plain_bytes or found.total_bytes
            print(
                f"| {num_devices} | {name} | {found.num_slots:g} | {found.total_bytes / 2**30:.2f} |"
                f" {found.prediction.total_bytes / 2**30:.2f} |"
                f" {(plain_bytes - found.total_bytes) / found.slot_bytes:.3f} |"
                f" {found.overlapped_evict_load_permutes} of {found.evict_load_permutes} |",
                flush=True,
            )


def main() -> None:
    """Prints both tables, and draws where asked."""
    parser = argparse.ArgumentParser(description="BPipe as it runs, as Markdown and PNG.", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="without D=16")
    parser.add_argument("--write", action="store_true", help="draw memory.png")
    flags = parser.parse_args()
    print(f"jax {jax.__version__}\n")
    clock((4, 8) if flags.quick else (4, 8, 16))
    print()
    compiled((8,) if flags.quick else (8, 16))
    if flags.write:
        subprocess.run([sys.executable, "-m", "jaxpipe.show", *SHOW], check=True)


if __name__ == "__main__":
    main()
