"""A step from its parts: closed forms with times that are given, and what must hold whatever they are."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from settings_of_gpts import gpt_setting

from jaxpipe.cluster.hardware import HARDWARE, RESERVE_BYTES
from jaxpipe.config.recompute import Recomputed
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Link, Program, Roofline, Setting, Times, estimate, memory
from jaxpipe.estimate.communication import message_bytes
from jaxpipe.estimate.parameters import layer_parameters, shared_parameters
from jaxpipe.estimate.plan.bounds import least_with_room_s
from jaxpipe.estimate.setting import Group, layers_of_devices, places_of
from jaxpipe.estimate.step import _seconds
from jaxpipe.estimate.step_collectives import step_collectives
from jaxpipe.estimate.times import ring_s
from jaxpipe.models.flops import model_flops
from jaxpipe.schedules import Costs, simulate
from jaxpipe.schedules.schedule import Kind
from jaxpipe.sharding import Shard

LAYER = Times(
    layer_forward_s=1.0,
    layer_backward_s=2.0,
    layer_input_gradient_s=1.0,
    layer_weight_gradient_s=1.0,
    embed_forward_s=0.0,
    embed_backward_s=0.0,
    head_s=0.0,
    update_s=0.0,
)
NOTHING = Link(0.0, float("inf"))


@dataclass(frozen=True)
class Given:
    """Times and links that are given, the same for every setting."""

    of_actions: Times = LAYER
    near: Link = NOTHING
    far: Link = NOTHING

    def times(self, setting: Setting) -> Times:
        """As given."""
        return self.of_actions

    def link(self, *, in_node: bool) -> Link:
        """As given."""
        return self.near if in_node else self.far

    def gather_s(self, group: Group, num_bytes: float) -> float:
        """Of a ring over these links."""
        return ring_s(group, num_bytes, lambda in_node: self.link(in_node=in_node))


# Six layers a stage of 1F1B, and as many a device of the others: (N + D - 1) (F + B) and BitPipe's table 2 for N = D:
# 1 - bubble ratio = N (F + B) / step.
@pytest.mark.parametrize(
    ("schedule", "pipe", "num_microbatches", "ratio"),
    [
        ("1f1b", 4, 8, 3 / (8 + 3)),
        ("1f1b", 4, 1000, 3 / 1003),
        ("gpipe", 4, 64, 3 / 67),
        ("interleaved_1f1b", 4, 8, 3 / (2 * 8 + 3)),
        ("interleaved_1f1b", 4, 400, 3 / (2 * 400 + 3)),
        ("chimera", 4, 4, 2 / (1.5 * 4 + 2)),
        ("bitpipe", 4, 4, 2 / (3 * 4 + 2)),
        ("bitpipe", 8, 8, 6 / (3 * 8 + 6)),
    ],
)
def test_closed_forms(schedule, pipe, num_microbatches, ratio):
    setting = gpt_setting(schedule=schedule, pipe=pipe, num_microbatches=num_microbatches, num_layers=48)
    found = estimate(setting, Given())
    work_s = num_microbatches * 3.0 * 48 / pipe
    assert found.bubble_ratio == pytest.approx(ratio, rel=1e-9)
    assert found.pipeline_s == pytest.approx(work_s / (1 - ratio), rel=1e-9)
    assert found.step_s == found.pipeline_s


def test_ends_of_1f1b():
    """The last stage is the slowest, by its head; the others wait for it: N of its turns, and once all other stages'.

    The embedding is on the way once, in forward and backward.
    """
    times = replace(LAYER, head_s=4.0, embed_forward_s=0.25, embed_backward_s=0.5)
    found = estimate(gpt_setting(pipe=4, num_microbatches=10), Given(times))
    assert found.pipeline_s == pytest.approx(10 * (18 + 4) + 3 * 18 + 0.75, rel=1e-12)
    assert found.bubble_ratio == pytest.approx(1 - 220 / (220 + 54.75), rel=1e-12)


def test_the_head_stands_in_the_last_forward_and_the_embedding_at_both_ends_of_the_first():
    """Where `jaxpipe.program.actions` computes them: of many schedules it does not matter, of some it does."""
    times = replace(LAYER, head_s=4.0, embed_forward_s=0.25, embed_backward_s=0.5)
    found = _seconds(gpt_setting(pipe=3), times, Given(), closing=np.zeros(3)).of_kind
    assert found[[Kind.F, Kind.B, Kind.I, Kind.W]].tolist() == [
        [8.25, 8.0, 12.0],
        [16.5, 16.0, 16.0],
        [8.5, 8.0, 8.0],
        [8.0, 8.0, 8.0],
    ]


def test_a_split_head_is_as_much_work_of_every_device():
    """And takes two intervals longer than a model without a head, in proportion: the waits for S and for T."""
    setting = replace(gpt_setting(pipe=4, num_microbatches=64), vocab_over_pipe=True)
    times = replace(LAYER, head_s=1e9, statistics_s=1.0, gradients_s=2.0)
    layers = sum(setting.layers_per_stage) / setting.pipe
    interval_s = 3 * layers + 3
    found = estimate(setting, Given(times))
    assert 64 * interval_s < found.pipeline_s <= (64 + 4 - 1 + 2) * interval_s
    with pytest.raises(ConfigError, match="times that were measured"):
        estimate(setting, Given())


def test_halves_take_their_own_times():
    """ZB-H1 of one device has nothing to fill: N (F + I + W), with the embedding in I."""
    times = replace(LAYER, layer_input_gradient_s=1.5, layer_weight_gradient_s=0.75, embed_backward_s=0.5)
    found = estimate(gpt_setting(schedule="zb_h1", pipe=1, num_microbatches=3), Given(times))
    assert found.pipeline_s == pytest.approx(3 * (24 * 3.25 + 0.5), rel=1e-12)


def test_uneven_stages():
    """The first stage has more to do and waits twice.

    For the first B since its second F has ended, and for the last B since the B before has.
    """
    setting = replace(gpt_setting(pipe=2, num_microbatches=5), layers_per_stage=(14, 10))
    waits_s = (10 * 3 - 14) + (10 * 3 - 14 * 2)
    assert estimate(setting, Given()).pipeline_s == pytest.approx(5 * 14 * 3 + waits_s, rel=1e-12)


def test_messages_of_one_microbatch_travel_there_and_back():
    """N = 1 on four devices, of which two stand in each node: three hops there, three back, one of them far."""
    setting = gpt_setting(pipe=4, num_microbatches=1, topology="a100-80g:2x2")
    near, far = Link(0.1, message_bytes(setting) / 0.4), Link(0.5, message_bytes(setting) / 1.5)
    found = estimate(setting, Given(near=near, far=far))
    assert found.pipeline_s == pytest.approx(24 * 3.0 + 2 * (2 * 0.5 + 2.0), rel=1e-12)


def test_messages_that_block_keep_their_sender_busy():
    """Each F and B of 1F1B but the ends' is followed by a message: as if the stages were longer by it."""
    setting = gpt_setting(pipe=4, num_microbatches=10)
    near = Link(0.1, message_bytes(setting) / 0.4)
    found = estimate(setting, Given(near=near), Program(messages_block=True))
    longer = Costs(forward=(6.5, 6.5, 6.5, 6.0), backward=(12.0, 12.5, 12.5, 12.5))
    assert found.pipeline_s == pytest.approx(simulate(setting.schedule, longer).makespan, rel=1e-12)


