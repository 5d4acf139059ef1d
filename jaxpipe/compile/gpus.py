"""GPUs that need not be there: to compile for, and to read bytes and overlap off the compiled program.

Needs the CUDA plugin of jax's own version, ptxas and libdevice, on any machine: the extra gpu-aot. Nothing can be
run. cuDNN's attention cannot be compiled.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from jaxpipe.cluster.hardware import target_config
from jaxpipe.cluster.topology import Topology
from jaxpipe.errors import ConfigError
from jaxpipe.mesh.xla_flags import DETERMINISTIC_GPU_FLAGS, GPU_FLAGS, add_flags

# There is no GPU to time matrix products on: cuBLAS's own choice stands for what tuning would find.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": "false"}


def absent_gpus(topology: Topology, *, deterministic: bool = False) -> tuple[Any, ...]:
    """The GPUs of `topology`, for a mesh to compile for, node by node; before any other use of jax.

    Args:
        topology: what and how many they are.
        deterministic: as `mesh.deterministic`; a run with it is compiled by other flags.
    """
    add_flags(_UNTUNED | GPU_FLAGS | (DETERMINISTIC_GPU_FLAGS if deterministic else {}))
    jax.config.update("jax_platforms", "cpu")
    described = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{topology.num_nodes}x{topology.gpus_per_node}",
        target_config=target_config(topology.hardware),
    )
    return tuple(described.devices)


PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
COMPILERS = ("nvidia.cu13", "nvidia.cuda_nvcc")  # folders of the wheels with ptxas
CUDA = "/usr/local/cuda"  # where XLA looks besides


def check_plugin() -> None:
    """Raises ConfigError where the packages that compile for CUDA are missing."""
    has_compiler = any(map(_is_installed, COMPILERS)) or shutil.which("ptxas") or os.path.isdir(CUDA)
    missing = [
        what
        for what, is_there in (("CUDA plugin", any(map(_is_installed, PLUGINS))), ("ptxas", has_compiler))
        if not is_there
    ]
    if missing:
        raise ConfigError(
            f"no {' and no '.join(missing)} to compile for absent GPUs with: run pip install -e '.[gpu-aot]'"
        )


def check_compilable(config: ConfigDict, topology: Topology) -> None:
    """Raises ConfigError for a checked config that is not for this topology, or that no absent GPU can compile.

    Args:
        config: checked.
        topology: whose GPUs are not there.
    """
    mesh = config.mesh
    num_needed = mesh.data * mesh.pipe * mesh.tensor
    if num_needed != topology.num_gpus:
        raise ConfigError(
            f"a mesh of {num_needed} devices for a topology of {topology.num_gpus} GPUs\n"
            "  rule compile-devices: data x pipe x tensor is nodes x GPUs of a node\n"
            f"      {mesh.data} x {mesh.pipe} x {mesh.tensor} = {num_needed}, not"
            f" {topology.num_nodes} x {topology.gpus_per_node} = {topology.num_gpus}\n"
            f"  repair: {_repair(mesh, topology)}"
        )
    if mesh.platform == "cpu":
        raise ConfigError(
            "mesh.platform='cpu' for a topology of GPUs\n"
            "  rule compile-platform: what is compiled here is what a run on GPUs compiles\n"
            "  repair: set mesh.platform='auto'"
        )
    if config.model.attention == "cudnn":
        raise ConfigError(
            "model.attention='cudnn' for GPUs that are not there\n"
            "  rule compile-attention: cuDNN chooses its kernels by asking a GPU\n"
            "  repair: set model.attention='chunked', which keeps as much for backward"
        )


def _repair(mesh: ConfigDict, topology: Topology) -> str:
    """A legal value for `mesh.data`, or else another number of nodes."""
    of_one_pipeline = mesh.pipe * mesh.tensor
    if topology.num_gpus % of_one_pipeline == 0:
        return f"set mesh.data={topology.num_gpus // of_one_pipeline}"
    num_nodes, remainder = divmod(mesh.data * of_one_pipeline, topology.gpus_per_node)
    if not remainder:
        return f"give --topology={topology.hardware.name}:{num_nodes}x{topology.gpus_per_node}"
    return f"set axes that multiply to {topology.num_gpus}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it stands in
        return False
