"""The pipeline over several processes of one core and one thread each, against one such process.

One device a process, messages through gloo on this machine. Process p runs on core p; the first prints the
numbers, which the parent reads.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from jaxpipe.bench.memory import measure_memory
from jaxpipe.bench.problem import make_problem
from jaxpipe.bench.timing import median, timed
from jaxpipe.errors import ConfigError

_MARK = "jaxpipe.bench.processes: "
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def launch(arguments: list[str], *, num_processes: int) -> dict[str, Any]:
    """Starts `python -m jaxpipe.bench` with `arguments` in each process; the numbers of the first.

    Raises:
        ConfigError: more processes than cores, or a process failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if not 2 <= num_processes <= len(cores):
        raise ConfigError(
            f"--num_processes={num_processes} on {len(cores)} cores\n"
            "  rule core-per-process: 2 or more processes, each with a core of its own\n"
            f"  repair: set --num_processes={max(2, len(cores))}, or leave it out for virtual devices in one process"
        )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": _ONE_THREAD, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxpipe.bench", *arguments, f"--process={p}", f"--coordinator={coordinator}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for p in range(num_processes)
    ]
    outputs = [process.communicate() for process in processes]
    for p, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode:
            raise ConfigError(f"process {p} of {num_processes} ended with code {process.returncode}:\n{errors[-4000:]}")
    line = next(line for line in outputs[0][0].splitlines() if line.startswith(_MARK))
    return json.loads(line.removeprefix(_MARK))


def work(config: ConfigDict, *, process: int, num_processes: int, coordinator: str, num_repeats: int) -> None:
    """One process: measures together with the others; the first prints."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[process]})
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, num_processes, process)
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
        return
    one, many = median(alone), median(crowded)
    num_microbatches = config.pipeline.num_microbatches
    numbers = {
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
    print(_MARK + json.dumps(numbers), flush=True)
