"""Memory, peaks and links of GPUs, which decide whether a model fits and how long transfers take.

Every number is for a single GPU. Peaks are NVIDIA's; what a program reaches of them is estimated elsewhere.

Sources: memory, its bandwidth and the fields of the targets are from XLA's own targets (openxla/xla,
xla/backends/gpu/target_config/specs/: a100_sxm_80, h100_sxm, h200), which XLA took from the driver. The one
exception is the H200's memory, nominally 141 GiB there: the driver reports 143,156 MiB, as PyTorch prints it.
Peaks, without sparsity, and NVLink are from NVIDIA's data sheets; NVLink's total counts both directions, so half of
it stands here. Networks are those of DGX A100 and DGX H100: one adapter a GPU, 200 and 400 Gb/s. The A800 is an A100
with 400 instead of 600 GB/s of NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpipe.units import GIB, MIB

# An allowance for what XLA does not count: the CUDA context and its kernels (0.5 to 1 GiB), NCCL's channel buffers for
# the communicators of three mesh axes (about 1 GiB), and fragmentation (1 GiB of 80). Not measured.
RESERVE_BYTES = 3 * GIB


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU, in nodes of the same kind.

    Attributes:
        name: name in a topology, as "a100-80g".
        description: the driver's name.
        memory_bytes: all memory, including what driver and libraries take.
        memory_bytes_per_s: bandwidth of reads and writes together.
        bf16_flops_per_s: peak of dense matmuls in bfloat16.
        tf32_flops_per_s: peak of dense matmuls in float32, rounded to TF32 as XLA does by default.
        nvlink_bytes_per_s: bandwidth to other GPUs of the node, one way.
        network_bytes_per_s: bandwidth to other nodes, one way.
        compute_capability: major and minor number.
        num_cores: number of streaming multiprocessors.
        fpus_per_core: number of float32 units of a multiprocessor.
        shared_memory_per_core_bytes: shared memory of a multiprocessor; a block gets 1 KiB less.
        l2_cache_bytes: L2 cache, shared by all multiprocessors.
        clock_rate_ghz: highest clock rate.
    """

    name: str
    description: str
    memory_bytes: int
    memory_bytes_per_s: int
    bf16_flops_per_s: float
    tf32_flops_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    compute_capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    shared_memory_per_core_bytes: int
    l2_cache_bytes: int
    clock_rate_ghz: float


_A100 = Hardware(
    name="a100-80g",
    description="NVIDIA A100-SXM4-80GB",
    memory_bytes=85_100_068_864,
    memory_bytes_per_s=2_039_040_000_000,
    bf16_flops_per_s=312e12,
    tf32_flops_per_s=156e12,
    nvlink_bytes_per_s=300e9,
    network_bytes_per_s=25e9,
    compute_capability=(8, 0),
    num_cores=108,
    fpus_per_core=64,
    shared_memory_per_core_bytes=167_936,
    l2_cache_bytes=41_943_040,
    clock_rate_ghz=1.41,
)
_H100 = Hardware(
    name="h100-80g",
    description="NVIDIA H100 80GB HBM3",
    memory_bytes=84_942_979_072,
    memory_bytes_per_s=3_352_320_000_000,
    bf16_flops_per_s=989.5e12,
    tf32_flops_per_s=494.7e12,
    nvlink_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
    compute_capability=(9, 0),
    num_cores=132,
    fpus_per_core=128,
    shared_memory_per_core_bytes=233_472,
    l2_cache_bytes=52_428_800,
    clock_rate_ghz=1.98,
)

HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _A100,
        replace(_A100, name="a800-80g", description="NVIDIA A800-SXM4-80GB", nvlink_bytes_per_s=200e9),
        _H100,
        replace(
            _H100,
            name="h200",
            description="NVIDIA H200",
            memory_bytes=143_156 * MIB,
            memory_bytes_per_s=4_800_000_000_000,
        ),
    )
}

# Driver names of GPUs with another one's peak: by its data sheet, all forms of the A100 have the same.
_OTHER_FORMS = dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), _A100)


def peak_flops_per_s(description: str, *, dtype: str) -> float | None:
    """The peak of dense matmuls on one GPU; None if it is not known, as on a CPU.

    Args:
        description: the driver's name, which is JAX's `device_kind`.
        dtype: "float32" or "bfloat16".

    Example:
        >>> peak_flops_per_s("NVIDIA H200", dtype="bfloat16") / 1e12
        989.5
    """
    hardware = {each.description: each for each in HARDWARE.values()} | _OTHER_FORMS
    found = hardware.get(description)
    if found is None:
        return None
    return {"bfloat16": found.bf16_flops_per_s, "float32": found.tf32_flops_per_s}.get(dtype)


def target_config(hardware: Hardware) -> str:
    """A text proto `GpuTargetConfigProto`, from which XLA compiles for `hardware` without a GPU.

    Hopper has the accelerated features (9.0a), as its driver reports.

    Example:
        >>> "core_count: 132" in target_config(HARDWARE["h200"])
        True
    """
    major, minor = hardware.compute_capability
    features = " feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {hardware.shared_memory_per_core_bytes}
  shared_memory_per_block_optin: {hardware.shared_memory_per_core_bytes - 1024}
  threads_per_core_limit: 2048
  core_count: {hardware.num_cores}
  fpus_per_core: {hardware.fpus_per_core}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {hardware.memory_bytes_per_s}
  l2_cache_size: {hardware.l2_cache_bytes}
  clock_rate_ghz: {hardware.clock_rate_ghz}
  device_memory_size: {hardware.memory_bytes}
  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{hardware.description}"
"""