def test_steps_that_do_not_wait_take_as_long_as_the_busiest_device():
    """ZB-H2 ends each device a forward after the one before it; 1F1B's first device begins first and ends last."""
    waits, does_not = Program(), Program(waits_between_steps=False)
    zb_h2 = gpt_setting(schedule="zb_h2", pipe=4, num_microbatches=12)
    timeline = simulate(zb_h2.schedule, Costs(6.0, 12.0, 6.0, 6.0))
    span = 12 * 18 / (1 - timeline.bubble_ratio_per_device_span)
    assert estimate(zb_h2, Given(), does_not).pipeline_s == pytest.approx(span, rel=1e-12)
    assert estimate(zb_h2, Given(), does_not).pipeline_s < estimate(zb_h2, Given(), waits).pipeline_s
    plain = gpt_setting(pipe=4, num_microbatches=12)
    assert estimate(plain, Given(), does_not).pipeline_s == estimate(plain, Given(), waits).pipeline_s


def test_pieces_hide_what_a_whole_layer_does_not():
    """A layer's sum takes 1.5 times its backward: pieces of a device's later chunk hide, its first chunk does not."""
    chunks = {"schedule": "interleaved_1f1b", "options": "num_chunks=2"}
    setting = gpt_setting(**chunks, pipe=2, num_microbatches=8, data=2, topology="a100-80g:1x8")
    times = Given().times(setting)
    sum_s = 1.5 * times.layer_backward_s
    near = Link(0.0, 4 * layer_parameters(setting.model).total / 2 / sum_s)  # a half goes over the link
    collectives = step_collectives(setting, Given(near=near), times)
    assert collectives.layer_sum_s == pytest.approx(sum_s)
    layers = setting.layers_per_stage
    # For a message of stage 1 another device waits, so its sums follow; one layer is left of what hangs.
    whole_s = layers[0] * (sum_s - times.layer_backward_s)
    assert collectives.closing.tolist() == pytest.approx([whole_s + sum_s, layers[1] * sum_s, 0.0, sum_s])


