"""Muon: matrices orthogonalized each by itself, the same on every mesh, and a state that goes from one to another."""

import math
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from running import metrics, train

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import base_config, model_config
from jaxpipe.config.muon import NUM_ITERATIONS, join_columns, products_of, scale_by_muon, split_columns
from jaxpipe.estimate import Roofline, setting_of
from jaxpipe.estimate.parameters import update_matmuls
from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build
from jaxpipe.training.optimizer import make_optimizer
from jaxpipe.training.step import init_state, make_train_step

NUM_STEPS, NUM_MICROBATCHES, SEQ_LEN = 10, 4, 8
LARGEST_ERROR, LARGEST_CHANGE = 1e-5, 1e-3


def config(name: str = "muon"):
    found = base_config("llama")
    found.model.update(num_layers=4, hidden=16, num_heads=4, num_kv_heads=2, feed_forward=24, vocab_size=32)
    found.data.seq_len = SEQ_LEN
    found.train.steps = NUM_STEPS
    found.optimizer.update(name=name, learning_rate=0.02)
    return found


def trained(name: str, schedule: str, **axes: int) -> tuple[list[float], Any]:
    """Losses of ten steps, and the canonical parameters before and after."""
    made = config(name)
    model = LanguageModel(model_config(made), TensorAxis(axes.get("tensor", 1)))
    data, pipe = axes.get("data", 1), axes.get("pipe", 1)
    mesh = make_mesh(data=data, pipe=pipe, tensor=axes.get("tensor", 1))
    built = build(schedule, num_devices=pipe, num_microbatches=NUM_MICROBATCHES // data)
    pipeline = Pipeline(built, mesh, StageFunctions.of(model), num_layers=4)
    optimizer = make_optimizer(made)
    state = init_state(model, pipeline, optimizer, seed=0)
    before = jax.device_get(jax.jit(pipeline.from_stages)(state.params))
    step = make_train_step(model, pipeline, optimizer, None, max_grad_norm=1.0)
    losses = []
    for seed in range(NUM_STEPS):
        tokens = np.random.default_rng(seed).integers(32, size=(NUM_MICROBATCHES, 2, SEQ_LEN + 1), dtype=np.int32)
        tokens = tokens.reshape(NUM_MICROBATCHES // data, -1, SEQ_LEN + 1)
        state, metrics = step(state, {"tokens": tokens[..., :-1], "targets": tokens[..., 1:]})
        losses.append(float(metrics["loss"]))
    return losses, before, jax.device_get(jax.jit(pipeline.from_stages)(state.params))


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param("muon", "zb_v", marks=pytest.mark.slow),
        *(pytest.param(name, "1f1b", marks=pytest.mark.slow) for name in ("lion", "sgd")),
    ],
)
def test_ten_steps_on_eight_devices_are_those_of_one(name, schedule):
    losses, before, wanted = trained(name, "1f1b")
    found_losses, _, found = trained(name, schedule, data=2, pipe=2, tensor=2)
    assert found_losses == pytest.approx(losses, rel=LARGEST_ERROR)

    def error(one, other, start):
        return np.linalg.norm(one - other) / np.linalg.norm(other - start)

    errors = jax.tree.map(error, found, wanted, before)
    # Lion takes signs: where a momentum is noise about 0 they differ, so parameters are not compared.
    assert name == "lion" or max(jax.tree.leaves(errors)) <= LARGEST_CHANGE, errors


def test_queries_keys_and_values_are_three_matrices():
    anatomy = model_config(config()).anatomy
    columns = np.arange((4 + 2 * 2) * 4)
    kernel = np.tile(columns, (3, 16, 1)).astype(np.float32)
    tree = {"query_key_value": {"kernel": kernel}, "output": {"kernel": kernel}}
    apart = split_columns(tree, anatomy)
    # Each of two key-value heads has two queries, its key and its value, of four columns.
    expected = {"query": [*range(8), *range(16, 24)], "key": [*range(8, 12), *range(24, 28)]}
    expected["value"] = [*range(12, 16), *range(28, 32)]
    found = {name: part[0, 0].astype(int).tolist() for name, part in apart["query_key_value"]["kernel"].items()}
    assert found == expected
    jax.tree.map(np.testing.assert_array_equal, join_columns(apart, anatomy), tree)


