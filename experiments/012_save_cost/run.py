"""What an asynchronous checkpoint every 20 steps costs: blocks with and without one, in turn, in one process.

    python experiments/012_save_cost/run.py [--num_pairs=15]

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxpipe.checkpoints import Checkpoints, Keep
from jaxpipe.config import check
from jaxpipe.training.batches import put_batch
from jaxpipe.training.setup import optimizer_and_step, set_up
from jaxpipe.training.step import init_state

ROOT = Path(__file__).parents[2]
STEPS_OF_BLOCK = 20
HEADS = ("with a checkpoint, s", "without, s", "of medians", "median of pairs", "quartiles of pairs")


def measure(num_pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds on the clock, and of the processor, "pair 2": a block with a checkpoint, and one without."""
    sys.path.insert(0, str(ROOT / "configs"))
    import quickstart

    config = quickstart.get_config()
    check(config)
    setup = set_up(config)
    optimizer, step = optimizer_and_step(setup.spec, setup.task.model, setup.pipeline)
    state = init_state(setup.task.model, setup.pipeline, optimizer, seed=0)
    batches = setup.task.train_batches.following(0)
    num_done, clock_s, processor_s = 0, np.zeros((num_pairs, 2)), np.zeros((num_pairs, 2))
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), pipeline=setup.pipeline, keep=Keep(last=3)) as checkpoints,
    ):

        def block(state, *, saves: bool):
            nonlocal num_done
            for _ in range(STEPS_OF_BLOCK):
                state, numbers = step(state, lambda: put_batch(setup.pipeline, next(batches)))
                jax.device_get(numbers)
                num_done += 1
            if saves:
                checkpoints.save(num_done, state, config=config.to_dict())
            return state

        state = block(state, saves=True)  # compiles
        checkpoints.wait()
        # The checkpoint is written while the next block runs: so each block is timed from its save to the next save.
        for pair in range(num_pairs):
            for column in (0, 1) if pair % 2 else (1, 0):
                jax.block_until_ready(state)
                begun_s, used_s = time.perf_counter(), time.process_time()
                if column == 0:
                    checkpoints.save(num_done, state, config=config.to_dict())
                state = block(state, saves=False)
                checkpoints.wait()
                clock_s[pair, column] = time.perf_counter() - begun_s
                processor_s[pair, column] = time.process_time() - used_s
    batches.close()
    return clock_s, processor_s


def main() -> None:
    """Prints medians and the spread of the pairs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_pairs", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one pair, which shows no more than that it runs")
    flags = parser.parse_args()
    print(f"| of {STEPS_OF_BLOCK} steps | {' | '.join(HEADS)} |\n|{'---|' * (len(HEADS) + 1)}")
    seconds_of = measure(1 if flags.quick else flags.num_pairs)
    for name, seconds in zip(("on the clock", "of the processor"), seconds_of, strict=True):
        with_s, without_s = np.median(seconds, axis=0)
        low, median, high = np.quantile(seconds[:, 0] / seconds[:, 1] - 1, (0.25, 0.5, 0.75))
        print(
            f"| {name} | {with_s:.3f} | {without_s:.3f} | {100 * (with_s / without_s - 1):+.1f} % |"
            f" {100 * median:+.1f} % | {100 * low:+.1f} to {100 * high:+.1f} % |"
        )


if __name__ == "__main__":
    main()
