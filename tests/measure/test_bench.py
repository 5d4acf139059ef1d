"""The benchmark runs, in one process and in two, and prints what it says it prints. Nothing timed is asserted."""

import itertools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from literature import layer_bytes
from tiers import tiers

from jaxpipe.config import base_config, check, model_config
from jaxpipe.estimate import resolve
from jaxpipe.measure import step_pair
from jaxpipe.measure.step_pair import make_step_pair
from jaxpipe.training import setup
from jaxpipe.training.setup import build_pipeline

KEYS = {
    *("schedule", "num_devices", "num_microbatches", "pipelined_cpu_s", "unpipelined_cpu_s", "work_ratio"),
    *("pipelined_wall_s", "unpipelined_wall_s", "compile_s", "argument_bytes", "temp_bytes", "alias_bytes"),
    *("slot_bytes", "num_slots", "expected_temp_bytes"),
    *("hlo_slot_copies", "hlo_gradient_copies"),
}
SMALL = {"model.hidden": 128, "data.seq_len": 64, "model.num_layers": 4, "mesh.pipe": 4, "pipeline.num_microbatches": 8}
HIDDEN_DROPOUT = {"model.hidden_dropout": 0.1}
FORMS = [("none", "xla"), ("attention", "xla"), ("full", "xla"), ("none", "chunked"), ("full", "chunked")]


