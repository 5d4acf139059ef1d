"""GPUs that need not be there: to compile for, and to read bytes and overlap off the compiled program.

Needs the CUDA plugin of jax's own version, and ptxas, on any machine:

    pip install --no-deps jax-cuda13-plugin==JAX jax-cuda13-pjrt==JAX nvidia-cuda-nvcc

Nothing can be run. XLA cannot tune its matrix products without a GPU, so they are cuBLAS's; cuDNN attention
cannot be compiled.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import topologies

from jaxpipe.mesh.devices import GPU_FLAGS, add_flags

# Fields and numbers as in XLA's own targets: openxla/xla, xla/backends/gpu/target_config/specs/a100_sxm_80.txtpb.
A100_80G = """
gpu_device_info {
  cuda_compute_capability { major: 8 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 167936
  shared_memory_per_block_optin: 166912
  threads_per_core_limit: 2048
  core_count: 108
  fpus_per_core: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: 2039000000000
  l2_cache_size: 41943040
  clock_rate_ghz: 1.41
  device_memory_size: 85000000000
  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA A100-SXM4-80GB"
"""

_FLAGS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": "false"}


def absent_gpus(num_devices: int, *, target: str = A100_80G) -> tuple[Any, ...]:
    """`num_devices` GPUs of one host, for a mesh to compile for; before any other use of jax.

    Args:
        num_devices: of them.
        target: what kind they are, a text proto of XLA's `GpuTargetConfigProto`.
    """
    add_flags({**_FLAGS, **GPU_FLAGS})
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{num_devices}", target_config=target)
    return tuple(topology.devices)
