"""Real devices follow the assignment, whatever nodes they say they are of."""

from types import SimpleNamespace

import jax
import pytest

from jaxpipe.config import base_config
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import resolve
from jaxpipe.mesh import make_mesh, order_devices
from jaxpipe.training.report import places_of

HALVES = [0, 1, 6, 7, 2, 3, 4, 5]  # 8 stages on two nodes of four: the outer two pairs first


def gpu(number: int, *, node: int, process: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(id=number, slice_index=node, process_index=number if process is None else process)


def stages_by_gpu(ordered):
    """The stage that GPU 0, 1, ... has."""
    return sorted(range(len(ordered)), key=lambda stage: ordered[stage].id)


def test_devices_of_a_mesh():
    devices = order_devices(jax.devices()[:8], pipe=8, gpus_per_node=4)
    mesh = make_mesh(pipe=8, devices=devices)
    assert stages_by_gpu(mesh.devices.reshape(-1)) == HALVES


def test_nodes_are_slices_where_each_gpu_has_a_process():
    gpus = [gpu(number, node=number // 4) for number in range(8)]
    assert stages_by_gpu(order_devices(gpus, pipe=8)) == HALVES


def test_nodes_are_processes_where_devices_have_no_slice():
    gpus = [SimpleNamespace(id=number, process_index=number // 4) for number in range(8)]
    assert stages_by_gpu(order_devices(gpus, pipe=8)) == HALVES


def test_gpus_dealt_to_processes_in_turn_are_gathered_by_node():
    gpus = [gpu(number, node=number % 2) for number in range(8)]
    ordered = order_devices(gpus, pipe=8)
    assert all(ordered[stage].slice_index == ordered[7 - stage].slice_index for stage in range(8))
    assert sum(ordered[stage].slice_index != ordered[stage + 1].slice_index for stage in range(7)) == 2


def test_a_node_that_gives_fewer_gpus_is_the_last():
    gpus = [gpu(number, node=0 if number < 2 else 1) for number in range(6)]
    ordered = order_devices(gpus, pipe=6)
    assert [device.slice_index for device in ordered] == [1, 1, 0, 0, 1, 1]


def test_nodes_of_many_sizes_are_refused():
    gpus = [gpu(number, node=node) for number, node in enumerate([0, 0, 0, 0, 1, 1, 2, 2])]
    with pytest.raises(ConfigError, match="rule equal-nodes"):
        order_devices(gpus, pipe=8)


def test_contiguous_order_leaves_devices_as_they_come():
    gpus = [gpu(number, node=node) for number, node in enumerate([0, 1, 2, 2, 1, 0, 0, 0])]
    assert order_devices(gpus, pipe=4, tensor=2, order="contiguous") == tuple(gpus)


def test_replicas_of_a_stage_are_of_one_node():
    gpus = [gpu(number, node=number // 4) for number in range(8)]
    ordered = order_devices(gpus, data=2, pipe=4, order="replicas_together")
    assert [device.slice_index for device in ordered] == [0, 1, 1, 0] * 2


def test_virtual_devices_of_one_process_are_one_node():
    assert order_devices(jax.devices()[:8], pipe=8) == tuple(jax.devices()[:8])


@pytest.mark.parametrize(
    ("schedule", "order", "gpus_of_node", "said"),
    [
        ("bpipe", "auto", 8, "all devices in one node"),
        ("bpipe", "auto", 4, "2 nodes, pair_adjacent: devices d and D-1-d of each pipeline in one node"),
        ("1f1b", "auto", 4, "2 nodes, contiguous: devices in the order in which JAX lists them"),
        ("bitpipe", "auto", 4, "2 nodes, replicas_together: all devices that hold a stage in one node"),
        ("bitpipe", "auto", 2, "4 nodes, pair_adjacent: devices d and D-1-d of each pipeline in one node"),
        ("bitpipe", "contiguous", 4, "2 nodes, contiguous: devices in the order in which JAX lists them"),
    ],
)
def test_a_run_says_in_words_where_its_devices_stand(schedule, order, gpus_of_node, said):
    """What "auto" decides, not the word: two copies of four stages on eight GPUs."""
    config = base_config("gpt")
    config.model.num_layers = 8
    config.mesh.update(data=2, pipe=4, order=order)
    config.data.batch_size = 16
    config.pipeline.update(schedule=schedule, num_microbatches=8)
    spec = resolve(config)
    gpus = [gpu(number, node=number // gpus_of_node) for number in range(8)]
    assert places_of(spec, gpus) == said
    assert f", {said}" in spec.lines(said)[1]
