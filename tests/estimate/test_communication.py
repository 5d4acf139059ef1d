"""What is sent in a step: against BitPipe's table 6, and against schedules looked at action by action."""

from collections import Counter

import numpy as np
import pytest
from legal_devices import variants
from settings_of_gpts import gpt_setting

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import base_config
from jaxpipe.estimate import setting_of
from jaxpipe.estimate.communication import communication, message_bytes, num_messages
from jaxpipe.estimate.parameters import layer_parameters, shared_parameters
from jaxpipe.estimate.residuals import layer_residuals
from jaxpipe.estimate.setting import Group, places_of
from jaxpipe.estimate.times import Link, ring_s
from jaxpipe.schedules import build
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import Kind


def sent(kind: str, **choices) -> dict[bool, float]:
    """{whether over NVLink: bytes}."""
    return {each.in_node: each.num_bytes for each in communication(gpt_setting(**choices)) if each.kind == kind}


# BitPipe (arXiv 2410.19367), table 6: 2N + 2 (D - 1) messages for DAPPLE, 4N + 4 (D - 1) for 1F1B-Int; the terms with D
# are the time until the pipeline is full, those with N what a device in the middle sends.
@pytest.mark.parametrize(
    ("schedule", "per_microbatch"),
    [("1f1b", 2), ("interleaved_1f1b", 4), ("chimera", 2), ("bitpipe", 4)],
)
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(4, 8), (8, 8), (8, 32)])
def test_messages_of_table_6(schedule, per_microbatch, num_devices, num_microbatches):
    setting = gpt_setting(schedule=schedule, pipe=num_devices, num_microbatches=num_microbatches, num_layers=48)
    assert num_messages(setting).sum(axis=1).max() == per_microbatch * num_microbatches


def test_gradients_between_replicas_of_table_6():
    """M_grad: a device sends the gradients of half of what it holds, here in float32, and its compute copies before."""
    choices = {"schedule": "chimera", "pipe": 4, "topology": "a100-80g:1x8"}
    half = 6 * layer_parameters(gpt_setting(**choices).model).total
    assert sent("exchange", **choices) == {True: (4 + 2) * half}
    assert sent("exchange", schedule="1f1b") == {}


def test_bytes_of_a_message():
    # Table 6: 2 bytes x B x S x H; `tensor` shares the sequence.
    assert message_bytes(gpt_setting(microbatch_size=3)) == 2 * 3 * 1024 * 1024
    assert message_bytes(gpt_setting(microbatch_size=3, tensor=4)) == 2 * 3 * 1024 * 1024 / 4


@pytest.mark.parametrize(("name", "options", "num_devices"), variants(4))
def test_messages_are_those_of_the_schedule(name, options, num_devices):
    written = ",".join(f"{key}={str(value).lower()}" for key, value in options.items())
    for num_microbatches in (6, 7):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
        columns, message = schedule.columns, dependencies(schedule).message
        readers = np.flatnonzero(message >= 0)
        pairs = Counter(zip(columns.device[message[readers]].tolist(), columns.device[readers].tolist(), strict=True))
        setting = gpt_setting(schedule=name, options=written, pipe=num_devices, num_microbatches=num_microbatches)
        counted = num_messages(setting)
        assert {pair: counted[pair] for pair in np.ndindex(*counted.shape) if counted[pair]} == {
            (source, target): num for (source, target), num in pairs.items() if source != target
        }


@pytest.mark.parametrize("num_microbatches", [16, 48, 96])
def test_pages_are_those_of_the_schedule(num_microbatches):
    choices = {"schedule": "bpipe", "pipe": 8, "num_microbatches": num_microbatches, "topology": "a100-80g:1x8"}
    schedule = build("bpipe", num_devices=8, num_microbatches=num_microbatches)
    slots = np.zeros(8)
    for device, row in enumerate(schedule.rows):
        for action in row:
            if action.kind in (Kind.EVICT, Kind.LOAD):
                source = device if action.kind is Kind.EVICT else 7 - device
                slots[source] += float(schedule.parked_of(action.stage))
    page = layer_residuals(gpt_setting(**choices)).page_bytes
    assert sent("pages", **choices)[True] == pytest.approx(slots.max() * 3 * page, rel=1e-12)