def bench(*arguments, **fields):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    chosen = [f"--config.{field}={value}" for field, value in (SMALL | fields).items()]
    command = [
        sys.executable,
        "-m",
        "jaxpipe.bench",
        "--config=configs/bench_cpu.py",
        "--format=json",
        "--num_repeats=1",
    ]
    ran = subprocess.run([*command, *chosen, *arguments], capture_output=True, text=True, env=environment, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def tiny_config(family: str, *, tensor: int = 1, **model):
    """All sizes small and different; whether a GPT drops is in `model`."""
    config = base_config(family)
    config.model.update(num_layers=5, hidden=48, num_heads=4, **model)
    if family == "llama":
        config.model.update(num_kv_heads=2, feed_forward=104)
    config.data.update(batch_size=12, seq_len=24)
    config.pipeline.num_microbatches = 3
    config.mesh.update(data=2, pipe=2, tensor=tensor, platform="cpu")
    check(config)
    return config


@pytest.mark.slow
def test_one_process():
    numbers = bench()
    assert numbers.keys() == KEYS
    assert numbers["num_devices"] == numbers["num_slots"] == 4
    assert numbers["hlo_slot_copies"] == 0
    assert numbers["temp_bytes"] <= 1.1 * numbers["expected_temp_bytes"]
    assert numbers["alias_bytes"] > 0.9 * numbers["argument_bytes"]


@pytest.mark.slow
def test_dropout_over_a_tensor_axis():
    # Two layers a stage: with one, adding to its gradient sum writes all of it by nature. And so many words that
    # the head has more temporaries than a layer.
    numbers = bench(
        **HIDDEN_DROPOUT, **{"mesh.pipe": 2, "mesh.tensor": 2, "model.vocab_size": 8192, "data.batch_size": 16}
    )
    assert numbers.keys() == KEYS
    assert numbers["num_devices"] == numbers["num_slots"] == 2
    assert numbers["hlo_slot_copies"] == numbers["hlo_gradient_copies"] == 0
    assert numbers["temp_bytes"] <= 1.1 * numbers["expected_temp_bytes"]
    assert numbers["alias_bytes"] > 0.9 * numbers["argument_bytes"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_processes():
    numbers = bench("--num_processes=2", **HIDDEN_DROPOUT)
    lost = {f"lost_to_{what}" for what in ("bubble", "messages", "extra_work", "waiting")}
    of_cores = {"work_ratio_of_cores", "efficiency", "efficiency_of_cores", "efficiency_by_clock", "unequal_cores"}
    assert numbers.keys() == KEYS | of_cores | lost
    assert sum(numbers[name] for name in lost) + numbers["efficiency"] / numbers["efficiency_of_cores"] == (
        pytest.approx(1.0)
    )
    assert 0 < numbers["lost_to_messages"] < 1
    assert 0 < numbers["efficiency_by_clock"] <= 1
    assert numbers["num_devices"] == numbers["num_slots"] == 2
    assert 0 < numbers["efficiency"] < 2


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("batch", "seq_len", "hidden", "num_heads"), [(1, 2048, 12288, 96), (3, 24, 48, 4)])
def test_bytes_of_a_gpt_layer_are_those_of_the_paper(batch, seq_len, hidden, num_heads, tensor):
    """Korthikanti et al. 2023: equation 4 with tensor and sequence parallelism, table 2, 16 bits and dropout."""
    s, b, h, a, t = seq_len, batch, hidden, num_heads, tensor
    expected = {
        ("none", "xla"): (34 * s * b * h + 5 * a * s**2 * b) // t,
        ("attention", "xla"): 34 * s * b * h // t,
        ("none", "chunked"): 34 * s * b * h // t,
        ("full", "xla"): 2 * s * b * h // t,
        ("full", "chunked"): 2 * s * b * h // t,
    }
    assert set(expected) == set(FORMS)
    for (recompute, attention), num_bytes in expected.items():
        config = tiny_config("gpt", recompute=recompute, attention=attention, attention_dropout=0.1, hidden_dropout=0.1)
        config.model.update(hidden=h, num_heads=a)
        found = layer_bytes(model_config(config), batch=b, seq_len=s, tensor=t, itemsize=2)
        assert found == num_bytes


def test_bytes_of_a_llama_layer_are_counted_one_by_one():
    s, b, h, a, g, f, size = 24, 3, 48, 4, 2, 104, 12
    arrays = {
        "inputs of the two norms": 2 * h,
        "their results, which enter products": 2 * h,
        "queries": a * size,
        "keys and values": 2 * g * size,
        "attended values, which enter the output's product": a * size,
        "gate, up, and their product, which enters the last": 3 * f,
    }
    numbers = {"none": sum(arrays.values()) + a * s, "attention": sum(arrays.values()), "full": h}
    for (recompute, numbers_of_a_token), tensor, itemsize in itertools.product(numbers.items(), (1, 2), (2, 4)):
        config = model_config(tiny_config("llama", recompute=recompute))
        found = layer_bytes(config, batch=b, seq_len=s, tensor=tensor, itemsize=itemsize)
        assert found == s * b * numbers_of_a_token * itemsize // tensor


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("form", tiers(FORMS[:2], slow=FORMS[2:]), ids="-".join)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_slot_is_no_larger_than_the_literature_says(family, form, tensor, dtype):
    recompute, attention = form
    rates = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1} if family == "gpt" else {}
    config = tiny_config(family, tensor=tensor, recompute=recompute, attention=attention, dtype=dtype, **rates)
    model, pipeline = build_pipeline(resolve(config), jax.devices()[: 4 * tensor])
    params = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))
    tokens = jax.ShapeDtypeStruct((3, 4, 24), np.int32)  # microbatches of 4 sequences, 2 of them on a device
    slot_bytes = pipeline.shapes(params, {"tokens": tokens, "targets": tokens}).storage.slot_bytes
    formula = layer_bytes(model_config(config), batch=2, seq_len=24, tensor=tensor, itemsize=np.dtype(dtype).itemsize)
    assert max(pipeline.layers_per_stage) == 3
    assert slot_bytes <= 1.05 * 3 * formula


@pytest.fixture(scope="module")
def dropping_problem():
    config = tiny_config("gpt", tensor=2, embedding_dropout=0.2, attention_dropout=0.2, hidden_dropout=0.2)
    config.train.seed = 7
    return make_step_pair(config, tuple(jax.devices()[:8]))


@pytest.mark.slow
def test_both_sides_compute_the_same_with_dropout(dropping_problem):
    pair = dropping_problem
    (loss, grads), (expected_loss, expected) = pair.compile_pipelined()(), pair.compile_unpipelined()()
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    found = pair.pipeline.from_stages(grads)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # float32 sums in another order
        assert np.linalg.norm(np.asarray(leaf) - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_the_step_whose_bytes_are_measured_drops_as_the_trainers(dropping_problem, monkeypatch):
    def stop(*_, dropout_seed, **__):
        raise InterruptedError(f"dropout_seed={dropout_seed}")

    monkeypatch.setattr(setup, "make_train_step", stop)
    with pytest.raises(InterruptedError, match="dropout_seed=7"):
        step_pair.measure_memory(dropping_problem)