def test_sums_of_gradients_in_rounds_hide_behind_the_actions_of_others():
    """N = 1: a stage's sum stands beside the next one's backward, so only that of the first stage is left over."""
    setting = gpt_setting(pipe=4, num_microbatches=1, data=2, topology="a100-80g:1x8", shard=Shard.NONE)
    near = Link(0.0, 1e9)
    gradients = 4 * layer_parameters(setting.model).total
    shared_s = 2 * Given(near=near).gather_s(places_of(setting).shared, 4 * shared_parameters(setting.model).total)
    in_rounds = estimate(setting, Given(near=near), Program(behind_layers=False))
    at_once = estimate(setting, Given(near=near), Program(reduces_in_rounds=False))
    stage_s = 6 * 2 * gradients / 2 / 1e9
    assert in_rounds.reduce_s - shared_s == pytest.approx(stage_s, rel=1e-9)
    assert at_once.reduce_s - shared_s == pytest.approx(stage_s, rel=1e-9)
    assert in_rounds.pipeline_s == at_once.pipeline_s
    split = estimate(replace(setting, shard=Shard.OPTIMIZER), Given(near=near), Program(behind_layers=False))
    assert split.reduce_s == pytest.approx(in_rounds.reduce_s / 2, rel=1e-9)
    # Copies are 16-bit and gathered once: as long as a fourth of sums of float32 there and back.
    assert split.copies_s == pytest.approx(at_once.reduce_s / 4, rel=1e-9)
    assert at_once.copies_s == 0.0
    # A layer's sum takes 0.05 s, its backward 2 s: of six layers the last one's sum is left.
    hidden = estimate(setting, Given(near=near))
    assert hidden.reduce_s - shared_s == pytest.approx(stage_s / 6, rel=1e-9)
    slow = estimate(setting, Given(near=Link(0.0, 1e7)))
    layer_s = 2 * gradients / 2 / 1e7
    assert slow.reduce_s - 100 * shared_s == pytest.approx(6 * (layer_s - 2.0) + layer_s, rel=1e-9)


# A layer's gather takes 1.5 s and its sum 3, against F of 1 and B of 2: F, B, I and W last as long as what is behind.
@pytest.mark.parametrize(
    ("shard", "schedule", "layer_s", "gathers_s"),
    [
        (Shard.OPTIMIZER, "1f1b", 1 + 2, 1.5 + 24 * (1.5 - 1)),
        (Shard.GRADIENTS, "1f1b", 1 + 3, 1.5 + 24 * (1.5 - 1)),
        (Shard.GRADIENTS, "zb_h1", 1 + 1 + 3, 1.5 + 24 * (1.5 - 1)),
        (Shard.WEIGHTS, "1f1b", 1.5 + (1.5 + 3), 1.5),
        (Shard.WEIGHTS, "zb_h1", 1.5 + 1.5 + 3, 1.5),
    ],
)
def test_a_layer_lasts_as_long_as_what_travels_behind_it(shard, schedule, layer_s, gathers_s):
    setting = gpt_setting(schedule=schedule, pipe=1, data=2, num_microbatches=4, shard=shard, topology="a100-80g:1x2")
    number = layer_parameters(setting.model).total
    source = Given(near=Link(0.0, number / 1.5))  # half of the bytes are sent: one a parameter, two of a sum
    shared = shared_parameters(setting.model).total / number * 1.5
    found = estimate(setting, source)
    assert found.pipeline_s == pytest.approx(4 * 24 * layer_s, rel=1e-9)
    assert found.copies_s == pytest.approx(gathers_s + shared, rel=1e-9)
    if shard.splits_gradients:  # the last layer alone is left
        assert found.reduce_s == pytest.approx(3.0 + 2 * shared, rel=1e-9)
    sums_and_gathers = {Shard.OPTIMIZER: (1, 1), Shard.GRADIENTS: (4, 1), Shard.WEIGHTS: (4, 8)}[shard]
    whole = sum(24 * 1.5 * factor * times for factor, times in zip((2, 1), sums_and_gathers, strict=True))
    assert found.over_data_s == pytest.approx(whole + 3 * shared, rel=1e-9)
    assert found.bubble_ratio == 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_all_gathers_but_a_layer_s_hide_behind_layers_that_last_longer(schedule):
    """With two replicas, too, though parts of each other's layers are exchanged before any action."""
    setting = gpt_setting(schedule=schedule, pipe=2, data=2, num_microbatches=4, topology="a100-80g:1x4")
    source = Given(near=Link(0.0, layer_parameters(setting.model).total / 0.5))  # a gather takes 0.5 s, an F 1
    at_once = estimate(setting, source, Program(behind_layers=False))
    num_layers = max(layers_of_devices(setting))
    assert at_once.copies_s - estimate(setting, source).copies_s == pytest.approx(0.5 * (num_layers - 1), rel=1e-9)