def test_links_by_where_devices_stand():
    """Eight devices on two nodes: in order one hop crosses; with pairs in one node two hops, and no page."""
    one = 2 * 8 * message_bytes(gpt_setting())
    choices = {"pipe": 8, "topology": "a100-80g:2x4"}
    assert sent("messages", **choices, order="contiguous") == {True: one, False: one / 2}
    paired = {**choices, "schedule": "bpipe", "order": "pair_adjacent"}
    assert sent("messages", **paired) == {True: one, False: one / 2}
    assert set(sent("pages", **paired)) == {True}
    assert set(sent("pages", **{**paired, "order": "contiguous"})) == {False}


def test_sums_and_copies_of_data():
    """Each of n devices sends (n - 1) / n of float32 gradients, and of 16-bit copies; without ZeRO-1 the sums twice."""
    model = gpt_setting().model
    num_layers, num_shared = 6 * layer_parameters(model).total, shared_parameters(model).total
    num = num_layers * 3 / 4 + num_shared * 15 / 16
    split = {"data": 4, "topology": "a100-80g:1x16"}
    assert sent("gradients", **split) == {True: 4 * num}
    assert sent("copies", **split) == {True: 2 * num}
    assert sent("gradients", **split, zero1=False) == {True: 8 * num}
    assert sent("copies", **split, zero1=False) == {}


def test_collectives_of_tensor():
    """Ten of a layer and microbatch, thirteen where it is computed again: (t - 1) / t of 2 b s h bytes each."""
    each = 2 * 1024 * 1024 * 3 / 4
    assert sent("tensor", tensor=4) == {True: 6 * 8 * 10 * each}
    assert sent("tensor", tensor=4, recompute="full") == {True: 6 * 8 * 13 * each}
    # A device of two replicas holds twice the layers for half of the microbatches.
    assert sent("tensor", tensor=4, schedule="chimera") == {True: 6 * 8 * 10 * each}


def test_groups_by_where_devices_stand():
    """Of data 4 x pipe 2 a node of 4 has two whole pipelines; where replicas stand together, it has all of a stage."""
    places = places_of(gpt_setting(pipe=2, data=4, topology="a100-80g:2x4"))
    assert (places.data, places.shared, places.tensor) == (Group(4, 2), Group(8, 4), Group(1, 1))
    choices = {"schedule": "chimera", "pipe": 4, "data": 2, "topology": "a100-80g:2x4"}
    assert places_of(gpt_setting(**choices)).data == Group(2, 1)
    assert places_of(gpt_setting(**choices, order="replicas_together")).data == Group(2, 2)


def link(in_node: bool) -> Link:
    """A machine of 1 s and 8 bytes a second in a node, 10 s and 2 bytes a second between nodes."""
    return Link(1.0, 8.0) if in_node else Link(10.0, 2.0)


def test_a_ring():
    assert ring_s(Group(1, 1), 64, link) == 0
    assert ring_s(Group(4, 4), 64, link) == 3 * 1 + 3 * 16 / 8
    assert ring_s(Group(4, 1), 64, link) == 3 * 10 + 3 * 16 / 2
    # Two members in a node have two adapters, and one step of three leaves the node.
    assert ring_s(Group(4, 2), 64, link) == 2 * 1 + 10 + 3 * 16 / 4


def test_collectives_of_experts():
    """Five dispatches of a layer and microbatch; one more where it is computed again, and where backwards are split."""
    config = base_config("mixtral")
    config.model.update(num_layers=4, hidden=64, num_heads=4, num_kv_heads=4, feed_forward=128, num_experts=4)
    config.mesh.update(pipe=2, expert=2)
    config.data.update(seq_len=64, batch_size=16)
    config.pipeline.num_microbatches = 8

    def sent_by(schedule: str, recompute: str = "none") -> float:
        config.pipeline.schedule, config.model.recompute = schedule, recompute
        sent = communication(setting_of(config, parse_topology("h100-80g:1x8")))
        return sum(each.num_bytes for each in sent if each.kind == "experts")

    one = sent_by("1f1b") / 5
    assert one > 0
    assert sent_by("1f1b", "full") == pytest.approx(6 * one)
    assert sent_by("zb_h1") == pytest.approx(6 * one)
