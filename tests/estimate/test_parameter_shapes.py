"""Parameters, counted, against the models' own and against what their papers say."""

import runpy
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.config import model_config
from jaxpipe.estimate.parameter_shapes import layer_shapes, shared_shapes
from jaxpipe.mesh import TensorAxis
from jaxpipe.models import BertConfig, GPTConfig, LanguageModel, LlamaConfig

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*_*.py") if not path.stem.startswith(("bench", "quickstart")))
SMALL: dict[str, Any] = {"num_layers": 2, "hidden": 24, "num_heads": 4, "vocab_size": 50, "vocab_multiple": 8}
CHOICES = {
    "gpt, untied": GPTConfig(**SMALL, num_positions=16, tie_embeddings=False),
    "gpt, narrow": GPTConfig(**SMALL, num_positions=16, feed_forward=32),
    "bert, words alone": BertConfig(**SMALL, num_positions=16, num_token_types=0, sentence_order=False),
    "bert, untied": BertConfig(**SMALL, num_positions=16, tie_embeddings=False),
    "llama, tied": LlamaConfig(**SMALL, num_kv_heads=2, feed_forward=40, tie_embeddings=True),
    "llama, biases and heads": LlamaConfig(
        **SMALL, num_kv_heads=2, feed_forward=40, head_size=10, query_key_value_bias=True, output_bias=True
    ),
    "llama, all biases": LlamaConfig(**SMALL, num_kv_heads=4, feed_forward=40, feed_forward_bias=True),
}


def counted(config):
    """What we count, (dims, split), in any order."""
    return [sorted((shape.dims, shape.split) for shape in of(config)) for of in (layer_shapes, shared_shapes)]


def traced(config):
    """What the model makes."""
    model = LanguageModel(config, TensorAxis(2))
    params = jax.eval_shape(LanguageModel(config).init, jax.random.key(0))

    def pairs(name, first_dim):
        shapes = [leaf.shape[first_dim:] for leaf in jax.tree.leaves(params[name])]
        specs = jax.tree.leaves(model.specs[name], is_leaf=lambda leaf: isinstance(leaf, P))
        splits = [spec.index("tensor") if "tensor" in spec else None for spec in map(tuple, specs)]
        return sorted(zip(shapes, splits, strict=True), key=str)

    return [pairs("layers", 1), pairs("shared", 0)]


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_of_a_preset_are_those_of_its_model(preset):
    config = model_config(runpy.run_path(str(CONFIGS / f"{preset}.py"))["get_config"]())
    assert [sorted(each, key=str) for each in counted(config)] == traced(config)


@pytest.mark.parametrize("config", CHOICES.values(), ids=CHOICES)
def test_parameters_of_every_choice_are_those_of_its_model(config):
    assert [sorted(each, key=str) for each in counted(config)] == traced(config)


@pytest.mark.parametrize(
    ("config", "number"),
    [
        # GPT-2 small, LLaMA 7B and Llama 3 70B: numbers of the published weights, as Hugging Face counts them.
        (GPTConfig(num_layers=12, hidden=768, num_heads=12, vocab_size=50257, num_positions=1024), 124_439_808),
        (
            LlamaConfig(
                num_layers=32, hidden=4096, num_heads=32, num_kv_heads=32, feed_forward=11008, vocab_size=32000
            ),
            6_738_415_616,
        ),
        (
            LlamaConfig(
                num_layers=80, hidden=8192, num_heads=64, num_kv_heads=8, feed_forward=28672, vocab_size=128256
            ),
            70_553_706_496,
        ),
    ],
)
def test_numbers_of_models_that_are_known(config, number):
    layer, shared = (sum(shape.size for shape in of(config)) for of in (layer_shapes, shared_shapes))
    assert config.num_layers * layer + shared == number


def test_a_device_of_tensor_has_its_part_of_what_is_split():
    (kernel,) = [shape for shape in shared_shapes(CHOICES["gpt, narrow"]) if shape.split == 0]
    assert kernel.dims == (56, 24)
    assert kernel.local_dims(4) == (14, 24)
