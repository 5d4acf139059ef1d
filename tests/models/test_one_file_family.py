"""A family that one file outside the package defines: trained, estimated, planned and compiled as those inside."""

import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from small_models import assert_near, random_params

from jaxpipe import plan, sample, train
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import __main__ as compile_command
from jaxpipe.compile.step import compile_step
from jaxpipe.config import base_config, check, model_config
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Roofline, estimate, memory, resolve, setting_of
from jaxpipe.estimate.products import flops
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.estimate.work import head_matmuls
from jaxpipe.models import FAMILIES, Family, LanguageModel, family_named, parameter_shapes, register_family
from jaxpipe.models.flops import model_flops
from jaxpipe.program.held_bytes import held_bytes
from jaxpipe.training.setup import build_pipeline

FILE = str(Path(__file__).with_name("a_family.py"))
TOPOLOGY = parse_topology("a100-80g:1x8")
CONFIG = f"""
from jaxpipe.config import base_config

def get_config(arg=""):
    config = base_config({FILE!r})
    config.model.update(num_layers=3, hidden=16, num_heads=4)
    config.data.update(files="jaxpipe/models/*.py", batch_size=8, seq_len=16)
    config.mesh.update(pipe=2, platform="cpu")
    config.pipeline.num_microbatches = 4
    config.train.update(steps=6, eval_every=6, eval_batches=1)
    config.checkpoint.save_every = 0
    return config
"""


def small_config(**changes):
    names = {}
    exec(CONFIG, names)
    config = names["get_config"]()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    check(config)
    return config


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return f"--config={path}"


def microbatches(config):
    """[microbatch, sequence, token], a fifth of the targets not valid."""
    shape = (config.pipeline.num_microbatches, config.data.batch_size // config.pipeline.num_microbatches)
    generator = np.random.default_rng(3)
    tokens = generator.integers(config.model.vocab_size, size=(*shape, config.data.seq_len + 1), dtype=np.int32)
    targets = np.where(generator.random(tokens.shape) < 0.2, -1, tokens)[..., 1:]
    return {"tokens": tokens[..., :-1], "targets": targets}


@pytest.mark.ci
def test_it_trains_and_is_sampled_by_the_commands(config_file, tmp_path, capsys):
    workdir, mine = f"--workdir={tmp_path / 'run'}", tmp_path / "mine.py"
    shutil.copy(FILE, mine)
    (tmp_path / "config.py").write_text(CONFIG.replace(repr(FILE), repr(str(mine))))
    assert train.main([config_file, workdir, "--config.model.expansion=2"]) == 0
    mine.unlink()  # the run keeps the family's file
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(math.log(256), abs=0.7)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["expansion"] == 2
    assert sample.main([workdir, "--prompt=def ", "--num_tokens=3"]) == 0
    assert "def " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "tensor"),
    [pytest.param("1f1b", 1, marks=pytest.mark.ci), pytest.param("zb_h1", 2, marks=pytest.mark.slow)],
)
def test_gradients_through_the_pipeline_are_those_of_plain_grad(schedule, tensor):
    config = small_config(pipeline__schedule=schedule, mesh__tensor=tensor)
    model, pipeline = build_pipeline(resolve(config), jax.devices()[: 2 * tensor])
    params, batch = random_params(model.config), microbatches(config)
    scale = 1 / (batch["targets"] >= 0).sum()
    loss, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch, scale)

    def plain(params):
        one = LanguageModel(model.config)
        return (
            sum(
                one.loss_sum(params, jax.tree.map(lambda leaf, m=m: leaf[m], batch))
                for m in range(len(batch["tokens"]))
            )
            * scale
        )

    expected = jax.jit(jax.value_and_grad(plain))(params)
    assert_near((loss, jax.jit(pipeline.from_stages)(grads)), expected)


@pytest.mark.parametrize(
    ("schedule", "tensor", "recompute", "attention"),
    [("1f1b", 1, "none", "xla"), ("zb_h1", 2, "none", "chunked"), ("zb_h1", 1, "full", "xla")],
)
def test_its_bytes_are_estimated_as_its_program_says(schedule, tensor, recompute, attention):
    config = small_config(
        pipeline__schedule=schedule, mesh__tensor=tensor, model__recompute=recompute, model__attention=attention
    )
    setting = setting_of(config, TOPOLOGY)
    model, pipeline = build_pipeline(resolve(config), jax.devices()[: 2 * tensor])
    params = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), microbatches(config))
    shapes, layer = pipeline.shapes(params, batch, random=False), traced_layer(setting)
    saved = shapes.storage.saved
    assert [array.size for array in layer.saved.residuals] == [array.size for array in saved.residuals]
    if schedule == "zb_h1":
        assert [array.size for array in layer.saved.deferred] == [array.size for array in saved.deferred]
    found, said = memory(setting), held_bytes(shapes)
    assert found.weights == said["weights"]
    assert found.gradients == said["gradients"]
    assert found.slots + found.weight_slots == said["pages"] + said["left"]


