"""Multi-token prediction, in the head alone and under schedules, by a reference of one device that is written here."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives_of_programs import unordered_collectives
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors, summed

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis
from jaxpipe.models import LanguageModel
from jaxpipe.models import cross_entropy as chunks
from jaxpipe.schedules import build, split_backward
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.training import policy_gradient

BOUND = 1e-5  # of float32 sums in another order
FACTOR = 0.3
POSITIONS = np.array([0, 1, 2, 0, 1, 0, 1, 2], np.int32)


class Case(NamedTuple):
    schedule: str
    num_devices: int = 2
    num_layers: int = 5
    data: int = 1
    expert: int = 1
    tensor: int = 1
    split: bool = False
    packed: bool = False
    padded: bool = False
    choices: tuple = ()


CASES = tiers(
    [],
    ci=[Case("1f1b", num_layers=2, packed=True, choices=(("num_dense", 0),))],
    slow=[
        Case("1f1b", num_layers=3, choices=(("num_dense", 1),)),
        Case("1f1b", tensor=2, expert=2, split=True, packed=True, choices=(("attention", "chunked"),)),
        Case("zb_v", data=2, padded=True),
        Case("bpipe", num_devices=4, num_layers=9, expert=2),
        Case("bitpipe", num_layers=9, data=2, expert=2, choices=(("recompute", "full"),)),
        Case("interleaved_1f1b", tensor=2, data=2, packed=True, choices=(("tie_embeddings", True),)),
        Case("chimera", num_layers=6, tensor=2, choices=(("dispatch", "capacity"),)),
        Case("gpipe", num_devices=1, expert=2, choices=(("num_dense", 0),)),
    ],
)


def batch_of(case: Case, num_microbatches: int):
    parts = [random_batch(num_microbatches, seed=seed) for seed in range(1, 1 + -(-case.data * case.expert // 2))]
    batch = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    if case.packed:
        batch["positions"] = np.broadcast_to(POSITIONS, batch["tokens"].shape)
    if case.padded:  # the last three columns of every second row
        is_token = np.ones(batch["tokens"].shape, np.int32)
        is_token[:, ::2, -3:] = 0
        batch |= {"is_token": is_token, "targets": np.where(is_token, batch["targets"], -1)}
    return batch


def ahead(microbatch):
    """(next token, token after it or -1, whether there is a next one) of every position, by a loop over positions."""
    tokens, targets = microbatch["tokens"], microbatch["targets"]
    following, after, has_next = np.zeros_like(tokens), np.full_like(tokens, -1), np.zeros_like(tokens)
    for row, t in np.ndindex(*tokens.shape):
        if t + 1 == tokens.shape[1]:
            continue
        if "positions" in microbatch and microbatch["positions"][row, t + 1] == 0:
            continue
        if "is_token" in microbatch and not microbatch["is_token"][row, t + 1]:
            continue
        following[row, t], after[row, t], has_next[row, t] = tokens[row, t + 1], targets[row, t + 1], 1
    return following, after, has_next


def rms(x, scale, epsilon):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def cross_entropy(features, kernel, targets, vocab_size):
    logs = jax.nn.log_softmax((features @ kernel.T)[..., :vocab_size])
    chosen = jnp.take_along_axis(logs, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return -jnp.where(targets >= 0, chosen, 0.0).sum()


def reference(config, params, microbatch, *ahead):
    """All sums of losses: the main model's stream is the library's, the head is `of_head`."""
    head = {name: of for name, of in params["shared"]["head"].items() if name != "further"}
    without = {"shared": {**params["shared"], "head": head}, "layers": params["layers"]}
    stream, losses = LanguageModel(replace(config, mtp_factor=0.0))._stream(without, microbatch, None, 0)
    return losses | of_head(config, params["shared"], stream, microbatch, *ahead)


def of_head(config, shared, stream, microbatch, following, after, has_next):
    """Sums of the head: its layer is the library's, the rest is written out."""
    head, further = shared["head"], shared["head"]["further"]
    table = shared["embedding"]["token"]
    kernel = table if config.tie_embeddings else head["kernel"]
    epsilon = config.norm_epsilon
    h = rms(stream, head["norm"]["scale"], epsilon)
    token = rms(table[following], further["token_norm"]["scale"], epsilon)
    both = jnp.concatenate([token, rms(h, further["stream_norm"]["scale"], epsilon)], -1)
    inputs = both @ further["projection"]["kernel"]
    block = LanguageModel(replace(config, mtp_factor=0.0)).layer
    x, of_block = block(further["block"], inputs, {**microbatch, "is_token": has_next}, None)
    features = rms(x, further["norm"]["scale"], epsilon)
    losses = {"words": cross_entropy(h, kernel, microbatch["targets"], config.vocab_size)}
    losses["mtp"] = FACTOR * cross_entropy(features, kernel, after, config.vocab_size)
    num = config.num_layers - config.num_dense  # the block's measures are told as those of one layer
    for name, loss in of_block.items():
        kind, measured, rest = ("measured_", num, name[9:]) if name.startswith("measured_") else ("", 1, name)
        if rest != "expert_load":
            losses[f"{kind}mtp_{rest}"] = (1 if rest == "load_bias" else measured) * loss
    return losses


