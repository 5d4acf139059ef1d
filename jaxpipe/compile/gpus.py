"""Devices that stand for absent GPUs: XLA compiles for them on any machine, and nothing can be run.

Needs the CUDA plugin of jax's own version, ptxas and libdevice: the extra gpu-aot. cuDNN's attention cannot be
compiled. The checks find missing packages and unsupported settings before anything is compiled.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from jaxpipe.cluster.axes import PRODUCT, REST_AXIS
from jaxpipe.cluster.hardware import target_config
from jaxpipe.cluster.topology import Topology
from jaxpipe.config.base import RunConfig
from jaxpipe.errors import ConfigError
from jaxpipe.mesh.xla_flags import DETERMINISTIC_GPU_FLAGS, GPU_FLAGS, add_flags

_UNTUNED = {"xla_gpu_autotune_level": 0}  # matmuls cannot be timed: cuBLAS's own choice of algorithm replaces tuning


def absent_gpus(topology: Topology, *, deterministic: bool = False) -> tuple[Any, ...]:
    """The GPUs of `topology`, node by node, for a mesh to compile for; call it before any other use of JAX."""
    # The flags of a run, so that the compiled program is that of the run; tuning alone is left out.
    add_flags(_UNTUNED | GPU_FLAGS | (DETERMINISTIC_GPU_FLAGS if deterministic else {}))
    # JAX itself runs on CPUs here; asked for GPUs it would fail without any.
    jax.config.update("jax_platforms", "cpu")
    described = topologies.get_topology_desc(
        platform="cuda",
        # Slices, processes of a slice, GPUs of a process.
        topology=f"1x{topology.num_nodes}x{topology.gpus_per_node}",
        target_config=target_config(topology.hardware),
    )
    return tuple(described.devices)


PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
COMPILERS = ("nvidia.cu13", "nvidia.cuda_nvcc")  # folders of the wheels with ptxas
CUDA = "/usr/local/cuda"  # another place where XLA looks
# The oldest GPUs for which CUDA 13, of the extra gpu-aot, compiles; for a V100 XLA says that its ptxas is too old.
# Source: NVIDIA, CUDA Toolkit 13.0 Release Notes, which drop Maxwell, Pascal and Volta.
OLDEST_CAPABILITY = (7, 5)


# ---- Checks ----


def check_plugin() -> None:
    """Raises ConfigError if the packages that compile for CUDA are missing."""
    # Any of the places where XLA looks for ptxas.
    has_compiler = any(map(_is_installed, COMPILERS)) or shutil.which("ptxas") or os.path.isdir(CUDA)
    missing = [
        what
        for what, is_there in (("CUDA plugin", any(map(_is_installed, PLUGINS))), ("ptxas", has_compiler))
        if not is_there
    ]
    if missing:
        raise ConfigError(
            f"no {' and no '.join(missing)} to compile for absent GPUs",
            rule="compile-plugin: compiling for absent GPUs needs the CUDA plugin of JAX and ptxas",
            repair="run pip install -e '.[gpu-aot]'",
        )


def check_compilable(config: RunConfig, topology: Topology) -> None:
    """Raises ConfigError if the config does not match the topology, or cannot be compiled for absent GPUs."""
    hardware = topology.hardware
    if hardware.compute_capability < OLDEST_CAPABILITY:
        raise ConfigError(
            f"topology={topology}: XLA cannot compile for {hardware.description}",
            rule="compile-hardware: the compiler of the extra gpu-aot, of CUDA 13, knows the compute capability",
            picture="{}.{} < {}.{}".format(*hardware.compute_capability, *OLDEST_CAPABILITY),
            repair="give --topology with another GPU; python -m jaxpipe.plan needs no compiler",
        )
    config = RunConfig.of(config)
    mesh = config.mesh
    axes = mesh.axes
    num_needed = math.prod(axes.values())
    if num_needed != topology.num_gpus:
        raise ConfigError(
            f"a mesh of {num_needed} devices for a topology of {topology.num_gpus} GPUs",
            rule=f"compile-devices: {PRODUCT} is nodes x GPUs of a node",
            picture=f"{' x '.join(map(str, axes.values()))} = {num_needed}, not"
            f" {topology.num_nodes} x {topology.gpus_per_node} = {topology.num_gpus}",
            repair=_repair(axes, topology),
        )
    if mesh.platform == "cpu":
        raise ConfigError(
            "mesh.platform='cpu' for a topology of GPUs",
            rule="compile-platform: the program compiled here is that of a run on GPUs",
            repair="set mesh.platform='auto'",
        )
    if getattr(config.model, "attention", "") == "cudnn":
        raise ConfigError(
            "model.attention='cudnn' for absent GPUs",
            rule="compile-attention: cuDNN chooses its kernels by asking a GPU",
            repair="set model.attention='chunked', which stores as much for backward",
        )


def _repair(axes: Mapping[str, int], topology: Topology) -> str:
    """A legal value for `REST_AXIS`, or else another number of nodes."""
    num_devices = math.prod(axes.values())
    num_others = num_devices // axes[REST_AXIS]
    # Copies of the pipeline are the easiest to change: no layer and no schedule depends on them.
    if topology.num_gpus % num_others == 0:
        return f"set mesh.{REST_AXIS}={topology.num_gpus // num_others}"
    num_nodes, remainder = divmod(num_devices, topology.gpus_per_node)
    if not remainder:
        return f"give --topology={topology.hardware.name}:{num_nodes}x{topology.gpus_per_node}"
    return f"set axes that multiply to {topology.num_gpus}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # an error of the package that contains it
        return False
