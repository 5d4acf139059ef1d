"""Shapes of a model's parameters: those of its arrays, and their number by what papers and published weights say."""

import subprocess
import sys
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.models import BertConfig, GPTConfig, LanguageModel, LlamaConfig, parameter_shapes

SMALL: dict[str, Any] = {"num_layers": 2, "hidden": 24, "num_heads": 4, "vocab_size": 50, "vocab_multiple": 8}
CHOICES = {
    "gpt, untied": GPTConfig(**SMALL, num_positions=16, tie_embeddings=False),
    "gpt, narrow": GPTConfig(**SMALL, num_positions=16, feed_forward=32),
    "bert, tokens alone": BertConfig(**SMALL, num_positions=16, num_token_types=0, sentence_order=False),
    "bert, untied": BertConfig(**SMALL, num_positions=16, tie_embeddings=False),
    "llama, tied": LlamaConfig(**SMALL, num_kv_heads=2, feed_forward=40, tie_embeddings=True),
    "llama, biases and heads": LlamaConfig(
        **SMALL, num_kv_heads=2, feed_forward=40, head_size=10, query_key_value_bias=True, output_bias=True
    ),
    "llama, all biases": LlamaConfig(**SMALL, num_kv_heads=4, feed_forward=40, feed_forward_bias=True),
}


def num_parameters(config) -> int:
    shapes = parameter_shapes(config)
    layer, shared = (sum(shape.size for shape in each) for each in (shapes.layer, shapes.shared))
    return config.num_layers * layer + shared


@pytest.mark.parametrize("config", CHOICES.values(), ids=CHOICES)
def test_shapes_and_splits_are_those_of_the_arrays(config):
    params = jax.eval_shape(LanguageModel(config).init, jax.random.key(0))
    found, specs = parameter_shapes(config), LanguageModel(config).specs
    for name, shapes, first_dim in (("layers", found.layer, 1), ("shared", found.shared, 0)):
        dims = [leaf.shape[first_dim:] for leaf in jax.tree.leaves(params[name])]
        splits = [tuple(spec) for spec in jax.tree.leaves(specs[name], is_leaf=lambda leaf: isinstance(leaf, P))]
        expected = [(None,) * shape.split + ("tensor",) if shape.split is not None else () for shape in shapes]
        assert sorted(zip(dims, splits, strict=True)) == sorted(
            zip([shape.dims for shape in shapes], expected, strict=True)
        )


def test_what_is_split_over_tensor_by_hand():
    """Columns of what comes from the stream with their biases, rows of what goes back, rows of the tables."""
    (layer, shared) = (parameter_shapes(CHOICES["gpt, narrow"]).layer, parameter_shapes(CHOICES["gpt, narrow"]).shared)
    assert sorted((shape.dims, shape.split) for shape in layer if shape.split is not None) == [
        ((24, 24), 0),
        ((24, 32), 1),
        ((24, 72), 1),
        ((32,), 0),
        ((32, 24), 0),
        ((72,), 0),
    ]
    assert [(shape.dims, shape.split) for shape in shared if shape.split is not None] == [((56, 24), 0)]


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
        # MegatronBertForPreTraining of transformers with the sizes of BERT base: 12 layers of 12 h^2 + 13 h; tables of
        # 30522 + 512 + 2 rows; final norm 2 h; transform h^2 + h and its norm 2 h; a bias of 30522; pooler h^2 + h;
        # order 2 h + 2.
        (
            BertConfig(num_layers=12, hidden=768, num_heads=12, vocab_size=30522, num_positions=512),
            12 * (12 * 768**2 + 13 * 768) + 31036 * 768 + 2 * 768**2 + 8 * 768 + 30522 + 2,
        ),
    ],
)
def test_numbers_of_models_that_are_known(config, number):
    assert num_parameters(config) == number


@pytest.mark.ci
def test_no_device_is_asked():
    """The shapes are found without a JAX backend, as on the front node of a cluster."""
    code = """
from jax._src import xla_bridge
from jaxpipe.models import GPTConfig, parameter_shapes
parameter_shapes(GPTConfig(num_layers=96, hidden=12288, num_heads=96, vocab_size=51200, num_positions=2048))
assert not xla_bridge._backends, xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", code], check=True)
