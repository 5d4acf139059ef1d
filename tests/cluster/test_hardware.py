"""Which GPU a driver's name means, and what its matrix products reach at most."""

import pytest

from jaxpipe.cluster.hardware import HARDWARE, peak_flops_per_s


# TFLOP/s of NVIDIA's data sheets, without sparsity.
@pytest.mark.parametrize(
    ("description", "bfloat16", "tf32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 156),
        ("NVIDIA A100-SXM4-40GB", 312, 156),
        ("NVIDIA A100 80GB PCIe", 312, 156),
        ("NVIDIA A800-SXM4-80GB", 312, 156),
        ("NVIDIA H100 80GB HBM3", 989.5, 494.7),
        ("NVIDIA H200", 989.5, 494.7),
        ("NVIDIA H800", 989.5, 494.7),
        ("NVIDIA H20", 148, 74),
        ("NVIDIA B200", 2250, 1125),
        ("NVIDIA GB200", 2500, 1250),
        ("NVIDIA L40S", 362.05, 183),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
    ],
)
def test_peaks_by_the_drivers_name(description, bfloat16, tf32):
    assert peak_flops_per_s(description, dtype="bfloat16") == bfloat16 * 1e12
    assert peak_flops_per_s(description, dtype="float32") == tf32 * 1e12


@pytest.mark.parametrize("description", ["Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"])
def test_a_v100_has_float32_alone(description):
    peak = 80 * 128 * 1.53e9  # multiprocessors, operations of one in a cycle, clock
    assert peak_flops_per_s(description, dtype="float32") == pytest.approx(peak, abs=0.05e12)
    assert peak_flops_per_s(description, dtype="bfloat16") is None


# GB, GB/s of memory, GB/s of NVLink (or PCIe) both ways, multiprocessors, Gb/s of network a GPU; by data sheets.
@pytest.mark.parametrize(
    ("name", "memory_gb", "memory_gb_per_s", "link_gb_per_s", "num_cores", "network_gbit_per_s"),
    [
        ("h800", 80, 3350, 400, 132, 400),
        ("h20", 96, 4000, 900, 78, 400),
        ("b200", 192, 8000, 1800, 148, 400),  # the driver reports 7672 GB/s
        ("gb200", 192, 8000, 1800, 152, 400),
        ("l40s", 48, 864, 64, 142, 100),
        ("rtx4090", 24, 1008, 64, 128, 100),
        ("v100", 16, 900, 300, 80, 50),
    ],
)
def test_memory_and_links_of_data_sheets(
    name, memory_gb, memory_gb_per_s, link_gb_per_s, num_cores, network_gbit_per_s
):
    hardware = HARDWARE[name]
    assert 0.92 < hardware.memory_bytes / (memory_gb * 2**30) < 1  # ECC takes a sixteenth of GDDR6
    assert hardware.memory_bytes_per_s == pytest.approx(memory_gb_per_s * 1e9, rel=0.045)
    assert hardware.nvlink_bytes_per_s == link_gb_per_s * 1e9 / 2
    assert hardware.network_bytes_per_s == network_gbit_per_s * 1e9 / 8
    assert hardware.num_cores == num_cores


@pytest.mark.parametrize(
    "description",
    ["cpu", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H800 PCIe", "NVIDIA L40", "NVIDIA GeForce RTX 4090 D", ""],
)
def test_another_device_has_no_known_peak(description):
    assert peak_flops_per_s(description, dtype="bfloat16") is None


def test_another_dtype_has_no_known_peak():
    assert peak_flops_per_s("NVIDIA H200", dtype="float8") is None


# Of NVIDIA's architecture white papers: TF32 operations of a core in a cycle, GHz of matrix products.
@pytest.mark.parametrize(
    ("name", "flops_per_cycle", "clock_rate_ghz"),
    [
        ("a100-80g", 1024, 1.41),
        ("a800-80g", 1024, 1.41),
        ("h100-80g", 2048, 1.83),
        ("h200", 2048, 1.83),
        ("h800", 2048, 1.83),
        ("rtx4090", 256, 2.52),
    ],
)
def test_peaks_of_tf32_are_cores_times_rates(name, flops_per_cycle, clock_rate_ghz):
    hardware = HARDWARE[name]
    peak = hardware.num_cores * flops_per_cycle * clock_rate_ghz * 1e9
    assert hardware.tf32_flops_per_s == pytest.approx(peak, rel=0.001)
