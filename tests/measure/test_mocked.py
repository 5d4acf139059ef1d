"""One device's part of a step without the others of its cluster. Nothing timed is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters import mlir
from jax.sharding import PartitionSpec as P

from jaxpipe.compile import compile_step
from jaxpipe.config import base_config, check
from jaxpipe.config.base import RunConfig
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Times
from jaxpipe.estimate.measured import Measurement, read_costs
from jaxpipe.estimate.times import stage_seconds
from jaxpipe.measure import mock
from jaxpipe.measure.__main__ import main
from jaxpipe.measure.measurement import subject_of_config
from jaxpipe.measure.mocked_step import busy, compile_mocked, first_values, measure_mocked, put
from jaxpipe.mesh import local, make_mesh, on_devices
from jaxpipe.mesh.mocked import mocked_devices
from jaxpipe.training.batches import example_batch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def local_collectives():
    """Collectives as local operations, for one test: in a command they stay so."""
    before = {platform: dict(rules) for platform, rules in mlir._platform_specific_lowerings.items()}
    local.make_collectives_local()
    yield
    mlir._platform_specific_lowerings.clear()
    mlir._platform_specific_lowerings.update(before)
    local._replaced.clear()


def config_of(schedule="1f1b", pipe=2, *, microbatches=4, family="gpt", costs="auto", **mesh):
    config = base_config(family)
    config.model.update(num_layers=2 * pipe, hidden=16, num_heads=2, vocab_size=256)
    config.data.update(seq_len=8, batch_size=microbatches * mesh.get("data", 1))
    config.pipeline.update(schedule=schedule, num_microbatches=microbatches, costs=costs)
    config.mesh.update(pipe=pipe, platform="cpu", **mesh)
    check(config)
    return config


# ---- Collectives


def over_four(function):
    mesh = make_mesh(pipe=4, devices=jax.devices()[:4])
    return jax.jit(on_devices(function, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe")))


X = np.arange(4 * 8, dtype=np.float32).reshape(4 * 4, 2)  # on each device [4, 2]
OWN = X.reshape(4, 4, 2)
COLLECTIVES = {
    "sum": (lambda x: lax.psum(x, "pipe"), OWN),
    "max": (lambda x: lax.pmax(x, "pipe"), OWN),
    "gather": (lambda x: lax.all_gather(x, "pipe"), np.repeat(OWN[:, None], 4, 1)),
    "gather, tiled": (lambda x: lax.all_gather(x, "pipe", axis=1, tiled=True), np.tile(OWN, (1, 1, 4))),
    "scattered sum": (lambda x: lax.psum_scatter(x, "pipe", tiled=True), OWN[:, :1]),
    "scattered sum, a dim less": (lambda x: lax.psum_scatter(x, "pipe"), OWN[:, 0]),
    "exchange": (lambda x: lax.all_to_all(x, "pipe", 0, 0), OWN),
    "exchange, tiled": (lambda x: lax.all_to_all(x, "pipe", 0, 1, tiled=True), OWN.reshape(4, 1, 8)),
    "integers sent": (lambda x: lax.ppermute(x.astype(int), "pipe", [(0, 1)]).astype(float), OWN),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_local_collective_has_the_shape_of_the_real_one_and_numbers_of_its_device(name, local_collectives):
    collective, wanted = COLLECTIVES[name]
    found = over_four(lambda x: collective(x)[None])(X)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_shapes_are_those_of_jax_itself(name):
    collective, wanted = COLLECTIVES[name]
    assert over_four(lambda x: collective(x)[None])(X).shape == wanted.shape


def test_what_is_received_is_no_zero_and_does_not_grow(local_collectives):
    send = over_four(lambda x: lax.fori_loop(0, 100, lambda _, x: lax.ppermute(x, "pipe", [(0, 1)]), x))
    for first in (0.0, 1.0):
        found = np.asarray(send(np.full_like(X, first)))
        assert len(np.unique(found[:4])) == 8
        assert 0 < np.abs(found[1:]).max() < 0.1
    assert over_four(lambda x: lax.ppermute(x, "pipe", [(0, 1)]))(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


# ---- The step


def results_of(step, config, *, num_steps=2):
    """The train state after some steps, the metrics of all; the last is the gradient's norm."""
    state, batch, metrics = first_values(step.state), put(step.batch, example_batch(config)), []
    for _ in range(num_steps):
        state, found = step.compiled(state, lambda: batch)
        metrics.append(found)
    return state, metrics, metrics[-1]["grad_norm"]