def expected(config, params, batch, scale):
    """Scaled losses and gradients of one device."""

    def total(params, *microbatch):
        sums = reference(config, params, *microbatch)
        losses = {name: scale[name] * sums[name] for name in sums}
        return sum(map(jnp.sum, losses.values())), losses

    num = batch["tokens"].shape[0]
    microbatches = [{name: leaf[m] for name, leaf in batch.items()} for m in range(num)]
    gradients = jax.jit(jax.grad(total, has_aux=True))
    grads, losses = summed([gradients(params, microbatch, *ahead(microbatch)) for microbatch in microbatches])
    return losses, grads


def scales(losses):
    return {name: 0.01 if name.startswith("measured") else 0.5 for name in losses}


def weighted(scale, losses):
    return sum(scale[name] * loss for name, loss in losses.items())


@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_losses_and_gradients_of_the_head_are_those_of_the_reference(is_tied):
    config = config_of("deepseek_v3", num_layers=4, mtp_factor=FACTOR, tie_embeddings=is_tied)
    shared = random_params(config)["shared"]
    batch = batch_of(Case("", packed=True, padded=True), 1)
    microbatch = {name: leaf[0] for name, leaf in batch.items()}
    stream = np.random.default_rng(3).normal(size=(*microbatch["tokens"].shape, config.hidden)).astype(np.float32)

    def total(shared, stream):
        losses = of_head(config, shared, stream, microbatch, *ahead(microbatch))
        return weighted(scales(losses), losses), losses

    wanted_grads, wanted = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(shared, stream)
    model = LanguageModel(config)
    sums = jax.tree.map(np.ones_like, shared)  # that are added to
    told = jax.jit(model.head_backward)(shared, stream, microbatch, scales(wanted), sums)
    losses, dx, sums = told
    assert losses.keys() == wanted.keys() == jax.eval_shape(model.head, shared, stream, microbatch).keys()
    for name, loss in wanted.items():
        assert losses[name] == pytest.approx(float(loss), rel=BOUND), name
    found = {"shared": jax.tree.map(lambda total: total - 1, sums), "layers": {"x": dx[None]}}
    expected = {"shared": wanted_grads[0], "layers": {"x": wanted_grads[1][None]}}
    errors = relative_errors(found, expected)
    assert max(errors.values()) < BOUND, errors
    assert set(model.training_losses) == {name for name in wanted if "mtp" in name}
    nums = model.num_losses(microbatch)
    _, after, has_next = ahead(microbatch)
    assert int(nums["mtp"]) == (after >= 0).sum()
    assert int(nums["mtp_balance"]) == has_next.sum()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_the_reference(case):
    least = find_method(case.schedule).least_microbatches(case.num_devices)
    num_microbatches = max(case.num_devices + 1, least) if case.schedule == "1f1b" else max(2 * case.num_devices, least)
    schedule = build(case.schedule, num_devices=case.num_devices, num_microbatches=num_microbatches)
    schedule = split_backward(schedule) if case.split else schedule
    config = config_of("deepseek_v3", num_layers=case.num_layers, mtp_factor=FACTOR, **dict(case.choices))
    params = random_params(config)
    batch = batch_of(case, num_microbatches)
    names = jax.eval_shape(lambda: LanguageModel(config).loss_sum(params, {k: v[0] for k, v in batch.items()}))
    scale = scales(names)
    wanted, wanted_grads = expected(config, params, batch, scale)
    mesh = {axis: getattr(case, axis) for axis in ("data", "expert", "tensor")}
    pipeline = pipeline_of(schedule, config, **mesh)
    losses, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch, scale)
    assert losses.keys() == wanted.keys()
    for name, loss in wanted.items():
        assert np.abs(losses[name] - loss).max() <= BOUND * np.abs(loss).max(), name
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted_grads)
    assert max(errors.values()) < BOUND, errors
    if case.padded:  # forwards alone, as in evaluation
        told = pipeline.loss(jax.jit(pipeline.to_stages)(params), batch, scale)
        for name, loss in wanted.items():
            assert np.abs(told[name] - loss).max() <= BOUND * np.abs(loss).max(), name


def test_a_loss_of_ones_own_and_split_sequences_are_refused():
    config = config_of("deepseek_v3", num_layers=4, mtp_factor=FACTOR, attention="chunked")
    with pytest.raises(ConfigError, match="leave loss= out"):
        LanguageModel(config, loss=policy_gradient())
    with pytest.raises(ConfigError, match=r"further token with mesh\.context=2"):
        LanguageModel(config, TensorAxis.of(context=2))


@pytest.mark.slow
def test_collectives_of_the_head_are_in_order(monkeypatch):
    """Two chunks of logits are a loop with collectives over `tensor`; the layer beside it has some of its own."""
    monkeypatch.setattr(chunks, "MOST_TOKENS", 8)
    monkeypatch.setattr(chunks, "FEWER_TOKENS", 8)
    config = config_of("deepseek_v3", num_layers=4, num_dense=0, mtp_factor=FACTOR)
    schedule = build("1f1b", num_devices=2, num_microbatches=2)
    pipeline = pipeline_of(schedule, config, tensor=2, expert=2)
    batch = batch_of(Case("", expert=4), 2)
    staged = jax.jit(pipeline.to_stages)(random_params(config))
    text = pipeline.loss_and_grads.lower(staged, batch, 0.5).compile().as_text()
    assert unordered_collectives(text) == []
