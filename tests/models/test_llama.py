"""LLaMA's config: how many parameters it asks for, what scaling does, and what it refuses."""

import jax
import pytest
from small_models import (
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    VOCAB_SIZE,
    config_of,
    first_layer,
    in_tiers,
    random_params,
    stream,
)

from jaxpipe.errors import ConfigError
from jaxpipe.models import LanguageModel
from jaxpipe.models.rotary import RotaryScaling


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_parameters_are_those_of_the_paper(tie_embeddings):
    config = config_of("llama", tie_embeddings=tie_embeddings)
    params = jax.eval_shape(LanguageModel(config).init, jax.random.key(0))
    h, size = HIDDEN, HIDDEN // NUM_HEADS
    # Queries and output h x h, keys and values each h x (kv heads x size); feed forward; two norms.
    per_layer = 2 * h * h + 2 * h * NUM_KV_HEADS * size + 3 * h * config.feed_forward + 2 * h
    assert sum(leaf.size for leaf in jax.tree.leaves(params["layers"])) == NUM_LAYERS * per_layer
    assert sum(leaf.size for leaf in jax.tree.leaves(params["shared"])) == VOCAB_SIZE * h * (2 - tie_embeddings) + h


def test_nothing_is_dropped():
    assert not config_of("llama").anatomy.has_dropout


@pytest.mark.parametrize(
    "change",
    in_tiers(
        [{"rope_theta": 1000.0}, {"rope_scaling": RotaryScaling(original_max_position=64)}, {"norm_epsilon": 1e-5}],
        default=[{"rope_scaling": RotaryScaling(original_max_position=64)}],
    ),
)
def test_what_a_config_says_of_rotation_and_norms_reaches_the_layer(change):
    params = first_layer(random_params(config_of("llama")))

    def layer(config):
        return jax.jit(lambda params, x: LanguageModel(config).layer(params, x, {}, None))(params, stream())

    assert abs(layer(config_of("llama")) - layer(config_of("llama", **change))).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 12}, "rule rotary-pairs"),
        ({"hidden": 12}, "set model.hidden=16"),
        ({"num_kv_heads": 3}, "rule grouped-heads"),
        ({"num_kv_heads": 8}, "set model.num_kv_heads=4"),
    ],
)
def test_bad_configs_are_refused_with_a_repair(changes, words):
    with pytest.raises(ConfigError, match="repair: set") as error:
        config_of("llama", **changes)
    assert words in str(error.value)
