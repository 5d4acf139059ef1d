"""Measures one pipelined step against one unpipelined step of the same model, in one run.

    python -m jaxpipe.bench --config=configs/bench_cpu.py [--format=json] [--num_processes=P] [--num_repeats=3]

Times are of loss and gradients: the compiled pipeline on the config's mesh, and `jax.value_and_grad`
scanned over layers and microbatches on one device, by turns; medians. Bytes, compile time and copies are those of the
whole training step.

In one process the unpipelined step may use all cores, and XLA divides each of its operations among them. Where they are
small, as the tiles of experts are, that costs processor time of its own: then compare with one thread each, as below.

With --num_processes=P the mesh is P processes of one core and one thread each (mesh.pipe becomes P / mesh.data, other
axes 1), and the result says where their time goes; what is lost, as fractions of P x the pipelined step's wall time:

    work_ratio           processor time, pipelined / unpipelined step; `work_ratio_of_cores`: / that of an unpipelined
                         step while all processes run one at once, as they share memory and its bandwidth
    efficiency           the unpipelined step's time by P x the pipelined one's; `efficiency_of_cores`: by its time when
                         all processes run one at once, in their mean
    efficiency_by_clock  what the schedule allows, on the asynchronous clock at the layers' times in the same run
    lost_to_bubble       idle time of that clock
    lost_to_messages     the rounds without their actions: messages, sums and copies over devices
    lost_to_extra_work   processor time of the actions beyond that of the unpipelined step
    lost_to_waiting      all else: devices wait for others longer than on the clock
    unequal_cores        what processes lose that all run the unpipelined step at once and meet after each: equal work
                         takes unequal time where cores are not alike or not quiet, and no schedule gains that back
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from absl.flags import FlagValues
from jax.experimental import multihost_utils
from ml_collections import config_flags

from jaxpipe.cluster.axes import MeshSizes
from jaxpipe.command_line import main_of
from jaxpipe.config import check
from jaxpipe.config.base import RunConfig
from jaxpipe.config.command_line import config_of, define_config_file, define_method, run
from jaxpipe.distributed.gloo import tune_gloo
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import stage_costs
from jaxpipe.measure import pinned
from jaxpipe.measure.measurement import measure
from jaxpipe.measure.step_pair import make_step_pair, measure_memory
from jaxpipe.measure.timing import median, timed
from jaxpipe.schedules import Costs, Schedule, simulate
from jaxpipe.schedules.schedule import Kind
from jaxpipe.training.setup import devices_of


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines the flags of the benchmark."""
    define_config_file(values, arguments)
    define_method(values)
    flags.DEFINE_enum("format", "text", ["text", "json"], "How the numbers are printed.", values)
    flags.DEFINE_integer("num_repeats", 3, "Repeats of each measurement.", lower_bound=1, flag_values=values)
    pinned.define_flags(values)


def execute(values: FlagValues) -> None:
    """Runs one benchmark and prints its result."""
    config = config_of(values)
    if values.num_processes > 1:
        config = of_processes(config, values.num_processes)
    check(config, name=config_flags.get_config_filename(values["config"]))
    if pinned.is_launched(values):
        pinned.join(values)
        pinned.tell(_measure_joined(config, num_repeats=values.num_repeats))
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


