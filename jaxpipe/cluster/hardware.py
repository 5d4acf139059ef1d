"""Memory, peaks and links of GPUs, which decide whether a model fits and how long transfers take.

Every number is for a single GPU. Peaks are NVIDIA's; what a program reaches of them is estimated elsewhere.

Sources, where nothing is said beside a number:

* Memory, its bandwidth and the fields of the targets are from XLA's own targets (openxla/xla,
  xla/backends/gpu/target_config/specs/: a100_sxm_80, h100_sxm, h200, b200, gb200, v100), which XLA took from the
  driver. The one exception is the H200's memory, nominally 141 GiB there: the driver reports 143,156 MiB, as PyTorch
  prints it.
* Peaks, without sparsity, and NVLink are from NVIDIA's data sheets; NVLink's total counts both directions, so half of
  it stands here. PCIe takes its place where there is none.
* Networks have one adapter a GPU: 200 Gb/s as in DGX A100, 400 Gb/s as in DGX H100, DGX B200 and GB200 NVL72. The
  V100's is that of DGX-1, four of 100 Gb/s for eight GPUs. Those of L40S and RTX 4090 are assumed: 100 Gb/s a GPU.
* Hosts: PCIe x16 one way, of PCI-SIG's 3.0 (V100), 4.0 (A100, and GPUs without NVLink) and 5.0 (H100, B200), as in the
  data sheets; of GB200 half of NVLink-C2C's 900 GB/s, over the superchip's two GPUs. GPUs that share a switch's uplink
  get less.
* A800, H800: an A100 and an H100 with 400 instead of 600 and 900 GB/s of NVLink.

A node is what NVLink connects: eight GPUs mostly, and the 72 of a whole rack of GB200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpipe.units import GIB, MIB

# An allowance for what XLA does not count: the CUDA context and its kernels (0.5 to 1 GiB), NCCL's channel buffers for
# the communicators of three mesh axes (about 1 GiB), and fragmentation (1 GiB of 80). Not measured.
RESERVE_BYTES = 3 * GIB
# The fraction of its bandwidth that copies between a GPU and pinned memory of its host reach. Assumed, not measured.
HOST_FRACTION = 0.8


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU, in nodes of the same kind."""

    name: str  # name in a topology, as "a100-80g"
    description: str  # the driver's name
    memory_bytes: int  # all memory, including what driver and libraries take
    memory_bytes_per_s: int  # bandwidth of reads and writes together
    bf16_flops_per_s: float  # peak of dense matmuls in bfloat16; 0 if the GPU has no bfloat16
    # Peak of dense matmuls in float32, rounded to TF32 as XLA does by default; if the GPU has no TF32, not rounded and
    # without tensor cores.
    tf32_flops_per_s: float
    nvlink_bytes_per_s: float  # bandwidth to other GPUs of the node, one way; without NVLink that of PCIe
    network_bytes_per_s: float  # bandwidth to other nodes, one way
    host_bytes_per_s: float  # bandwidth to the host's memory, one way
    compute_capability: tuple[int, int]
    num_cores: int  # number of streaming multiprocessors
    fpus_per_core: int  # number of float32 units of a multiprocessor
    shared_memory_per_core_bytes: int
    l2_cache_bytes: int  # L2 cache, shared by all multiprocessors
    clock_rate_ghz: float  # highest clock rate
    threads_per_core: int = 2048  # most threads of a multiprocessor

    @property
    def host_copy_bytes_per_s(self) -> float:
        """Bytes that a GPU copies to pinned memory of its host, or back."""
        return HOST_FRACTION * self.host_bytes_per_s

    @property
    def shared_memory_per_block_bytes(self) -> int:
        """Shared memory of a block of threads, if it asks for all."""
        # From compute capability 8.0 on the driver keeps 1 KiB of each block for itself.
        return self.shared_memory_per_core_bytes - (1024 if self.compute_capability >= (8, 0) else 0)


