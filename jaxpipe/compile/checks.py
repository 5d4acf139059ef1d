"""What can be wrong with a compilation for absent GPUs, found before anything is compiled."""

from __future__ import annotations

import importlib.util
import os
import shutil

from ml_collections import ConfigDict

from jaxpipe.errors import ConfigError
from jaxpipe.mesh.topology import Topology

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
