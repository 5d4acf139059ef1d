"""The pipeline over several processes of one core and one thread each, against one such process.

One device a process, messages through gloo on this machine. What holds of all such processes is in `pinned`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from jaxpipe.bench.memory import measure_memory
from jaxpipe.bench.problem import make_problem
from jaxpipe.bench.timing import median, timed


def work(config: ConfigDict, *, num_repeats: int) -> dict[str, Any]:
    """The numbers of this process, which has joined, measured together with the others; whole in the first alone."""
    num_processes, process = jax.process_count(), jax.process_index()
    problem = make_problem(config, tuple(jax.devices()))
    memory = measure_memory(problem)
    pipelined, unpipelined = problem.compile_pipelined(), problem.compile_unpipelined()

    def together(name: str) -> None:
        multihost_utils.sync_global_devices(name)

    jax.block_until_ready((pipelined(), unpipelined()))
    pipelines, alone, crowded = [], [], []
    for _ in range(num_repeats):
        together("pipelined")
        pipelines.append(timed(pipelined))
        together("alone")
        if process == 0:
            alone.append(timed(unpipelined))
        together("crowded")
        crowded.append(timed(unpipelined))
    pipeline = median(pipelines)
    pipelined_cpu_s = float(multihost_utils.process_allgather(np.float32(pipeline.cpu_s)).sum())
    if process:
        return {}
    one, many = median(alone), median(crowded)
    num_microbatches = config.pipeline.num_microbatches
    return {
        "pipelined_cpu_s": pipelined_cpu_s,
        "unpipelined_cpu_s": one.cpu_s,
        "work_ratio": pipelined_cpu_s / one.cpu_s,
        "pipelined_wall_s": pipeline.wall_s,
        "unpipelined_wall_s": one.wall_s,
        **memory,
        "efficiency": one.wall_s / (num_processes * pipeline.wall_s),
        "efficiency_without_bubble": num_microbatches / (num_microbatches + num_processes - 1),
        "efficiency_of_cores": one.wall_s / many.wall_s,
    }