def test_each_matrix_is_orthogonalized_by_itself():
    """Against optax, one two-dimensional matrix after the other; rows of zeros, which are no layer, stay zeros."""
    anatomy = model_config(config()).anatomy
    generator = np.random.default_rng(0)
    kernels = generator.normal(size=(2, 3, 16, 32)).astype(np.float32)
    kernels[1, 2] = 0
    given = {"query_key_value": {"kernel": kernels}, "up": {"kernel": kernels[..., :24]}}
    ours = scale_by_muon(anatomy, beta=0.95)
    state, found = ours.init(given), given
    for _ in range(2):
        found, state = jax.jit(ours.update)(given, state)

    def alone(matrix):
        optimizer = optax.contrib.scale_by_muon()
        state, update = optimizer.init(matrix), matrix
        for _ in range(2):
            update, state = jax.jit(optimizer.update)(matrix, state)
        return 0.2 * max(matrix.shape) ** 0.5 * np.asarray(update)

    for name, one in (("query_key_value", split_columns(found, anatomy)), ("up", found)):
        wanted = split_columns(given, anatomy)[name]["kernel"] if name == "query_key_value" else given[name]["kernel"]
        wanted = wanted if isinstance(wanted, dict) else {"all": wanted}
        parts = one[name]["kernel"] if name == "query_key_value" else {"all": one[name]["kernel"]}
        for key, part in parts.items():
            np.testing.assert_allclose(part[0, 1], alone(wanted[key][0, 1]), rtol=1e-4, atol=1e-5)
            assert not np.asarray(part[1, 2]).any()
    singular = np.linalg.svd(np.asarray(found["up"]["kernel"][0, 0]) / (0.2 * 24**0.5), compute_uv=False)
    assert 0.5 < singular.min() <= singular.max() < 1.5
    assert jnp.shape(state.momentum["up"]["kernel"]) == (2, 3, 16, 24)


@pytest.mark.slow
def test_its_state_goes_to_another_mesh_and_schedule_and_is_no_other_optimizers(tmp_path):
    muon = ["--config.optimizer.name=muon", "--config.optimizer.schedule=wsd", "--config.optimizer.warmup_fraction=0.0"]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert train(whole, *muon).returncode == 0
    assert train(moved, *muon, "--config.train.steps=6", "--config.optimizer.schedule=constant").returncode == 0
    # Six of twelve steps have the same rate either way; the last ones go down in a line.
    mesh = [
        "--config.mesh.pipe=3",
        "--config.mesh.data=1",
        "--config.mesh.tensor=2",
        "--config.pipeline.schedule=zb_h1",
    ]
    done = train(moved, *muon, *mesh)
    assert done.returncode == 0, done.stderr
    ours, theirs = ([row["loss"] for row in metrics(workdir)] for workdir in (moved, whole))
    assert ours == pytest.approx(theirs, rel=1e-4)
    refused = train(moved, "--config.train.steps=20")
    assert refused.returncode == 2
    assert "optimizer.name: muon -> adamw" in refused.stderr


def dot_flops(jaxpr) -> int:
    """FLOPs of all products in a jaxpr, loops counted once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(left[dim] for dim in contracted)
        total += sum(map(dot_flops, core.jaxprs_in_params(equation.params)))
    return total


@pytest.mark.parametrize("shape", [(6, 4), (4, 10)])
def test_the_estimator_counts_the_products_of_the_program(shape):
    """All are in the body of the loop over iterations."""
    optimizer = scale_by_muon(None, beta=0.9)
    tree = {"up": {"kernel": jnp.ones(shape)}}
    jaxpr = jax.make_jaxpr(optimizer.update)(tree, optimizer.init(tree))
    counted = sum(2 * rows * depth * columns for rows, depth, columns in products_of(*shape))
    assert counted == NUM_ITERATIONS * dot_flops(jaxpr.jaxpr) > 0


def test_the_update_of_muon_takes_longer_by_its_products():
    made = config("adamw")
    made.model.update(hidden=4096, num_heads=32, num_kv_heads=32, feed_forward=11008)
    made.mesh.pipe = 2
    topology = parse_topology("h100-80g:1x2")
    seconds = {}
    for name in ("adamw", "lion", "muon"):
        made.optimizer.name = name
        seconds[name] = Roofline(topology.hardware).times(setting_of(made, topology)).update_s
    matmuls = update_matmuls(setting_of(made, topology))
    assert seconds["adamw"] == seconds["lion"]
    # Two layers of a stage, of five kernels and five iterations of three products each.
    assert len(matmuls) == 5 * 5 * 3
    assert {matmul.num for matmul in matmuls} == {2}
    expected = sum(Roofline(topology.hardware).matmul_s(matmul, "float32") for matmul in matmuls)
    assert seconds["muon"] - seconds["adamw"] == pytest.approx(expected)
