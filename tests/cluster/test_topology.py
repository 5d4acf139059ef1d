"""Clusters as users write them; the table of GPUs agrees with what it can be derived from."""

import pytest

from jaxpipe.cluster.assignment import assign
from jaxpipe.cluster.hardware import HARDWARE, target_config
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.errors import ConfigError


def test_a_topology_goes_round():
    topology = parse_topology("a800-80g:4x8")
    assert topology.hardware is HARDWARE["a800-80g"]
    assert (topology.num_nodes, topology.gpus_per_node, topology.num_gpus) == (4, 8, 32)
    assert str(topology) == "a800-80g:4x8"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("a100:4x8", r"'a100' is not known. Did you mean 'a100-80g'\?"),
        ("v10:4x8", r"'v10' is not known. Did you mean 'v100'\?"),
        ("b20:4x8", r"'b20' is not known. Did you mean 'b200'\?"),
        ("", "rule topology-hardware: one of a100-80g, a800-80g, h100-80g, h200"),
        ("h200", "rule topology-form"),
        ("h200:8", "repair: write for example h200:4x8"),
        ("h200:0x8", "rule topology-form"),
        ("h200:4x8x2", "rule topology-form"),
        ("h200:4 x 8", "rule topology-form"),
    ],
)
def test_mistakes(written, message):
    with pytest.raises(ConfigError, match=message):
        parse_topology(written)


def test_a_mesh_larger_than_the_cluster():
    topology = parse_topology("h200:2x8")
    topology.check_holds(data=2, pipe=4, tensor=2)
    with pytest.raises(ConfigError, match=r"2 x 4 x 1 x 1 x 4 = 32 > 2 x 8 = 16(?s:.*)topology=h200:4x8"):
        topology.check_holds(data=2, pipe=4, tensor=4)


def test_a_rack_of_72_is_one_node():
    topology = parse_topology("gb200:1x72")
    assert (topology.num_nodes, topology.gpus_per_node, topology.num_gpus) == (1, 72, 72)
    for order in ("contiguous", "pair_adjacent"):
        nodes = assign(order, data=1, pipe=8, tensor=9, gpus_per_node=topology.gpus_per_node).nodes
        assert nodes.size == 72
        assert not nodes.any()  # all in node 0


def test_a_v100_has_no_bfloat16():
    topology = parse_topology("v100:2x8")
    topology.check_computes("float32")
    with pytest.raises(
        ConfigError,
        match=r"model.dtype='bfloat16'(?s:.*)rule topology-dtype(?s:.*)7\.0; (?s:.*)model.dtype='float32'(?s:.*):2x8",
    ):
        topology.check_computes("bfloat16")


def test_all_others_have_both_dtypes():
    for name in HARDWARE.keys() - {"v100"}:
        for dtype in ("float32", "bfloat16"):
            parse_topology(f"{name}:1x1").check_computes(dtype)


# Of NVIDIA's architecture white papers: bf16 operations of a core in a cycle, GHz of matrix products, NVLinks.
@pytest.mark.parametrize(
    ("name", "flops_per_cycle", "clock_rate_ghz", "num_links"),
    [
        ("a100-80g", 2048, 1.41, 12),
        ("a800-80g", 2048, 1.41, 8),
        ("h100-80g", 4096, 1.83, 18),
        ("h200", 4096, 1.83, 18),
        ("h800", 4096, 1.83, 8),
    ],
)
def test_peaks_are_cores_times_rates(name, flops_per_cycle, clock_rate_ghz, num_links):
    hardware = HARDWARE[name]
    peak = hardware.num_cores * flops_per_cycle * clock_rate_ghz * 1e9
    assert hardware.bf16_flops_per_s == pytest.approx(peak, rel=0.001)
    assert hardware.nvlink_bytes_per_s == num_links * 25e9


@pytest.mark.parametrize(("name", "nominal_gib"), [("a100-80g", 80), ("a800-80g", 80), ("h100-80g", 80), ("h200", 141)])
def test_a_driver_gives_a_little_less_than_the_name_says(name, nominal_gib):
    assert 0.98 < HARDWARE[name].memory_bytes / (nominal_gib * 2**30) < 1


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=list(HARDWARE))
def test_a_target_has_the_numbers_of_the_table(hardware):
    lines = [line.strip() for line in target_config(hardware).splitlines()]
    assert f"device_memory_size: {hardware.memory_bytes}" in lines
    assert f"memory_bandwidth: {hardware.memory_bytes_per_s}" in lines
    assert f'device_description_str: "{hardware.description}"' in lines
    assert f"threads_per_core_limit: {hardware.threads_per_core}" in lines
    assert ("ACCELERATED_FEATURES" in target_config(hardware)) == (hardware.compute_capability >= (9, 0))


# Of XLA's own targets, and of CUDA's table of compute capabilities for 8.9.
@pytest.mark.parametrize(
    ("name", "capability", "shared_memory", "threads", "num_fpus"),
    [
        ("v100", "major: 7 minor: 0 }", 98304, 2048, 64),
        ("a100-80g", "major: 8 minor: 0 }", 166912, 2048, 64),
        ("l40s", "major: 8 minor: 9 }", 101376, 1536, 128),
        ("rtx4090", "major: 8 minor: 9 }", 101376, 1536, 128),
        ("h20", "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }", 232448, 2048, 128),
        ("b200", "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES }", 232448, 2048, 128),
        ("gb200", "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES }", 232448, 2048, 128),
    ],
)
def test_a_target_is_of_its_generation(name, capability, shared_memory, threads, num_fpus):
    lines = [line.strip() for line in target_config(HARDWARE[name]).splitlines()]
    assert f"cuda_compute_capability {{ {capability}" in lines
    assert f"shared_memory_per_block_optin: {shared_memory}" in lines
    assert f"threads_per_core_limit: {threads}" in lines
    assert f"fpus_per_core: {num_fpus}" in lines
