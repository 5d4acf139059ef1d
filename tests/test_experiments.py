"""The experiments' scripts at small size, and what they read off compiled programs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpipe.config.base import base_config
from jaxpipe.program.hlo import overlapped_permutes

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def experiment(name):
    """The module of an experiment's script."""
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", EXPERIMENTS / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_steps_temporaries_are_what_is_held_and_the_largest_part_of_an_action():
    config = base_config("gpt")
    config.model.num_layers, config.model.hidden, config.model.num_heads = 4, 256, 4
    config.model.vocab_size = 2048
    config.model.attention_dropout = config.model.hidden_dropout = 0.1
    config.mesh.pipe, config.mesh.tensor = 2, 2
    config.pipeline.num_microbatches, config.data.batch_size, config.data.seq_len = 4, 4, 192
    report = experiment("003_gpt3_13b_without_a_gpu").compile_step(config, jax.devices()[:4])
    # At this size XLA's CPU backend needs a few per cent more, in buffers of a few KB.
    assert report.temp_bytes == pytest.approx(report.accounted_bytes, rel=0.05)
    assert max(report.workspace.values()) > 0.1 * report.temp_bytes  # so that one left out is seen
    assert report.pool_writes == report.sum_writes == 0


PERMUTES = """
%product (a: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2] parameter(0)
  ROOT %gemm = (f32[2,2], s8[4]) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul"
}
%action (a: f32[2,2]) -> f32[2,2] {
  %a.1 = f32[2,2] parameter(0)
  ROOT %inner = f32[2,2] while(%a.1), condition=%always, body=%product
}
%copies (a: f32[2,2]) -> f32[2,2] {
  %a.2 = f32[2,2] parameter(0)
  ROOT %copy = f32[2,2] copy(%a.2)
}
ENTRY %main (a: f32[2,2]) -> f32[2,2] {
  %x = f32[2,2] parameter(0)
  %start = (f32[2,2], f32[2,2]) collective-permute-start(%x), source_target_pairs={{0,1}}
FIRST
  %done = f32[2,2] collective-permute-done(%start)ATTRIBUTES
  ROOT %last = f32[2,2] while(%done), condition=%always, body=%action
}
"""


@pytest.mark.parametrize(
    ("first", "attributes", "hidden"),
    [
        ("  %w = f32[2,2] while(%x), condition=%always, body=%action", "", 1),
        ("  %w = f32[2,2] while(%x), condition=%always, body=%action", ', backend_config={"is_sync":true}', 0),
        ("  %w = f32[2,2] while(%x), condition=%always, body=%copies", "", 0),
        ("  %w = f32[2,2] copy(%x)", "", 0),
    ],
    ids=["behind an action", "synchronous", "behind copies", "nothing between"],
)
def test_a_permute_is_hidden_by_an_action_between_its_start_and_its_end(first, attributes, hidden):
    text = PERMUTES.replace("FIRST", first).replace("ATTRIBUTES", attributes)
    assert overlapped_permutes(text) == (1, hidden)


COMPILE_FOR_GPUS = """
import json, jax, jax.numpy as jnp
from jaxpipe.bench.absent_gpus import absent_gpus
devices = absent_gpus(4)
from jaxpipe.mesh import make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.hlo import overlapped_permutes
from jaxpipe.schedules import build

model = LanguageModel(GPTConfig(num_layers=8, hidden=64, num_heads=2, vocab_size=128, seq_len=32))
schedule = build("1f1b", num_devices=4, num_microbatches=8)
mesh = make_mesh(data=1, pipe=4, tensor=1, devices=devices)
pipeline = Pipeline(schedule, mesh, StageFunctions.of(model), num_layers=8, dtype="bfloat16")
params = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))
tokens = jax.ShapeDtypeStruct((8, 1, 32), jnp.int32)
compiled = pipeline.loss_and_grads.lower(params, {"tokens": tokens, "targets": tokens}, 1.0).compile()
print(json.dumps({"kind": devices[0].device_kind, "permutes": overlapped_permutes(compiled.as_text())}))
"""


def test_every_permute_of_1f1b_is_hidden_in_the_program_for_absent_gpus():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA plugin compiles for GPUs that are not there")
    script = subprocess.run([sys.executable, "-c", COMPILE_FOR_GPUS], capture_output=True, text=True, check=True)
    report = json.loads(script.stdout.splitlines()[-1])
    assert "A100" in report["kind"]
    assert report["permutes"] == [4, 4]


@pytest.fixture
def block():
    pytest.importorskip("torch", reason="experiment 004 compares with PyTorch")
    return experiment("004_block_on_a_gpu")


@pytest.mark.parametrize("name", ["gpt3_13b", "llama3_8b"])
def test_our_block_and_pytorchs_have_the_same_outputs_and_gradients(block, name):
    assert block.difference(block.small_case(name, "cpu")) < 1e-4


def test_a_block_with_other_rotary_frequencies_is_seen_to_differ(block, monkeypatch):
    plain = block.frequencies
    monkeypatch.setattr(block, "frequencies", lambda *arguments: [1.01 * f for f in plain(*arguments)])
    with pytest.raises(ValueError, match="differ by"):
        block.compare("llama3_8b", block.small_case("llama3_8b", "cpu"))


def test_flops_of_a_block_are_those_of_the_literature(block):
    """Narayanan et al., SC 2021, section 5.1: 24 B s h^2 + 4 B s^2 h forward, and twice that backward."""
    s, h = 2048, 5120
    assert block.block_flops(block.full_case("gpt3_13b", "gpu")) == 3 * 4 * (24 * s * h**2 + 4 * s**2 * h)
    s, h, width, key_and_value = 8192, 4096, 14336, 2 * 8 * 128
    kernels = h * (2 * h + key_and_value + 3 * width)
    assert block.block_flops(block.full_case("llama3_8b", "gpu")) == 3 * (2 * s * kernels + 4 * s**2 * h)
