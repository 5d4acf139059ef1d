"""Compiles a config's training step for a cluster without any GPU; prints bytes per device and overlap.

    python -m jaxpipe.compile --config=configs/gpt3_96b.py --topology=a100-80g:4x8 [--format=json] [--config.X=Y ...]

The topology is HARDWARE:NODESxGPUS_PER_NODE. Nothing is run: XLA cannot tune its matmuls without a GPU, so they are
cuBLAS's own, and cuDNN's attention cannot be compiled. Needs the extra gpu-aot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import jax
from absl import flags
from absl.flags import FlagValues
from ml_collections import config_flags

from jaxpipe.cluster.axes import describe_mesh
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.command_line import main_of
from jaxpipe.compile.gpus import absent_gpus, check_compilable, check_plugin
from jaxpipe.compile.report import report, to_text
from jaxpipe.compile.step import compile_step
from jaxpipe.config import check
from jaxpipe.config.command_line import config_of, define_config_file, define_method, run


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --config, --topology and --format."""
    define_config_file(values, arguments)
    define_method(values)
    flags.DEFINE_string("topology", None, "Hardware, nodes and GPUs of a node, as a100-80g:4x8.", values)
    flags.DEFINE_enum("format", "text", ["text", "json"], "How the numbers are printed; json has bytes.", values)


def execute(values: FlagValues) -> None:
    """Compiles the step and prints its report."""
    config = config_of(values)
    topology = parse_topology(values.topology)
    # All checks come before JAX starts its backends, which takes a while and fixes XLA's flags.
    check(config, name=config_flags.get_config_filename(values["config"]))
    check_compilable(config, topology)
    # After the config's own checks, whose errors help on any machine.
    check_plugin()
    mesh = config.mesh
    devices = absent_gpus(topology, deterministic=mesh.deterministic)
    step = compile_step(config, devices, gpus_per_node=topology.gpus_per_node)
    compiled = report(step, hardware_bytes=topology.hardware.memory_bytes)
    if values.format == "json":
        print(json.dumps(compiled.to_json()))
        return
    schedule = config.pipeline.schedule
    num_microbatches = config.pipeline.num_microbatches
    print(
        f"step         {schedule}, {describe_mesh(mesh.axes)}, {num_microbatches}"
        f" microbatches of {config.microbatch_size} sequences\n"
        f"devices      {topology}: {len(devices)} x {devices[0].device_kind}, none of them needed; jax"
        f" {jax.__version__}\n"
        f"costs        {step.spec.config.pipeline.costs}: {step.spec.costs_source}\n"
        f"{to_text(compiled)}"
    )


main = main_of(
    run,
    execute,
    define_flags=define_flags,
    usage=__doc__,
    required={"config": "configs/gpt3_96b.py", "topology": "a100-80g:4x8"},
)

if __name__ == "__main__":
    sys.exit(main())
