"""Measures one pipelined step against one unpipelined step of the same model, in one run.

    python -m jaxpipe.bench --config=configs/bench_cpu.py [--format=json] [--num_processes=P] [--num_repeats=3]

Times are of loss and gradients: the compiled pipeline on the config's mesh, and `jax.value_and_grad`
scanned over layers and microbatches on one device, by turns; medians. What a step frees is kept for the
next. Bytes, compile time and copies are those of the whole training step. With --num_processes=P the
pipeline is P processes of one core and one thread (mesh.pipe becomes P), `efficiency` is unpipelined wall
time / (P x pipelined wall time), and `efficiency_of_cores` what P unpipelined copies at once reach: the
machine's own ceiling.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from absl.flags import FlagValues
from ml_collections import ConfigDict, config_flags

from jaxpipe.config import check
from jaxpipe.config.command_line import config_of, define_config_file, define_method, run
from jaxpipe.measure import pinned
from jaxpipe.measure.step_pair import make_step_pair, measure_memory
from jaxpipe.measure.timing import keep_freed_memory, median, timed
from jaxpipe.training.setup import devices_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run(
        execute,
        define_flags=define_flags,
        usage=__doc__,
        arguments=arguments,
        required={"config": "configs/bench_cpu.py"},
    )


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines the flags of the benchmark."""
    define_config_file(values, arguments)
    define_method(values)
    flags.DEFINE_enum("format", "text", ["text", "json"], "How the numbers are printed.", values)
    flags.DEFINE_integer("num_repeats", 3, "Repeats of each measurement.", lower_bound=1, flag_values=values)
    pinned.define_flags(values)


def execute(values: FlagValues) -> None:
    """Runs one benchmark and prints its result."""
    keep_freed_memory()
    config = config_of(values)
    if values.num_processes > 1:
        config.mesh.data, config.mesh.pipe, config.mesh.tensor = 1, values.num_processes, 1
    check(config, name=config_flags.get_config_filename(values["config"]))
    if pinned.is_launched(values):
        pinned.join(values)
        pinned.tell(pinned.bench_step(config, num_repeats=values.num_repeats))
        return
    numbers = {
        "schedule": config.pipeline.schedule,
        "num_devices": config.mesh.pipe,
        "num_microbatches": config.pipeline.num_microbatches,
    }
    if values.num_processes > 1:
        numbers |= pinned.launch(("-m", "jaxpipe.bench"), sys.argv[1:], num_processes=values.num_processes)
    else:
        numbers |= _measure(config, num_repeats=values.num_repeats)
    if values.format == "json":
        print(json.dumps(numbers))
        return
    for name, number in numbers.items():
        print(f"{name:26} {number:.4g}" if isinstance(number, float) else f"{name:26} {number}")


def _measure(config: ConfigDict, *, num_repeats: int) -> dict[str, Any]:
    """Measures in this process alone, with the mesh on virtual devices or GPUs."""
    pair = make_step_pair(config, devices_of(config).devices)
    memory = measure_memory(pair)
    pipelined, unpipelined = pair.compile_pipelined(), pair.compile_unpipelined()
    for warm_up in (pipelined, unpipelined):
        timed(warm_up)
    pairs = [(timed(pipelined), timed(unpipelined)) for _ in range(num_repeats)]
    pipeline, one = (median(list(timings)) for timings in zip(*pairs, strict=True))
    return {
        "pipelined_cpu_s": pipeline.cpu_s,
        "unpipelined_cpu_s": one.cpu_s,
        "work_ratio": pipeline.cpu_s / one.cpu_s,
        "pipelined_wall_s": pipeline.wall_s,
        "unpipelined_wall_s": one.wall_s,
        **memory,
    }


if __name__ == "__main__":
    sys.exit(main())
