"""Bytes of a message, the groups of a mesh, and the time of a ring over nodes."""

from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
from settings_of_gpts import gpt_setting

from jaxpipe.estimate.communication import collectives_s, message_bytes
from jaxpipe.estimate.setting import Group, places_of
from jaxpipe.estimate.times import Link, ring_s
from jaxpipe.models import MixtureConfig

IN_LAYER = ("forward", "backward", "input_gradient", "weight_gradient", "again")
SIZES: dict[str, Any] = {"num_layers": 24, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "feed_forward": 24}
MIXTURE = MixtureConfig(**SIZES, vocab_size=512, num_experts=4)


def test_bytes_of_a_message():
    # BitPipe (arXiv 2410.19367), table 6: 2 bytes x B x S x H; `tensor` shares the sequence.
    assert message_bytes(gpt_setting(microbatch_size=3)) == 2 * 3 * 1024 * 1024
    assert message_bytes(gpt_setting(microbatch_size=3, tensor=4)) == 2 * 3 * 1024 * 1024 / 4


def test_groups_by_where_devices_stand():
    """Of data 4 x pipe 2 a node of 4 has two whole pipelines; where replicas stand together, it has all of a stage."""
    places = places_of(gpt_setting(pipe=2, data=4, topology="a100-80g:2x4"))
    assert (places.along["data"], places.shared, places.along["tensor"]) == (Group(4, 2), Group(8, 4), Group(1, 1))
    choices = {"schedule": "chimera", "pipe": 4, "data": 2, "topology": "a100-80g:2x4"}
    assert places_of(gpt_setting(**choices)).along["data"] == Group(2, 1)
    assert places_of(gpt_setting(**choices, order="replicas_together")).along["data"] == Group(2, 2)


@pytest.mark.parametrize(
    ("sizes", "layer", "ends"),
    [
        # Korthikanti et al., MLSys 2023, section 4.2.2: two gathers and two scattered sums, and as many backward,
        # which gathers the inputs of two matmuls once more. One for the embedding, two around the head.
        ({"tensor": 2}, [4, 6, 4, 2, 3], [1, 2, 1, 1]),
        # GShard, section 3.1: to the experts and back, and the same of gradients; rows once more for the kernels'.
        ({"expert": 2}, [2, 3, 2, 2, 1], [0, 0, 0, 0]),
        ({"expert": 2, "tensor": 2}, [6, 9, 6, 4, 4], [1, 2, 1, 1]),
        ({"data": 2}, [0] * 5, [0] * 4),
    ],
)
def test_collectives_of_a_layer_and_of_the_ends(sizes, layer, ends):
    """Each of them takes a second."""
    setting = replace(gpt_setting(pipe=1), **sizes, model=MIXTURE, batch_size=16)
    seconds = collectives_s(setting, lambda group, num_bytes: float(group.size > 1 and num_bytes > 0))
    assert [seconds(attrgetter(name)) for name in IN_LAYER] == layer
    assert [seconds(attrgetter(name)) for name in ("embed", "head", "statistics", "gradients")] == ends


def link(in_node: bool) -> Link:
    """A machine of 1 s and 8 bytes a second in a node, 10 s and 2 bytes a second between nodes."""
    return Link(1.0, 8.0) if in_node else Link(10.0, 2.0)


def test_a_ring():
    assert ring_s(Group(1, 1), 64, link) == 0
    assert ring_s(Group(4, 4), 64, link) == 3 * 1 + 3 * 16 / 8
    assert ring_s(Group(4, 1), 64, link) == 3 * 10 + 3 * 16 / 2
    # Two members in a node have two adapters, and one step of three leaves the node.
    assert ring_s(Group(4, 2), 64, link) == 2 * 1 + 10 + 3 * 16 / 4
