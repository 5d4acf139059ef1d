"""Flax modules in a pipeline: the same numbers as called one after the other, dropout on every mesh, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe.errors import CompileError
from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build
from jaxpipe.training.from_nnx import from_nnx

WORDS, WIDTH, NUM_BLOCKS, RATE = 16, 8, 4, 0.25


class Block(nnx.Module):
    """LayerNorm, MultiHeadAttention and Dropout of Flax, as someone would write them."""

    def __init__(self, rngs: nnx.Rngs, rate: float = RATE):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, dropout_rate=rate, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.parts = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)])

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.parts[1](jax.nn.gelu(self.parts[0](x)))


class TiedHead(nnx.Module):
    def __init__(self, embedding: nnx.Embed, rngs: nnx.Rngs):
        self.norm, self.embedding = nnx.LayerNorm(WIDTH, rngs=rngs), embedding

    def __call__(self, x):
        return self.embedding.attend(self.norm(x))


def loss(head, x, batch):
    words = jax.nn.log_softmax(head(x))
    return -jnp.take_along_axis(words, batch["targets"][..., None], axis=-1).sum()


def modules(rate: float = RATE):
    rngs = nnx.Rngs(0)
    embedding = nnx.Embed(WORDS, WIDTH, rngs=rngs)
    return embedding, [Block(rngs, rate) for _ in range(NUM_BLOCKS)], TiedHead(embedding, rngs)


def batch(num_microbatches: int = 2):
    tokens = jax.random.randint(jax.random.key(1), (num_microbatches, 8 // num_microbatches, 6), 0, WORDS)
    return {"tokens": tokens, "targets": (tokens + 1) % WORDS}


def pipeline_of(model, *, schedule: str, data: int) -> Pipeline:
    mesh = make_mesh(data=data, pipe=2, tensor=1, devices=jax.devices()[: 2 * data])
    built = build(schedule, num_devices=2, num_microbatches=2)
    return Pipeline(built, mesh, StageFunctions.of(model), num_layers=NUM_BLOCKS)


def loss_and_grads(made, *, schedule: str, data: int, key=None):
    pipeline = pipeline_of(made.model, schedule=schedule, data=data)
    found, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(made.params), batch(), 1.0, key)
    return float(found), jax.jit(pipeline.from_stages)(grads)


@pytest.mark.parametrize(
    ("schedule", "data"),
    [pytest.param("1f1b", 2, marks=pytest.mark.ci), pytest.param("zb_v", 1, marks=pytest.mark.slow)],
)
def test_loss_and_gradients_are_those_of_the_modules_called_one_after_the_other(schedule, data):
    embedding, blocks, head = modules()
    made = from_nnx(embedding, blocks, head, loss=loss)
    found, grads = loss_and_grads(made, schedule=schedule, data=data)

    def plain(embedding, blocks, head):
        whole = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), batch())
        x = embedding(whole["tokens"])
        for block in blocks:
            x = block(x)
        return loss(head, x, whole)

    holder = nnx.Dict(embedding=embedding, blocks=nnx.List(blocks), head=head)
    holder.eval()
    expected, of_holder = nnx.jit(nnx.value_and_grad(lambda m: plain(m.embedding, m.blocks, m.head)))(holder)
    assert found == pytest.approx(float(expected), rel=1e-5)
    of_holder = nnx.to_pure_dict(of_holder)
    for i in range(NUM_BLOCKS):
        ours = jax.tree.map(lambda leaf, i=i: leaf[i], grads["layers"])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, of_holder["blocks"][i])
    table = of_holder["embedding"]["embedding"]  # of both uses
    np.testing.assert_allclose(grads["shared"]["embedding"]["embedding"], table, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_dropout_is_the_same_on_every_mesh_and_schedule_and_other_in_every_step():
    made = from_nnx(*modules(), loss=loss)
    key = jax.random.key(3)
    first, grads = loss_and_grads(made, schedule="1f1b", data=1, key=key)
    for schedule, data in (("1f1b", 2), ("zb_v", 2)):
        found, of_mesh = loss_and_grads(made, schedule=schedule, data=data, key=key)
        assert found == pytest.approx(first, rel=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, of_mesh)
    others = [loss_and_grads(made, schedule="1f1b", data=1, key=key)[0] for key in (None, jax.random.key(4))]
    assert all(abs(other - first) > 1e-3 for other in others)


def test_flax_s_adapters_alone_are_trained():
    rngs = nnx.Rngs(0)
    blocks = [nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs) for _ in range(NUM_BLOCKS)]
    embedding = nnx.Embed(WORDS, WIDTH, rngs=rngs)
    made = from_nnx(embedding, blocks, TiedHead(embedding, rngs), loss=loss)
    names = {
        jax.tree_util.keystr(path, simple=True, separator="."): is_trained
        for path, is_trained in jax.tree_util.tree_leaves_with_path(made.model.is_trained["layers"])
    }
    assert names == {"bias": False, "kernel": False, "lora.lora_a": True, "lora.lora_b": True}
    assert not any(jax.tree.leaves(made.model.is_trained["shared"]))
    pipeline = pipeline_of(made.model, schedule="1f1b", data=1)
    _, grads = pipeline.loss_and_grads(pipeline.to_stages(made.params), batch(), 1.0)
    assert [leaf.shape[-2:] for leaf in jax.tree.leaves(grads)] == [(WIDTH, 2), (2, WIDTH)]
    plain = from_nnx(embedding, [nnx.Linear(WIDTH, WIDTH, rngs=rngs)], TiedHead(embedding, rngs), loss=loss)
    assert plain.model.is_trained is None


def test_parameters_go_back_into_the_modules():
    embedding, blocks, head = modules()
    made = from_nnx(embedding, blocks, head, loss=loss)
    made.put_back(jax.tree.map(lambda leaf: leaf + 1, made.params))
    np.testing.assert_array_equal(blocks[3].norm.scale[...], 2 * np.ones(WIDTH))
    np.testing.assert_array_equal(head.embedding.embedding[...], made.params["shared"]["embedding"]["embedding"] + 1)
    assert head.embedding is embedding


def shared_block():
    embedding, blocks, head = modules()
    return embedding, [blocks[0], blocks[0]], head


def other_block():
    embedding, blocks, head = modules()
    return embedding, [blocks[0], Block(nnx.Rngs(1), rate=0.5)], head


def batch_norm():
    embedding, _, head = modules()
    return embedding, [nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))], head


def no_block():
    embedding, _, head = modules()
    return embedding, [], head


def random_head():
    embedding, blocks, _ = modules()
    return embedding, blocks, nnx.Dropout(RATE, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (shared_block, r"blocks\[1\] has the parameter .* of blocks\[0\]"),
        (other_block, r"blocks\[1\] has another structure"),
        (batch_norm, r"blocks\[0\] has variables of type BatchStat"),
        (no_block, r"blocks has no block"),
        (random_head, r"head has streams of random numbers"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused(broken, message):
    with pytest.raises(CompileError, match=message):
        from_nnx(*broken(), loss=loss)
