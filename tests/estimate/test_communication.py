"""Bytes of a message, the groups of a mesh, and the time of a ring over nodes."""

from settings_of_gpts import gpt_setting

from jaxpipe.estimate.communication import message_bytes
from jaxpipe.estimate.setting import Group, places_of
from jaxpipe.estimate.times import Link, ring_s


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


def link(in_node: bool) -> Link:
    """A machine of 1 s and 8 bytes a second in a node, 10 s and 2 bytes a second between nodes."""
    return Link(1.0, 8.0) if in_node else Link(10.0, 2.0)


def test_a_ring():
    assert ring_s(Group(1, 1), 64, link) == 0
    assert ring_s(Group(4, 4), 64, link) == 3 * 1 + 3 * 16 / 8
    assert ring_s(Group(4, 1), 64, link) == 3 * 10 + 3 * 16 / 2
    # Two members in a node have two adapters, and one step of three leaves the node.
    assert ring_s(Group(4, 2), 64, link) == 2 * 1 + 10 + 3 * 16 / 4
