"""`jaxpipe.measure --mock`: its flags, checks and text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

import jax
from absl import flags
from absl.flags import FlagValues
from ml_collections import config_flags

from jaxpipe.cluster.axes import PRODUCT, describe_mesh
from jaxpipe.command_line import check_unused
from jaxpipe.config import build_schedule, check
from jaxpipe.config.base import RunConfig
from jaxpipe.config.command_line import config_of
from jaxpipe.errors import ConfigError
from jaxpipe.measure.mocked_step import MockedStep, compile_mocked, measure_mocked
from jaxpipe.mesh.local import make_collectives_local
from jaxpipe.mesh.mocked import mocked_devices
from jaxpipe.units import gib

FLAGS = ("stage", "collectives")
LOCAL = "local"
SKIPPED = "skipped"
_OF_PARTS = ("microbatch_sizes", "num_layers", "num_processes", "process_id", "coordinator_address")
# A larger mesh would only have more copies of the pipeline, of which a single one is timed.
_MOST_DEVICES = 512


def define_flags(values: FlagValues) -> None:
    """Defines --mock, --stage and --collectives."""
    flags.DEFINE_string(
        "mock", None, "Nodes and GPUs of a node of a cluster, as 8x8: times the whole step on one of its GPUs.", values
    )
    flags.DEFINE_integer("stage", None, "Index along pipe of the GPU that --mock times.", flag_values=values)
    flags.DEFINE_enum(
        "collectives",
        LOCAL,
        [LOCAL, SKIPPED],
        "What becomes of collectives: operations of this GPU alone, of the same shapes; or nothing, so that numbers are"
        " what memory held, and an update whose numbers are not finite is left out.",
        values,
    )


def execute(values: FlagValues) -> dict[str, Any]:
    """Times the step, prints what came out, and returns it for a file."""
    check_unused(values, _OF_PARTS, "--mock times the config's whole step")
    config = config_of(values)
    check(config, name=config_flags.get_config_filename(values["config"]))
    num_nodes, gpus_per_node = cluster_of(values.mock, config)
    check_stage(values.stage, config)
    if values.collectives == LOCAL:
        # Before anything is traced: it changes how collectives are traced from now on.
        make_collectives_local()
    mesh = config.mesh
    devices = mocked_devices(num_nodes, gpus_per_node, platform=mesh.platform, deterministic=mesh.deterministic)
    _check_skipped(values.collectives, devices)
    step = compile_mocked(config, devices, gpus_per_node=gpus_per_node, stage=values.stage)
    mocked, measurement = measure_mocked(
        step, config, gpus_per_node=gpus_per_node, stage=values.stage, num_repeats=values.num_repeats
    )
    print(to_text(mocked, config, device_kind=devices[0].device_kind, num_repeats=values.num_repeats))
    # A file of costs with one key more, which `plan --costs` does not read.
    return {**measurement.to_json(), "mock": asdict(mocked)}


def cluster_of(written: str, config: RunConfig) -> tuple[int, int]:
    """Nodes, and GPUs of a node, as `--mock` names them; ConfigError unless the mesh has as many devices."""
    # At most four digits each, as the rule says: more would be a typo.
    numbers = re.fullmatch(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})", written)
    axes = RunConfig.of(config).mesh.axes
    num_needed = prod(axes.values())
    if not numbers:
        raise ConfigError(
            f"--mock={written} is not a number of nodes and of GPUs in each",
            rule="mocked-cluster: NODESxGPUS, both numbers from 1 to 9999",
            repair=f"write for example --mock=1x{num_needed}",
        )
    num_nodes = int(numbers[1])
    gpus_per_node = int(numbers[2])
    if num_nodes * gpus_per_node != num_needed:
        # The nearest cluster to propose: the same GPUs a node, if they divide the mesh.
        nodes = num_needed // gpus_per_node if num_needed % gpus_per_node == 0 else 1
        raise ConfigError(
            f"--mock={written} for a mesh of {num_needed} devices",
            rule=f"mocked-mesh: {PRODUCT} is nodes x GPUs of a node",
            picture=f"{' x '.join(map(str, axes.values()))} = {num_needed}, not {num_nodes} x {gpus_per_node} ="
            f" {num_nodes * gpus_per_node}",
            repair=f"write --mock={nodes}x{num_needed // nodes}, or set another mesh",
        )
    if num_needed > _MOST_DEVICES:
        raise ConfigError(
            f"--mock={written} has {num_needed} GPUs",
            rule=f"mocked-cluster: at most {_MOST_DEVICES} GPUs",
            repair="set a smaller mesh.data: of its copies of the pipeline one is timed",
        )
    return num_nodes, gpus_per_node


def check_stage(stage: int | None, config: RunConfig) -> None:
    """Raises ConfigError unless `stage` is a device of `mesh.pipe`, and the schedule can be timed."""
    if stage is None or not 0 <= stage < config.mesh.pipe:
        raise ConfigError(
            "--mock without --stage" if stage is None else f"--stage={stage} with mesh.pipe={config.mesh.pipe}",
            rule="mocked-stage: --stage is the index along pipe of the device that is timed",
            picture=f"0 .. {config.mesh.pipe - 1}",
            repair=f"write for example --stage={config.mesh.pipe - 1}, the last one",
        )
    if build_schedule(config).delays:
        raise ConfigError(
            f"--mock with pipeline.schedule={config.pipeline.schedule!r}",
            rule="mocked-schedule: a step begins and ends with an empty pipeline; without flush it does not",
            repair="set a schedule with flush, as pipeline.schedule='1f1b'",
        )


def _check_skipped(collectives: str, devices: Sequence[Any]) -> None:
    if collectives == SKIPPED and devices[0].platform != "gpu":
        raise ConfigError(
            f"--collectives={SKIPPED} on a CPU",
            rule="mocked-collectives: XLA skips them on a GPU alone; on a CPU each would wait for the others",
            repair=f"give --collectives={LOCAL}, or leave it out",
        )


_WHAT_BECAME = {
    LOCAL: "collectives were operations of this device alone, of the same shapes",
    SKIPPED: "collectives were skipped: their results were whatever memory held",
}


def to_text(mocked: MockedStep, config: RunConfig, *, device_kind: str, num_repeats: int) -> str:
    """The measurement as lines to print."""
    busy = f"{mocked.busy_forwards:.4g} forwards of a stage by the schedule's clock"
    if mocked.busy_s is None:
        busy += f"; not in seconds: no times of {device_kind} are known"
    else:
        busy += f", {mocked.busy_s:.4g} s with the update at {mocked.source}: the step took"
        busy += f" {mocked.step_s / mocked.busy_s:.3f} times as long"
    peak = f"not counted on {device_kind}" if mocked.peak_bytes is None else f"{gib(mocked.peak_bytes, '.3f')}"
    lines = [
        f"device       {device_kind}, for {mocked.num_devices} of which one is here; jax {jax.__version__}",
        f"step         {config.pipeline.schedule}, {describe_mesh(config.mesh.axes)}, device {mocked.stage} of pipe",
        f"collectives  {_WHAT_BECAME[mocked.collectives]}",
        f"seconds      {mocked.step_s:.4g}, quartiles {100 * mocked.spread_ratio:.1f} % apart, {num_repeats} steps",
        f"busy         {busy}",
        f"GiB          peak {peak}; compiled {gib(mocked.compiled_bytes, '.3f')}; accounted"
        f" {gib(mocked.accounted_bytes, '.3f')}",
    ]
    if mocked.num_skipped:
        lines.append(f"left out     the update of {mocked.num_skipped} steps, since a number was not finite")
    return "\n".join(lines)
