"""DeepSeek-V2 and -V3 under schedules: losses and gradients of latent attention, groups, and two kinds of layers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors, summed

from jaxpipe.models import LanguageModel
from jaxpipe.schedules import build, split_backward
from jaxpipe.schedules.methods.registry import find_method

BOUND = 1e-5  # of float32 sums in another order


class Case(NamedTuple):
    family: str
    schedule: str
    num_devices: int = 2
    num_layers: int = 5
    data: int = 1
    expert: int = 1
    tensor: int = 1
    split: bool = False
    packed: bool = False
    context: int = 1
    choices: tuple = ()


CASES = tiers(
    [Case("deepseek_v3", "1f1b", num_layers=4)],
    ci=[
        Case("deepseek_v2", "1f1b", num_devices=1, num_layers=2, packed=True, context=2),
        Case("deepseek_v3", "1f1b", split=True, tensor=2, packed=True, choices=(("attention", "chunked"),)),
        Case("deepseek_v2", "interleaved_1f1b", data=2, choices=(("recompute", "full"),)),
    ],
    slow=[
        Case("deepseek_v3", "zb_v", expert=2, context=2),
        Case("deepseek_v3", "1f1b", num_layers=4, packed=True, context=4),
        Case("deepseek_v2", "bitpipe", num_layers=9, tensor=2, context=2, choices=(("recompute", "full"),)),
        Case("deepseek_v3", "1f1b", split=True, data=2, tensor=2, num_devices=1, context=2),
        Case("deepseek_v3", "1f1b", tensor=2, expert=2),
        Case("deepseek_v3", "zb_v", expert=2),
        Case("deepseek_v2", "1f1b", tensor=2, data=2, choices=(("recompute", "attention"),)),
        Case("deepseek_v3", "bitpipe", num_layers=9, choices=(("recompute", "full"),)),
        Case("deepseek_v3", "bitpipe", num_layers=9, data=2, expert=2),
        Case("deepseek_v3", "bpipe", num_devices=4, num_layers=9, expert=2, packed=True),
        Case("deepseek_v2", "zb_v", tensor=2, expert=2, choices=(("attention", "chunked"),)),
        Case("deepseek_v2", "chimera", num_layers=6, tensor=2),
        Case("deepseek_v3", "zb_h1", num_devices=4, num_layers=6, choices=(("dispatch", "capacity"),)),
    ],
)


def batch_of(case: Case, num_microbatches: int):
    parts = [random_batch(num_microbatches, seed=seed) for seed in range(1, 1 + -(-case.data * case.expert // 2))]
    batch = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    if case.packed:
        batch["positions"] = np.broadcast_to(np.array([0, 1, 2, 0, 1, 0, 1, 2], np.int32), batch["tokens"].shape)
    return batch


def expected(config, params, batch, scale):
    """Scaled losses and gradients of one device."""
    model = LanguageModel(config)

    def total(params, microbatch, m):
        sums = model.loss_sum(params, microbatch, None, m)
        losses = {name: scale[name] * sums[name] for name in sums}
        return sum(map(jnp.sum, losses.values())), losses

    of_microbatch = jax.jit(jax.grad(total, has_aux=True))
    num = batch["tokens"].shape[0]
    each = [of_microbatch(params, {name: leaf[m] for name, leaf in batch.items()}, m) for m in range(num)]
    grads, losses = summed(each)
    return losses, grads


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_device(case):
    num_microbatches = max(2 * case.num_devices, find_method(case.schedule).least_microbatches(case.num_devices))
    schedule = build(case.schedule, num_devices=case.num_devices, num_microbatches=num_microbatches)
    schedule = split_backward(schedule) if case.split else schedule
    choices = dict(case.choices) | ({"attention": "chunked"} if case.context > 1 else {})
    config = config_of(case.family, num_layers=case.num_layers, **choices)
    params = random_params(config)
    batch = batch_of(case, num_microbatches)
    names = jax.eval_shape(lambda: LanguageModel(config).loss_sum(params, {k: v[0] for k, v in batch.items()}))
    scale = {name: 0.01 if name.startswith("measured") else 0.5 for name in names}
    wanted, wanted_grads = expected(config, params, batch, scale)
    mesh = {axis: getattr(case, axis) for axis in ("data", "expert", "tensor", "context")}
    pipeline = pipeline_of(schedule, config, **mesh)
    losses, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch, scale)
    for name, loss in wanted.items():
        assert np.abs(losses[name] - loss).max() <= BOUND * np.abs(loss).max(), name
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted_grads)
    assert max(errors.values()) < BOUND, errors
