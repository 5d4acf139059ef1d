"""Embedding and head that add their gradients to running sums themselves, against `jax.vjp` of the same functions."""

import dataclasses

import jax
import numpy as np
import pytest
from small_models import CONFIGS, DROPOUT, assert_near, batch_of, config_of, normal, random_params, randomness, stream
from tiers import tiers

from jaxpipe.models import LanguageModel
from jaxpipe.program import StageFunctions, ends

SCALES = {"masked_lm": np.float32(0.7), "sentence_order": np.float32(1.9)}


@pytest.mark.parametrize("tied", tiers([True], ci=[False]))
@pytest.mark.parametrize("family", CONFIGS)
def test_their_sums_are_those_of_vjp(family, tied):
    dropout = {"embedding_dropout": DROPOUT["embedding_dropout"]} if family != "llama" else {}
    config = config_of(family, tie_embeddings=tied, **dropout)
    model, shared, microbatch = LanguageModel(config), random_params(config)["shared"], batch_of(family)
    functions = StageFunctions.of(model)
    assert functions.embed_backward
    assert functions.head_backward
    plain = dataclasses.replace(functions, embed_backward=None, head_backward=None)
    sums = jax.tree.map(lambda leaf: normal(*leaf.shape, seed=leaf.size), shared)
    scale = SCALES if family == "bert" else SCALES["masked_lm"]

    def both(functions):
        return jax.jit(
            lambda shared, x, dx, sums: (
                ends.embed_backward(functions, shared, microbatch, randomness(), dx, sums),
                ends.head_backward(functions, shared, x, microbatch, scale, sums),
            )
        )(shared, stream(), stream(3), sums)

    assert_near(both(functions), both(plain))
