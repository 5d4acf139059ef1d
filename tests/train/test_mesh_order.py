"""`mesh.order="auto"`: each schedule gets the order that suits it best, of those in which the mesh can be laid out."""

import jax
import numpy as np
import pytest

from jaxpipe.config import base_config, check
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import resolve
from jaxpipe.training.setup import build_pipeline


def ids(schedule: str, *, gpus_per_node: int, order: str = "auto") -> np.ndarray:
    """[copy, device] the devices of a mesh of two copies of four."""
    config = base_config()
    config.model.update(num_layers=8, hidden=16)
    config.data.batch_size = 8
    config.pipeline.update(schedule=schedule, num_microbatches=4)
    config.mesh.update(data=2, pipe=4, order=order, platform="cpu")
    check(config)
    _, pipeline = build_pipeline(resolve(config), jax.devices(), gpus_per_node=gpus_per_node)
    return np.vectorize(lambda device: device.id)(pipeline.mesh.devices).reshape(2, 4)


@pytest.mark.parametrize("schedule", ["bitpipe", "chimera"])
def test_of_two_replicas_all_holders_of_a_stage_stand_in_one_node(schedule):
    node = ids(schedule, gpus_per_node=4) // 4
    for device in range(2):
        assert len(np.unique(node[:, [device, 3 - device]])) == 1
    assert len(np.unique(node)) == 2


def test_or_pairs_do_where_nodes_are_too_small_for_all():
    node = ids("bitpipe", gpus_per_node=2) // 2
    np.testing.assert_array_equal(node, node[:, ::-1])
    with pytest.raises(ConfigError, match="replicas-together"):
        ids("bitpipe", gpus_per_node=2, order="replicas_together")


@pytest.mark.parametrize(("schedule", "gpus_per_node"), [("bitpipe", 3), ("1f1b", 4)])
def test_or_devices_stay_as_they_come(schedule, gpus_per_node):
    np.testing.assert_array_equal(ids(schedule, gpus_per_node=gpus_per_node), np.arange(8).reshape(2, 4))


def test_pairs_that_move_activations_are_not_parted():
    node = ids("bpipe", gpus_per_node=4) // 4
    np.testing.assert_array_equal(node, node[:, ::-1])
    with pytest.raises(ConfigError, match="pair-adjacent"):
        ids("bpipe", gpus_per_node=3)
