"""What do gathers and sums behind layers cost where nothing hides them? Loss and gradients of a GPT on two CPU cores.

python experiments/031_data_parallel/on_cpu.py    # minutes; a line for each of the two meshes
python experiments/031_data_parallel/on_cpu.py --quick    # a tiny model
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

import jax
import numpy as np
from absl import app, flags
from absl.flags import FLAGS

from experiments.pages import markdown
from jaxpipe.measure import Timing, median, pinned, time_by_turns
from jaxpipe.mesh import choose_devices, make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build

NUM_LAYERS, NUM_MICROBATCHES, MICROBATCH_SIZE = 4, 4, 4
DATA = 2
PIPES = {"virtual devices of one process": 2, "two processes, gloo": 1}


def steps(pipe: int, hidden: int, seq_len: int, devices: tuple[Any, ...]) -> list[Callable[[], Any]]:
    """Compiled steps () -> (loss, gradients): what travels over `data` behind layers, and in rounds."""
    model = LanguageModel(
        GPTConfig(num_layers=NUM_LAYERS, hidden=hidden, num_heads=8, vocab_size=256, num_positions=seq_len)
    )
    mesh, schedule = (
        make_mesh(data=DATA, pipe=pipe, devices=devices),
        build("1f1b", num_devices=pipe, num_microbatches=NUM_MICROBATCHES),
    )
    tokens = np.random.default_rng(0).integers(256, size=(NUM_MICROBATCHES, DATA * MICROBATCH_SIZE, seq_len), dtype="i")
    return [
        _step(
            Pipeline(schedule, mesh, StageFunctions.of(model), num_layers=NUM_LAYERS, behind_layers=behind),
            model,
            tokens,
        )
        for behind in (True, False)
    ]


def _step(pipeline: Pipeline, model: LanguageModel, tokens: np.ndarray) -> Callable[[], Any]:
    def init() -> Any:
        return pipeline.to_stages(model.init(jax.random.key(0)))

    # Shapes first: shardings must be known before the arrays are made on all devices.
    params = jax.jit(init, out_shardings=pipeline.shardings(jax.eval_shape(init)))()
    placed = jax.make_array_from_callback(tokens.shape, pipeline.batch_sharding, lambda index: tokens[index])
    arguments = params, {"tokens": placed, "targets": placed}
    return partial(pipeline.loss_and_grads.lower(*arguments).compile(), *arguments)


def measure(pipe: int, devices: tuple[Any, ...]) -> dict[str, Any]:
    """Medians of steps that take turns, and the ratios of both."""
    sizes = (64, 32) if FLAGS.quick else (256, 256)
    timings = time_by_turns(steps(pipe, *sizes, devices), num_repeats=FLAGS.num_repeats)
    hidden, plain = (median(of_step) for of_step in timings)
    pairs: list[tuple[Timing, Timing]] = list(zip(*timings, strict=True))
    return {
        "behind layers, s": hidden.wall_s,
        "in rounds, s": plain.wall_s,
        "ratio": hidden.wall_s / plain.wall_s,
        "of pairs": [first.wall_s / second.wall_s for first, second in pairs],
        "of processor time": hidden.cpu_s / plain.cpu_s,
    }


def cells(where: str, pipe: int, found: dict[str, Any]) -> list[str]:
    """One line."""
    of_pairs = f"{min(found['of pairs']):.3f} to {max(found['of pairs']):.3f}"
    numbers = [f"{found[name]:.3f}" for name in ("behind layers, s", "in rounds, s", "ratio", "of processor time")]
    return [f"data {DATA} x pipe {pipe}, {where}", *numbers[:3], of_pairs, numbers[3]]


def main(_: list[str]) -> None:
    """Prints the table; a launched process measures and tells."""
    (one, two) = PIPES
    if pinned.is_launched(FLAGS):
        pinned.join(FLAGS)
        pinned.tell(measure(PIPES[two], tuple(jax.devices())))
        return
    # First: this process starts no threads before it.
    joined = pinned.launch((__file__,), sys.argv[1:], num_processes=2)
    alone = measure(PIPES[one], choose_devices(DATA * PIPES[one], platform="cpu").devices)
    heads = ["mesh", "behind layers, s", "in rounds, s", "ratio of medians", "ratios of pairs", "of processor time"]
    print(markdown(heads, [cells(one, PIPES[one], alone), cells(two, PIPES[two], joined)]))


if __name__ == "__main__":
    flags.DEFINE_boolean("quick", False, "A tiny model.")
    flags.DEFINE_integer("num_repeats", 5, "Pairs of steps.")
    pinned.define_flags(FLAGS)
    app.run(main)