@pytest.mark.parametrize("num_microbatches", [4, 256])
def test_breadth_first_gathers_kept_chunks_but_the_last_one_twice(num_microbatches):
    """Its first chunk ahead, behind F; the other one behind F, too; the first one again behind B, whose sums wait."""
    schedule = gpt_setting(schedule="breadth_first", options="num_chunks=2", pipe=2, data=2, topology="a100-80g:1x4")
    setting = replace(schedule, num_microbatches=num_microbatches, batch_size=2 * num_microbatches, shard=Shard.WEIGHTS)
    number, num_layers = layer_parameters(setting.model).total, setting.layers_per_stage[0]
    source = Given(near=Link(0.0, number / 1.5))  # a gather takes 1.5 s and a sum 3, an F 1 and a B 2, as above
    again, kept = (estimate(replace(setting, keep_bytes=size), source) for size in (0, 160_000_000))  # one chunk of two
    ends_s = again.copies_s - 1.5
    assert kept.copies_s - ends_s == pytest.approx(1.5 + num_layers * (0.5 + 0.5 + 1.5), rel=1e-9)
    assert again.over_data_s - kept.over_data_s == pytest.approx(
        1.5 * num_layers * (2 * 2 * num_microbatches - 3), rel=1e-9
    )
    assert kept.pipeline_s < again.pipeline_s
    # Each chunk is summed once: the one that leaves first behind B of the other, the last one behind its own.
    once = estimate(replace(setting, keep_bytes=160_000_000, keep_sums_bytes=320_000_000), source)
    assert kept.over_data_s - once.over_data_s == pytest.approx(3 * num_layers * (2 * num_microbatches - 2), rel=1e-9)
    assert once.pipeline_s < kept.pipeline_s


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v", "bpipe", "chimera"])
@pytest.mark.parametrize("shard", [Shard.GRADIENTS, Shard.WEIGHTS])
def test_hidden_gathers_and_sums_of_every_microbatch_leave_the_pipeline_as_it_is(schedule, shard):
    setting = gpt_setting(schedule=schedule, pipe=4, num_microbatches=8, data=2, topology="a100-80g:1x8")
    near = Link(0.0, 1e9)
    plain = estimate(setting, Given(near=near))
    found = estimate(replace(setting, shard=shard), Given(near=near))
    assert found.pipeline_s == plain.pipeline_s
    assert found.over_data_s > plain.over_data_s
    # One layer's sum after the last action of the device that ends last.
    shared_s = Given(near=near).gather_s(places_of(setting).shared, 4 * shared_parameters(setting.model).total)
    assert found.reduce_s == pytest.approx(4 * layer_parameters(setting.model).total / 2 / 1e9 + shared_s, rel=1e-6)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "weights"])