def test_its_parameters_and_flops_by_hand():
    model = model_config(small_config())
    shapes = parameter_shapes(model)
    # Queries, keys and values of 4 and twice 2 heads; back; gate and up; down; two norms.
    assert sum(shape.size for shape in shapes.layer) == 16 * 32 + 16 * 16 + 2 * 16 * 48 + 48 * 16 + 2 * 16
    assert sum(shape.size for shape in shapes.shared) == 256 * 16 + 16
    per_token = 3 * (16 * 32 + 16 * 16 + 3 * 16 * 48 + 2 * 16 * 16) + 256 * 16
    assert model_flops(model, seq_len=16) == 3 * 2 * 16 * per_token
    setting = setting_of(small_config(), TOPOLOGY)
    of_layer = traced_layer(setting)
    counted = 3 * flops(of_layer.forward + of_layer.backward) + flops(head_matmuls(setting))
    assert counted == setting.microbatch_size * model_flops(model, seq_len=16)


@pytest.mark.slow
def test_a_step_is_estimated_and_planned(config_file, capsys):
    found = estimate(setting_of(small_config(), TOPOLOGY), Roofline(TOPOLOGY.hardware))
    assert 0 < found.step_s < 1
    assert plan.main([config_file, "--topology=a100-80g:1x2", "--top=3", "--format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 3
    assert rows[0]["step_s"] <= rows[1]["step_s"]


@pytest.mark.slow
def test_a_step_compiles_on_cpus():
    step = compile_step(small_config(), jax.devices()[:2])
    found = memory(setting_of(small_config(), TOPOLOGY))
    # The counter of steps skipped in a row and others are a few bytes.
    assert step.compiled.memory_analysis().argument_size_in_bytes == found.optimizer + found.batch


@pytest.mark.slow
def test_a_step_compiles_for_gpus_that_are_not_there(config_file, capsys):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")
    sizes = ["hidden=1024", "num_heads=16", "vocab_size=32768", "num_layers=4", "dtype=bfloat16"]
    changes = [f"--config.model.{size}" for size in sizes]
    arguments = ["--config.data.seq_len=1024", "--config.mesh.platform=auto", "--topology=a100-80g:1x2"]
    assert compile_command.main([config_file, *changes, *arguments, "--format=json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["predicted_bytes"] == pytest.approx(found["total_bytes"], rel=0.05)


def test_what_cannot_be_divided_over_tensor_is_said():
    with pytest.raises(ConfigError, match=r"mesh.tensor=4 does not divide model.num_kv_heads=2"):
        small_config(mesh__tensor=4)


def test_a_family_is_registered_once():
    family = family_named(FILE)
    assert family is family_named(f"{FILE}:side_by_side")
    try:
        assert register_family(family) is family is register_family(family) is family_named("side_by_side")
        check(base_config("side_by_side"))
        with pytest.raises(ConfigError, match="rule family-name"):
            register_family(Family("side_by_side", fields={}, build=family.build))
    finally:
        FAMILIES.pop("side_by_side", None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "gtp",
            [
                "model.family='gtp' is not known. Did you mean 'gpt'?",
                "one of bert, deepseek_v3, gpt, gpt_oss, llama, mixtral, qwen3_moe, or a",
            ],
        ),
        ("no_such_file.py", ["no_such_file.py' is not a file", "rule family-file"]),
        (f"{FILE}:other", ["does not say which family is meant", "side_by_side"]),
        ("empty.py", ["'empty.py' defines no family", "define a Family in the file"]),
        ("broken.py", ["cannot be run: ZeroDivisionError", "line 1: 1 / 0"]),
    ],
)
def test_a_family_that_is_not_there_is_an_error(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("from jaxpipe.models.gpt import GPT\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError) as error:
        base_config(name)
    for word in [*words, "  rule ", "  repair: "]:
        assert word in str(error.value)
