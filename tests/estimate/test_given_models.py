"""Models given in Python: bytes and FLOPs of a layer of a new kind, bytes of steps against XLA's, plans, compiling."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import own_models
import pytest
from own_models import HIDDEN, NUM_LAYERS, SEQ_LEN, SETTINGS, WORDS, config_of, given, model_of
from tiers import tiers

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.step import training_step
from jaxpipe.config import base_config
from jaxpipe.config.base import RunConfig
from jaxpipe.estimate import Roofline, estimate, memory, setting_of
from jaxpipe.estimate.given import given_flops, given_parts
from jaxpipe.estimate.plan.config_file import config_of as planned_config
from jaxpipe.estimate.plan.frontier import settings_of
from jaxpipe.estimate.plan.space import Variant
from jaxpipe.estimate.products import flops
from jaxpipe.estimate.step_collectives import action_times
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.mesh import choose_devices
from jaxpipe.plan import plan
from jaxpipe.program.held_bytes import held_bytes
from jaxpipe.training.given import given_task

TOPOLOGY = parse_topology("h100-80g:1x4")
# Bytes of a device of the compiled step for absent H100s, by setting: `compile_step` and its report, jax 0.10.2,
# 2026-11-28; the last test compiles them again.
XLA = {
    "gru": (150770724, 150043180, 102640676, 63048996, 121346340, 72157732),
    "flax": (445108676, 872693956, 471632068, 107493828, 317046980, 161231044),
    "large": (525376396, 523505588, 300184748, 98801036, 372233380, 137058468),
}
# Of steps of four times the width and the tokens and eight times the words, in which the 32 MiB that cuBLAS works in
# are few: (model, setting) -> bytes as above, 2026-11-29.
LARGER = {"HIDDEN": 1024, "SEQ_LEN": 512, "WORDS": 4096}
XLA_LARGER = {
    ("gru", 2): 1187289636,
    ("gru", 3): 541402148,
    ("gru", 5): 686007092,
    ("flax", 3): 1234142916,
    ("flax", 5): 2102339268,
    ("large", 2): 4291242156,
    ("large", 3): 1078256524,
    ("large", 5): 1707338428,
}


def setting(name: str, number: int, **arguments: Any) -> Any:
    config = config_of(*SETTINGS[number])
    of_all = {"params": None, **(arguments or given(name))}
    config, task = given_task(RunConfig.of(config), **of_all, heldout_batches=())
    return setting_of(config, TOPOLOGY, task.given)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=[] if (name, number) in (("gru", 0), ("large", 5)) else pytest.mark.slow)
        for name in XLA
        for number in range(len(SETTINGS))
    ],
)
def test_bytes_are_within_five_percent_of_xla(name, number):
    assert memory(setting(name, number)).total == pytest.approx(XLA[name][number], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), XLA_LARGER)
def test_bytes_of_larger_steps_are_within_five_percent_of_xla(name, number, monkeypatch):
    for what, size in LARGER.items():
        monkeypatch.setattr(own_models, what, size)
    assert memory(setting(name, number)).total == pytest.approx(XLA_LARGER[name, number], rel=0.05)


def gated_recurrence(params: Any, x: jax.Array, batch: Any, random: Any) -> jax.Array:
    """A kind of layer that the package does not have: a recurrence of elementwise gates between two products."""
    gate, value = jnp.split(x @ params["into"], 2, axis=-1)
    decay = jax.nn.sigmoid(gate)

    def cell(h: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h = step[0] * h + step[1]
        return h, h

    states = jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), (decay.swapaxes(0, 1), value.swapaxes(0, 1)))[1]
    return x + states.swapaxes(0, 1) @ params["out"]


@pytest.mark.parametrize("name", tiers(["1f1b"], ci=["zb_v", "bpipe"]))
def test_pages_of_kinds_that_save_unlike_bytes_are_those_of_the_program(name, monkeypatch):
    """In turn a layer that saves its input alone, and one that saves all; pages that move are of one size."""
    layers = "2,2,2,2,1,3,2,2" if name == "zb_v" else "2,2,2,2"
    monkeypatch.setattr(own_models, "NUM_LAYERS", sum(map(int, layers.split(","))))
    config = config_of(name, 8, 1, 4, "none", "bfloat16")
    config.pipeline.layers_per_stage = layers
    arguments = {"model": own_models.every_second_again(), "train_batches": own_models.batches}
    told, task = given_task(RunConfig.of(config), **arguments, params=None, heldout_batches=())
    step = training_step(config, choose_devices(4, platform="cpu").devices, **arguments)
    shapes = step.step.shapes(step.state.params, step.batch)
    assert len(shapes.pools) == {"1f1b": 2, "zb_v": 3, "bpipe": 1}[name]
    held = held_bytes(shapes)
    found = memory(setting_of(told, TOPOLOGY, task.given))
    assert found.slots + found.weight_slots == held["pages"] + held["left"]


def test_a_new_kind_of_layer_has_its_bytes_and_flops():
    new = model_of(gated_recurrence, into=(HIDDEN, 2 * HIDDEN), out=(HIDDEN, HIDDEN))
    arguments = {"model": new, "train_batches": given("gru")["train_batches"]}
    of = setting("new", 5, **arguments)  # recomputed, in bfloat16: 64 sequences in 2 x 8 microbatches
    tokens = 64 // 16 * SEQ_LEN
    product = 2 * tokens * HIDDEN**2
    layer = traced_layer(of)
    assert layer.page_bytes == 2 * tokens * HIDDEN  # its input
    # Backward computes the first product again, and needs the result of the second for nothing.
    parts = (layer.forward, layer.input_gradient, layer.weight_gradient)
    assert [flops(part) for part in parts] == [3 * product, 2 * product + 3 * product, 3 * product]
    head = 3 * 2 * tokens * HIDDEN * WORDS
    assert given_flops(of) == (NUM_LAYERS * 9 * product + head) / (64 // 16)
    assert given_parts(of).message_bytes == 2 * tokens * HIDDEN
    # A loop over the tokens: a kernel or more a token, which take longer than its FLOPs.
    assert given_parts(of).layer_forward.num_kernels > SEQ_LEN
    times = Roofline(TOPOLOGY.hardware).times(of)
    assert times.layer_forward_s > SEQ_LEN * Roofline(TOPOLOGY.hardware).kernel_s
    assert 0 < estimate(of, Roofline(TOPOLOGY.hardware)).mfu < 1


def test_what_is_planned_runs_as_planned():
    arguments = given("large")
    config = base_config("given")
    config.model.dtype = "bfloat16"
    rows = plan(config, "h100-80g:1x2", **arguments, top=2).rows
    assert len(rows) == 2
    assert rows[0].step_s <= rows[1].step_s
    planned = planned_config(config, rows[0].setting)
    planned, task = given_task(planned, **arguments, params=None, heldout_batches=())
    assert memory(setting_of(planned, parse_topology("h100-80g:1x2"), task.given)) == rows[0].held


def test_stages_are_balanced_by_the_kinds_of_their_layers(monkeypatch):
    """The first half of the layers is half as dear: no split is faster than the planner's; equal stages are slower."""
    for name, size in {"HIDDEN": 1024, "SEQ_LEN": 512, "NUM_LAYERS": 12}.items():
        monkeypatch.setattr(own_models, name, size)
    config = config_of("1f1b", 16, 1, 4, "none", "bfloat16")
    config, task = given_task(
        RunConfig.of(config),
        model=own_models.half_as_dear(),
        params=None,
        train_batches=own_models.batches,
        heldout_batches=(),
    )
    group = setting_of(config, TOPOLOGY, task.given)
    source = Roofline.of(TOPOLOGY.hardware)

    def step_s(layers: tuple[int, ...]) -> float:
        return estimate(replace(group, layers_per_stage=layers), source).step_s

    planned = [each.layers_per_stage for each in settings_of(group, Variant("1f1b", ""), action_times(group, source))]
    best_s = min(map(step_s, planned))
    # A token of a feed forward: two products of 4 x 1024^2, two FLOPs each, three times as many with its backward.
    assert given_flops(group) == 512 * (18 * 48 * 1024**2 + 3 * 2 * 1024 * WORDS)
    assert step_s((3, 3, 3, 3)) >= 1.1 * best_s
    edges = combinations(range(1, 12), 3)
    splits = (tuple(stop - first for first, stop in pairwise((0, *inner, 12))) for inner in edges)
    assert min(map(step_s, splits)) == pytest.approx(best_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize("name", XLA)
def test_a_step_for_absent_gpus_takes_the_bytes_noted(name, number):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")
    from jaxpipe.compile import absent_gpus, compile_step, report  # here, since it fixes XLA's flags

    config = config_of(*SETTINGS[number])
    devices = absent_gpus(TOPOLOGY)[: config.mesh.data * config.mesh.pipe]
    step = compile_step(config, devices, gpus_per_node=4, **given(name))
    compiled = report(step, hardware_bytes=TOPOLOGY.hardware.memory_bytes).to_json()
    assert compiled["total_bytes"] == pytest.approx(XLA[name][number], rel=0.01)