def of_processes(config: RunConfig, num_processes: int) -> RunConfig:
    """`config` on a mesh of one device a process, as many of them along `data` as it says.

    Raises:
        ConfigError: `mesh.data` does not divide the processes.
    """
    data = config.mesh.data
    if num_processes % data:
        raise ConfigError(
            f"mesh.data={data} with --num_processes={num_processes}",
            rule="process-device: each of several processes has one device, and each copy of the pipeline as many",
            repair=f"set --config.mesh.data=1, or --num_processes={data}",
        )
    # Other axes would need more devices.
    axes = MeshSizes(data=data, pipe=num_processes // data).axes
    return config.replaced({f"mesh.{axis}": size for axis, size in axes.items()})


def _measure(config: RunConfig, *, num_repeats: int) -> dict[str, Any]:
    """Measures in this process alone, with the mesh on virtual devices or GPUs."""
    pair = make_step_pair(config, devices_of(config).devices)
    memory = measure_memory(pair)
    pipelined = pair.compile_pipelined()
    unpipelined = pair.compile_unpipelined()
    # The first call of a program also loads it and touches its memory.
    for warm_up in (pipelined, unpipelined):
        timed(warm_up)
    num_steps = pair.steps_in_a_row
    # By turns, so that a machine that slows down slows both.
    pairs = [(timed(pipelined, num_steps=num_steps), timed(unpipelined)) for _ in range(num_repeats)]
    pipeline, single = (median(list(timings)) for timings in zip(*pairs, strict=True))
    return {
        "pipelined_cpu_s": pipeline.cpu_s,
        "unpipelined_cpu_s": single.cpu_s,
        "work_ratio": pipeline.cpu_s / single.cpu_s,
        "pipelined_wall_s": pipeline.wall_s,
        "unpipelined_wall_s": single.wall_s,
        **memory,
    }


def _measure_joined(config: RunConfig, *, num_repeats: int) -> dict[str, Any]:
    """Measures over all joined processes, a device each; {} on all but process 0."""
    pair = make_step_pair(config, tuple(jax.devices()))
    memory = measure_memory(pair)
    pipelined = pair.compile_pipelined()
    idle = pair.compile_without_actions()
    unpipelined = pair.compile_unpipelined()
    # Compiled, loaded, and the connections of the processes made.
    jax.block_until_ready((pipelined(), idle(), unpipelined()))
    # After the first exchange, which makes the connections that it changes.
    tune_gloo()
    is_first = jax.process_index() == 0
    steps = []
    rounds = []
    alone = []
    crowded = []
    for _ in range(num_repeats):
        for call, num_steps, timings in ((pipelined, pair.steps_in_a_row, steps), (idle, 1, rounds)):
            # Together, so that no process waits for another's compilation inside the measured time.
            multihost_utils.sync_global_devices("together")
            timings.append(timed(call, num_steps=num_steps))
        multihost_utils.sync_global_devices("alone")
        # The others wait at the next barrier, so this one has the memory to itself.
        if is_first:
            alone.append(timed(unpipelined))
        multihost_utils.sync_global_devices("crowded")
        crowded.append(timed(unpipelined))
    size = config.microbatch_size
    times = measure(config, jax.local_devices(), microbatch_sizes=[size], num_layers=1, num_repeats=num_repeats).times[
        size
    ]
    step, idle_step, copies = map(median, (steps, rounds, crowded))
    mine = [step.cpu_s, idle_step.cpu_s, copies.cpu_s, copies.wall_s, *(timing.wall_s for timing in crowded)]
    # float32: without 64-bit JAX gathers no float64, and six digits of a time are enough.
    of_all = np.asarray(multihost_utils.process_allgather(np.array(mine, np.float32)), np.float64)
    step_cpu_s, idle_cpu_s, copies_cpu_s, copies_wall_s = of_all[:, :4].sum(axis=0).tolist()
    if not is_first:
        return {}
    single = median(alone)
    num_processes = jax.process_count()
    schedule = pair.schedule
    costs = stage_costs(times, pair.pipeline.layers_per_stage, vocab_over_pipe=schedule.has_head_actions)
    return {
        "pipelined_cpu_s": step_cpu_s,
        "unpipelined_cpu_s": single.cpu_s,
        "work_ratio": step_cpu_s / single.cpu_s,
        "work_ratio_of_cores": step_cpu_s / (copies_cpu_s / num_processes),
        "pipelined_wall_s": step.wall_s,
        "unpipelined_wall_s": single.wall_s,
        **memory,
        "efficiency": single.wall_s / (num_processes * step.wall_s),
        # By the mean of the copies' times, since cores that are crowded are slower for the pipeline as well.
        "efficiency_of_cores": single.wall_s * num_processes / copies_wall_s,
        **time_lost(
            num_processes * step.wall_s,
            work_s=copies_wall_s / num_processes,
            by_clock=clock_efficiency(schedule, costs),
            messages_s=num_processes * idle_step.wall_s,
            extra_work_s=step_cpu_s - idle_cpu_s - copies_cpu_s / num_processes,
        ),
        "unequal_cores": unequal_cores(of_all[:, 4:]),
    }


def clock_efficiency(schedule: Schedule, costs: Costs) -> float:
    """Time of all forwards, whole backwards, S and T by devices x makespan, on the asynchronous clock without messages.

    Without flush it is that of one batch, by the time from one batch to the next.
    """
    of_kind = costs.of_kind(schedule.num_stages)
    # A whole backward, also where a schedule splits it.
    work = float(of_kind[[Kind.F, Kind.B]].sum())
    if schedule.has_head_actions:
        work += schedule.num_devices * (costs.head_statistics + costs.head_gradients)
    return schedule.batch_size * work / (schedule.num_devices * simulate(schedule, costs).period)


def unequal_cores(wall_s: np.ndarray) -> float:
    """The fraction of their time that processes of equal work wait for the slowest; from seconds [process, repeat].

    Example:
        >>> round(unequal_cores(np.array([[1.0, 1.2], [1.0, 1.0]])), 3)
        0.045
    """
    # Per repeat, since the slowest process differs from one to the next.
    return 1 - float(wall_s.mean() / wall_s.max(axis=0).mean())


def time_lost(
    whole_s: float, *, work_s: float, by_clock: float, messages_s: float, extra_work_s: float
) -> dict[str, float]:
    """Where the time of a step goes that is not work: `efficiency_by_clock`, and fractions of `whole_s`.

    Args:
        whole_s: seconds of the step on all devices together.
        work_s: seconds of its work, when all devices compute.
        messages_s: seconds of its rounds without actions, on all devices together.
        extra_work_s: seconds of work that the unpipelined step does not have.

    Example:
        >>> lost = time_lost(10.0, work_s=8.0, by_clock=0.9, messages_s=0.5, extra_work_s=0.3)
        >>> {name: round(fraction, 3) for name, fraction in lost.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'efficiency_by_clock': 0.9, 'lost_to_bubble': 0.089, 'lost_to_messages': 0.05, 'lost_to_extra_work': 0.03,
         'lost_to_waiting': 0.031}
    """
    bubble_s = work_s / by_clock - work_s
    return {
        "efficiency_by_clock": by_clock,
        "lost_to_bubble": bubble_s / whole_s,
        "lost_to_messages": messages_s / whole_s,
        "lost_to_extra_work": extra_work_s / whole_s,
        # The rest, so that all fractions and the clock's efficiency add up to the time.
        "lost_to_waiting": (whole_s - work_s - bubble_s - messages_s - extra_work_s) / whole_s,
    }


main = main_of(run, execute, define_flags=define_flags, usage=__doc__, required={"config": "configs/bench_cpu.py"})

if __name__ == "__main__":
    sys.exit(main())
