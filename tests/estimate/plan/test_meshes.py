"""Which GPUs share a layer: those of a node, or all of several nodes where an axis may span these."""

from dataclasses import replace

import pytest

from jaxpipe.cluster import parse_topology
from jaxpipe.config import base_config
from jaxpipe.estimate.plan.meshes import meshes
from jaxpipe.estimate.plan.space import space_of
from jaxpipe.estimate.setting import places_of


@pytest.fixture(scope="module")
def space():
    config = base_config("llama")
    config.model.update(num_layers=4, hidden=256, num_heads=16, num_kv_heads=16, vocab_size=512, attention="chunked")
    config.data.update(seq_len=32768, batch_size=4)
    return space_of(config, parse_topology("h100-80g:2x8"))


def test_a_context_axis_goes_on_over_nodes_that_it_fills_and_no_other_axis_does(space):
    sharing = {(mesh["context"], mesh["tensor"]) for mesh in meshes(space.base, space.legal, 16)}
    assert {(2, 8), (16, 1), (4, 4), (8, 1), (1, 8)} <= sharing
    assert all(tensor <= 8 for _, tensor in sharing)
    # Three quarters of two nodes would leave parts of them.
    assert not [1 for mesh in meshes(space.base, space.legal, 12) if mesh["context"] * mesh["tensor"] > 8]


def test_what_travels_over_nodes_takes_the_network(space):
    setting = replace(space.base, context=4, tensor=4)
    assert places_of(setting).along["context"].per_node == 2
    assert places_of(setting).along["tensor"].in_node