_A100 = Hardware(
    name="a100-80g",
    description="NVIDIA A100-SXM4-80GB",
    memory_bytes=85_100_068_864,
    memory_bytes_per_s=2_039_040_000_000,
    bf16_flops_per_s=312e12,
    tf32_flops_per_s=156e12,
    nvlink_bytes_per_s=300e9,
    network_bytes_per_s=25e9,
    host_bytes_per_s=31.5e9,
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
    host_bytes_per_s=63e9,
    compute_capability=(9, 0),
    num_cores=132,
    fpus_per_core=128,
    shared_memory_per_core_bytes=233_472,
    l2_cache_bytes=52_428_800,
    clock_rate_ghz=1.98,
)
_B200 = Hardware(
    name="b200",
    description="NVIDIA B200",
    memory_bytes=191_514_411_008,
    memory_bytes_per_s=7_672_320_000_000,
    bf16_flops_per_s=2250e12,
    tf32_flops_per_s=1125e12,
    nvlink_bytes_per_s=900e9,
    network_bytes_per_s=50e9,
    host_bytes_per_s=63e9,
    compute_capability=(10, 0),
    num_cores=148,
    fpus_per_core=128,
    shared_memory_per_core_bytes=233_472,
    l2_cache_bytes=132_644_864,
    clock_rate_ghz=1.965,
)
# Memory, clocks and caches of both Ada GPUs are those that CUDA's deviceQuery prints (README of the crate
# cuda-device-query; of an RTX 4090 with a driver of CUDA 13); shared memory and threads are from CUDA's table of
# compute capabilities.
_L40S = Hardware(
    name="l40s",
    description="NVIDIA L40S",
    memory_bytes=47_576_711_168,
    memory_bytes_per_s=864_096_000_000,
    bf16_flops_per_s=362.05e12,
    tf32_flops_per_s=183e12,
    nvlink_bytes_per_s=32e9,  # PCIe 4.0 x16
    network_bytes_per_s=12.5e9,
    host_bytes_per_s=31.5e9,
    compute_capability=(8, 9),
    num_cores=142,
    fpus_per_core=128,
    shared_memory_per_core_bytes=102_400,
    l2_cache_bytes=100_663_296,
    clock_rate_ghz=2.52,
    threads_per_core=1536,
)
_V100 = Hardware(
    name="v100",
    description="Tesla V100-SXM2-16GB",
    memory_bytes=16_935_682_048,
    memory_bytes_per_s=898_048_000_000,
    bf16_flops_per_s=0.0,
    tf32_flops_per_s=15.7e12,
    nvlink_bytes_per_s=150e9,
    network_bytes_per_s=6.25e9,
    host_bytes_per_s=15.75e9,
    compute_capability=(7, 0),
    num_cores=80,
    fpus_per_core=64,
    shared_memory_per_core_bytes=98_304,
    l2_cache_bytes=6_291_456,
    clock_rate_ghz=1.53,
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
        replace(_H100, name="h800", description="NVIDIA H800", nvlink_bytes_per_s=200e9),
        # Multiprocessors and memory as PyTorch prints them. NVIDIA has published no data sheet: peaks, bandwidths and
        # L2 cache are as resellers and the press print NVIDIA's; the clock rate is assumed to be the H100's.
        replace(
            _H100,
            name="h20",
            description="NVIDIA H20",
            memory_bytes=97_285 * MIB,
            memory_bytes_per_s=4_000_000_000_000,
            bf16_flops_per_s=148e12,
            tf32_flops_per_s=74e12,
            num_cores=78,
            l2_cache_bytes=60 * MIB,
        ),
        _B200,
        replace(
            _B200,
            name="gb200",
            description="NVIDIA GB200",
            memory_bytes=197_897_748_480,
            memory_bytes_per_s=7_928_064_000_000,
            host_bytes_per_s=225e9,
            bf16_flops_per_s=2500e12,
            tf32_flops_per_s=1250e12,
            num_cores=152,
            l2_cache_bytes=135_528_448,
            clock_rate_ghz=2.062,
        ),
        _L40S,
        # Peaks, which sum in float32, are from NVIDIA's Ada GPU architecture white paper.
        replace(
            _L40S,
            name="rtx4090",
            description="NVIDIA GeForce RTX 4090",
            memory_bytes=25_250_627_584,
            memory_bytes_per_s=1_008_096_000_000,
            bf16_flops_per_s=165.2e12,
            tf32_flops_per_s=82.6e12,
            num_cores=128,
            l2_cache_bytes=75_497_472,
        ),
        _V100,
    )
}

# Driver names of GPUs with another one's peak: by its data sheet, all forms of the A100 have the same, and so have the
# V100s on SXM2.
_OTHER_FORMS: dict[str, Hardware] = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), _A100),
    "Tesla V100-SXM2-32GB": _V100,
}


def known_hardware(description: str) -> Hardware | None:
    """The kind of GPU that a driver calls `description`, as JAX's `device_kind`; None if it is not known, as a CPU."""
    return next((hardware for hardware in HARDWARE.values() if hardware.description == description), None)


def with_such_cores(description: str) -> Hardware | None:
    """A kind of GPU with the same cores, whose memory and links may differ; None if it is not known, as a CPU."""
    return known_hardware(description) or _OTHER_FORMS.get(description)


def peak_flops_per_s(description: str, *, dtype: str) -> float | None:
    """The peak of dense matmuls on one GPU; None if it is not known, as on a CPU, or if the GPU lacks the dtype.

    Args:
        description: the driver's name, which is JAX's `device_kind`.
        dtype: "float32" or "bfloat16".

    Example:
        >>> peak_flops_per_s("NVIDIA H200", dtype="bfloat16") / 1e12
        989.5
    """
    hardware = with_such_cores(description)
    if hardware is None:
        return None
    # 0 stands for units that are not there, and no peak.
    return {"bfloat16": hardware.bf16_flops_per_s, "float32": hardware.tf32_flops_per_s}.get(dtype) or None


def target_config(hardware: Hardware) -> str:
    """A text proto `GpuTargetConfigProto`, from which XLA compiles for `hardware` without a GPU.

    Hopper and Blackwell have the accelerated features (9.0a, 10.0a), as in XLA's own targets.

    Example:
        >>> "core_count: 132" in target_config(HARDWARE["h200"])
        True
    """
    major, minor = hardware.compute_capability
    # The newest instructions of tensor cores, wgmma and tcgen05, need the accelerated features.
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {hardware.shared_memory_per_core_bytes}
  shared_memory_per_block_optin: {hardware.shared_memory_per_block_bytes}
  threads_per_core_limit: {hardware.threads_per_core}
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
