"""Compiles 1F1B steps for several D and N, runs none, and prints what each costs to compile and to hold.

python experiments/001_program_size/run.py             # half a minute
python experiments/001_program_size/run.py --quick     # each case once
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from jaxpipe.compile.hlo import num_instructions
from jaxpipe.mesh import choose_devices, make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build

CASES = [(8, 8), (8, 16), (8, 256), (4, 16), (48, 16)]  # (D, N)
MICROBATCH_SIZE, SEQ_LEN, HIDDEN = 2, 128, 128
NUM_REPEATS = 3


def compile_step(num_devices: int, num_microbatches: int):
    """Compiles one step; returns (seconds to trace, lower and compile, compiled)."""
    mesh = make_mesh(data=1, pipe=num_devices, tensor=1, devices=jax.devices("cpu")[:num_devices])
    model = LanguageModel(
        GPTConfig(num_layers=num_devices, hidden=HIDDEN, num_heads=2, vocab_size=256, num_positions=SEQ_LEN)
    )
    schedule = build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)
    functions = StageFunctions.of(model)
    start = time.perf_counter()
    pipeline = Pipeline(schedule, mesh, functions, num_layers=num_devices)
    params = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))
    tokens = jax.ShapeDtypeStruct((num_microbatches, MICROBATCH_SIZE, SEQ_LEN), jnp.int32)
    compiled = pipeline.loss_and_grads.lower(params, {"tokens": tokens, "targets": tokens}, 1.0).compile()
    return time.perf_counter() - start, compiled


def main() -> None:
    """Prints one row a case; the cases take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each case once")
    num_repeats = 1 if parser.parse_args().quick else NUM_REPEATS
    choose_devices(max(num_devices for num_devices, _ in CASES), platform="cpu")
    seconds = {case: [] for case in CASES}
    compiled = {}
    compile_step(*CASES[0])  # whatever is done once
    for _ in range(num_repeats):
        for case in CASES:
            jax.clear_caches()
            elapsed, compiled[case] = compile_step(*case)
            seconds[case].append(elapsed)
    print("| D | N | compile_s | instructions | temp_bytes | token id bytes |")
    print("|---|---|---|---|---|---|")
    for (num_devices, num_microbatches), step in compiled.items():
        row = (
            num_devices,
            num_microbatches,
            f"{statistics.median(seconds[num_devices, num_microbatches]):.2f}",
            num_instructions(step.as_text()),
            step.memory_analysis().temp_size_in_bytes,
            num_microbatches * MICROBATCH_SIZE * SEQ_LEN * 8,
        )
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
