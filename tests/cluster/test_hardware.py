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
    ],
)
def test_peaks_by_the_drivers_name(description, bfloat16, tf32):
    assert peak_flops_per_s(description, dtype="bfloat16") == bfloat16 * 1e12
    assert peak_flops_per_s(description, dtype="float32") == tf32 * 1e12


@pytest.mark.parametrize("description", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", ""])
def test_another_device_has_no_known_peak(description):
    assert peak_flops_per_s(description, dtype="bfloat16") is None


def test_another_dtype_has_no_known_peak():
    assert peak_flops_per_s("NVIDIA H200", dtype="float8") is None


# Of NVIDIA's architecture white papers: TF32 operations of a core in a cycle, GHz of matrix products.
@pytest.mark.parametrize(
    ("name", "flops_per_cycle", "clock_rate_ghz"),
    [("a100-80g", 1024, 1.41), ("a800-80g", 1024, 1.41), ("h100-80g", 2048, 1.83), ("h200", 2048, 1.83)],
)
def test_peaks_of_tf32_are_cores_times_rates(name, flops_per_cycle, clock_rate_ghz):
    hardware = HARDWARE[name]
    peak = hardware.num_cores * flops_per_cycle * clock_rate_ghz * 1e9
    assert hardware.tf32_flops_per_s == pytest.approx(peak, rel=0.001)