def part_on(device, tree):
    return [[np.asarray(part.data) for part in leaf.addressable_shards if part.device == device] for leaf in tree]


STEPS = [
    pytest.param(config_of(), 1, id="1F1B", marks=pytest.mark.slow),
    pytest.param(config_of("bitpipe"), 1, id="BitPipe", marks=pytest.mark.slow),
    pytest.param(config_of(family="llama", tensor=2, data=2), 1, id="tensor and data", marks=pytest.mark.ci),
    pytest.param(config_of("zb_v"), 0, id="ZB-V", marks=pytest.mark.slow),
    pytest.param(config_of("bpipe", 4, microbatches=5), 1, id="BPipe", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("config", "stage"), STEPS)
def test_a_device_alone_computes_what_it_computes_among_all(config, stage, local_collectives):
    num_devices = config.mesh.pipe * config.mesh.tensor * config.mesh.data
    together = compile_step(config, jax.devices()[:num_devices], gpus_per_node=num_devices, whole_batch=True)
    devices = mocked_devices(1, num_devices, platform="cpu")
    alone = compile_mocked(config, devices, gpus_per_node=num_devices, stage=stage)
    assert [device in alone.pipeline.mesh.local_devices for device in devices] == [True] + [False] * (num_devices - 1)
    place = together.pipeline.mesh.devices[0, 0, stage].reshape(-1)[0]
    wanted, found = (jax.tree.leaves(results_of(step, config)) for step in (together, alone))
    for expected, part in zip(part_on(place, wanted), part_on(devices[0], found), strict=True):
        np.testing.assert_array_equal(expected, part)
    assert 0 < found[-1].addressable_data(0) < np.inf


def costs_file(path, config):
    """A file of times, made up."""
    times = Times(0.1, 0.2, 0.1, 0.1, 0.01, 0.02, 0.3, 0.05)
    made = Measurement({"device_kind": "cpu"}, subject_of_config(config), {1: times}, {1: 0.0}, 100, 50, 250, None)
    path.write_text(json.dumps(made.to_json()))
    return str(path)


@pytest.mark.ci
def test_a_plan_reads_costs_that_add_up_to_the_step(tmp_path, local_collectives):
    path = costs_file(tmp_path / "costs.json", config_of())
    config = config_of(costs=path)
    step = compile_mocked(config, mocked_devices(1, 2, platform="cpu"), gpus_per_node=2, stage=1)
    found, measurement = measure_mocked(step, config, gpus_per_node=2, stage=1, num_repeats=2)
    # Two layers and the head, four microbatches, and the update of as many parameters as the file says.
    update_s = 0.05 * (2 * 100 + 50 / 2) / 250
    # Kernels of attention, of the feed forward, their biases, and two norms.
    assert measurement.num_layer_parameters == 4 * 16 * 16 + 2 * 4 * 16 * 16 + (4 + 4 + 1 + 2 * 2) * 16
    assert found.busy_s == pytest.approx(4 * (2 * 0.1 + 2 * 0.2 + 0.3) + update_s)
    assert found.busy_forwards == 4 * (1 + 2)
    scaled = read_costs(write(tmp_path / "mocked.json", measurement)).measurements[0].times[1]
    schedule = step.compiled.schedule
    assert busy(schedule, 1, stage_seconds(scaled, (2, 2))) + scaled.update_s == pytest.approx(found.step_s)
    assert scaled.layer_backward_s / scaled.layer_forward_s == pytest.approx(2.0)
    assert found.num_skipped == 0
    assert found.peak_bytes is None  # a CPU's allocator does not count
    assert "0 .. 1" not in mock.to_text(found, RunConfig.of(config), device_kind="cpu", num_repeats=2)


def write(path, measurement):
    path.write_text(json.dumps(measurement.to_json() | {"mock": {}}))
    return path


# ---- The command

PIPE_4 = ("--config=configs/bench_cpu.py", "--config.mesh.pipe=4")
WRONG = {
    "no cluster": (("--mock=a", "--stage=1"), "--mock=1x4"),
    "another mesh": (("--mock=2x3", "--stage=1"), "1 x 4 x 1 x 1 x 1 = 4, not 2 x 3 = 6"),
    "no stage": (("--mock=2x2",), "--mock without --stage"),
    "a stage too far": (("--mock=2x2", "--stage=4"), "0 .. 3"),
    "a stage before": (("--mock=2x2", "--stage=-1"), "0 .. 3"),
    "a stage of nothing": (("--stage=0",), "--stage=0 has no effect"),
    "parts of a step": (("--mock=2x2", "--stage=0", "--num_layers=3"), "--num_layers=3 has no effect"),
    "no flush": (("--mock=2x2", "--stage=0", "--config.pipeline.schedule=pipedream_2bw"), "without flush"),
    "many": (("--mock=600x4", "--stage=0", "--config.mesh.data=600", "--config.data.batch_size=9600"), "at most 512"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_before_anything_starts(wrong, capsys, monkeypatch):
    monkeypatch.setattr(mock, "mocked_devices", lambda *_, **__: pytest.fail("the devices were asked for"))
    monkeypatch.setattr(mock, "make_collectives_local", lambda: pytest.fail("collectives were replaced"))
    monkeypatch.chdir(ROOT)
    arguments, said = WRONG[wrong]
    assert main([*PIPE_4, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_only_a_gpu_skips_collectives(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main([*PIPE_4, "--mock=2x2", "--stage=0", "--collectives=skipped"]) == 2
    assert "on a CPU each would wait" in capsys.readouterr().err


def test_jax_without_the_option_is_named(monkeypatch):
    monkeypatch.setattr("jaxpipe.mesh.mocked._OPTION", "jax_mock_gone")
    with pytest.raises(ConfigError, match=f"jax {jax.__version__} has no jax_mock_gone"):
        mocked_devices(1, 2, platform="gpu")


class Gpu(NamedTuple):
    """A GPU that JAX stands for."""

    process_index: int
    id: int


@pytest.mark.parametrize("num_told", [8, 1])
def test_jax_is_asked_for_the_gpus_of_the_cluster(num_told, monkeypatch):
    asked = {}
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.update({name: value}))
    monkeypatch.setattr(jax, "devices", lambda platform: [Gpu(k, k) for k in reversed(range(num_told))])
    if num_told == 1:  # what JAX says once it has started
        with pytest.raises(ConfigError, match="stands for 1 GPUs, not for 8"):
            mocked_devices(2, 4, platform="gpu")
    else:
        assert mocked_devices(2, 4, platform="gpu") == tuple(Gpu(k, k) for k in range(8))
    assert asked == {"jax_cuda_visible_devices": "0", "jax_mock_gpu_topology": "2x4x1"}
    assert "--xla_gpu_shard_autotuning=false" in os.environ["XLA_FLAGS"]


@pytest.mark.slow
def test_collectives_of_the_partitioner_are_refused(local_collectives):
    config = config_of(data=2)
    config.optimizer.name = "muon"
    check(config)
    with pytest.raises(ConfigError, match=r"optimizer\.name='muon'"):
        compile_mocked(config, mocked_devices(1, 4, platform="cpu"), gpus_per_node=4, stage=0)


# ---- The program for absent GPUs

KINDS = """
import json
from collections import Counter
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import absent_gpus, compile_step
from jaxpipe.compile.hlo import computations
from jaxpipe.config import base_config, check
from jaxpipe.measure.mocked_step import compile_mocked
from jaxpipe.mesh.local import make_collectives_local

config = base_config("llama")
config.model.update(num_layers=4, hidden=256, num_heads=4, vocab_size=512)
config.data.update(seq_len=128, batch_size=8)
config.pipeline.update(schedule="1f1b", num_microbatches=4)
config.mesh.update(pipe=2, tensor=2)
check(config)
devices = absent_gpus(parse_topology("h100-80g:1x4"))


def kinds(step):
    instructions = [i for found in computations(step.compiled.as_text())[0].values() for i in found.instructions]
    return Counter(i.opcode for i in instructions)


told = [kinds(compile_step(config, devices, gpus_per_node=4))]
told.append(kinds(compile_mocked(config, devices, gpus_per_node=4, stage=1)))
make_collectives_local()
told.append(kinds(compile_mocked(config, devices, gpus_per_node=4, stage=1)))
print(json.dumps(told))
"""


@pytest.mark.slow
def test_the_program_is_the_one_that_is_compiled_for_absent_gpus():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")
    done = subprocess.run(
        [sys.executable, "-c", KINDS],
        cwd=ROOT,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    whole, skipped, local_ones = json.loads(done.stdout.splitlines()[-1])
    assert skipped == whole
    assert any("permute" in kind for kind in whole)
    assert not any(kind.startswith(("collective", "all-", "reduce-scatter")) for kind in local_ones)
    # What computes: products by cuBLAS, and the loops and branches that guard it.
    for kind in ("custom-call", "while", "conditional"):
        assert local_ones[kind] == whole[kind], kind