def test_between_copies_with_masters_of_their_own_parts_travel_once_a_step(shard):
    """Gradients of float32: scattered within a node, summed over nodes; a byte to another node takes a second."""
    source = Given(near=Link(0.0, float("inf")), far=Link(0.0, 1.0))
    of_node = gpt_setting(pipe=1, data=8, num_microbatches=4, shard=Shard(shard), topology="a100-80g:2x8")
    setting = replace(of_node, replicate=2, batch_size=2 * of_node.batch_size)
    assert places_of(setting).copies == Group(8, 8)
    assert places_of(setting).sums == Group(2, 1)
    parts = 8 if Shard(shard).splits_masters else 1
    numbers = setting.model.num_layers * layer_parameters(setting.model).total + shared_parameters(setting.model).total
    assert step_collectives(setting, source, LAYER).whole_s == pytest.approx(4 * numbers / parts)


def test_rates():
    setting = gpt_setting(num_microbatches=16, data=2, tensor=2)
    found = estimate(setting, Given(replace(LAYER, update_s=1.0)))
    assert found.samples_per_s == 32 / found.step_s
    assert found.tokens_per_s == 32 * 1024 / found.step_s
    flops = 32 * model_flops(setting.model, seq_len=1024)
    assert found.mfu == pytest.approx(flops / (found.step_s * 16 * 312e12), rel=1e-12)
    assert found.step_s == found.copies_s + found.pipeline_s + found.reduce_s + 1.0


SOURCE = Roofline(HARDWARE["a100-80g"])


def test_more_microbatches_are_more_efficient():
    found = [estimate(gpt_setting(num_microbatches=num), SOURCE) for num in (4, 8, 40, 400)]
    assert [each.mfu for each in found] == sorted(each.mfu for each in found)
    assert [each.step_s for each in found] == sorted(each.step_s for each in found)


def test_work_computed_again_costs_time_and_no_model_flops():
    plain, again = (estimate(gpt_setting(recompute=recompute), SOURCE) for recompute in ("none", "full"))
    assert again.step_s > plain.step_s
    assert again.mfu * again.step_s == pytest.approx(plain.mfu * plain.step_s, rel=1e-12)


@dataclass(frozen=True)
class GivenByKind(Given):
    """A layer that is computed again takes a forward more."""

    def times(self, setting: Setting) -> Times:
        """By `model.recompute`."""
        again = 1.0 if setting.model.recompute == "full" else 0.0
        return replace(LAYER, layer_backward_s=2.0 + again, layer_input_gradient_s=1.0 + again)


@pytest.mark.parametrize(
    ("counts", "step_s"),
    [
        # Of six layers a stage, F 6 and B 12, of eight microbatches: (8 + 3) x 18.
        ((0, 0, 0, 0), 198),
        ((6, 6, 6, 6), 198 + 11 * 6),
        # Stage 3 begins when three forwards have come, and three backwards follow its last one.
        ((0, 0, 0, 2), 198 + 8 * 2),
    ],
)
def test_layers_of_a_list_alone_take_longer(counts, step_s):
    setting = gpt_setting(pipe=4, num_microbatches=8, num_layers=24)
    setting = replace(setting, recomputed=Recomputed("full", counts))
    assert estimate(setting, GivenByKind()).step_s == pytest.approx(step_s)


def test_pairs_apart_slow_bpipe_down():
    choices = {"schedule": "bpipe", "pipe": 8, "num_microbatches": 32, "topology": "a100-80g:2x4", "num_layers": 32}
    slow = replace(SOURCE, network_fraction=0.02)
    contiguous, adjacent = (
        estimate(gpt_setting(**choices, order=order), slow).pipeline_s for order in ("contiguous", "pair_adjacent")
    )
    assert adjacent < contiguous


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "v_min", "interleaved_1f1b", "chimera", "dualpipe_v"])
def test_no_step_that_fits_is_shorter_than_its_pages_wait(schedule):
    """On a GPU with room for exactly this step; with more room the bound is lower."""
    setting = gpt_setting(schedule=schedule, pipe=4, num_microbatches=16, microbatch_size=8)
    hardware = replace(setting.topology.hardware, memory_bytes=memory(setting).total + RESERVE_BYTES)
    tight = replace(setting, topology=replace(setting.topology, hardware=hardware))
    source = Roofline(setting.topology.hardware)
    bound_s = least_with_room_s(tight, source.times(tight))
    assert 0 < least_with_room_s(setting, source.times(setting)) < bound_s
    assert 0.1 < bound_s / estimate(tight, source).step_s <= 1
