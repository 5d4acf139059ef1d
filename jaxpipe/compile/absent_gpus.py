"""GPUs that need not be there: to compile for, and to read bytes and overlap off the compiled program.

Needs the CUDA plugin of jax's own version, ptxas and libdevice, on any machine: the extra gpu-aot. Nothing can be
run. cuDNN's attention cannot be compiled.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import topologies

from jaxpipe.mesh.flags import DETERMINISTIC_GPU_FLAGS, GPU_FLAGS, add_flags
from jaxpipe.mesh.hardware import target_config
from jaxpipe.mesh.topology import Topology

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
