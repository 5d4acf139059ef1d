"""Mixtures of experts under every schedule: losses, routers' too, and gradients are those of plain `jax.grad`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors

from jaxpipe.mesh import TensorAxis
from jaxpipe.models import LanguageModel, experts
from jaxpipe.schedules import REGISTRY, build, split_backward

BOUND = 1e-5
SCALE = {"words": 0.01, "balance": 0.02, "router_z": 0.03}


class Case(NamedTuple):
    family: str
    schedule: str
    recompute: str = "none"
    data: int = 1
    tensor: int = 1
    num_devices: int = 2
    num_microbatches: int = 4
    split: bool = False

    def __str__(self) -> str:
        return "-".join(map(str, self))


def covering() -> list[Case]:
    """Each method once with each family; the other fields take turns."""
    cases = []
    for each, name in enumerate(sorted(REGISTRY)):
        for turn, family in enumerate(("mixtral", "qwen3_moe")):
            d = 4 if name in ("bpipe",) or (each + turn) % 3 == 0 else 2
            cases.append(
                Case(
                    family,
                    name,
                    recompute=("none", "attention", "full")[(each + 2 * turn) % 3],
                    data=1 + ((each + turn) % 2 if d == 2 else 0),
                    tensor=1 + (each // 2 + turn) % 2,
                    num_devices=d,
                    num_microbatches=2 * d + turn,
                    split=(each + turn) % 4 == 0 and not REGISTRY[name].has_split_backward,
                )
            )
    return cases


CASES = tiers(
    [Case("mixtral", "1f1b", data=2), Case("qwen3_moe", "zb_v", recompute="full", tensor=2)],
    ci=[
        Case("qwen3_moe", "chimera", recompute="attention", data=2, tensor=2),
        Case("mixtral", "bpipe", num_devices=4, num_microbatches=6, tensor=2),
        Case("mixtral", "dualpipe_v", data=2),
        Case("qwen3_moe", "interleaved_1f1b", recompute="full", split=True, tensor=2),
    ],
    slow=covering(),
)


def expected(case: Case, config: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    """Scaled losses and gradients of one device."""
    model = LanguageModel(config)

    def total(params: Any) -> tuple[Any, Any]:
        sums = [
            model.loss_sum(params, jax.tree.map(lambda leaf, m=m: leaf[m], batch), None, m)
            for m in range(case.num_microbatches)
        ]
        losses = {name: SCALE[name] * sum(each[name] for each in sums) for name in SCALE}
        return sum(losses.values()), losses

    grads, losses = jax.jit(jax.grad(total, has_aux=True))(params)
    return losses, grads


def found(case: Case, config: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    schedule = build(case.schedule, num_devices=case.num_devices, num_microbatches=case.num_microbatches)
    schedule = split_backward(schedule) if case.split else schedule
    pipeline = pipeline_of(schedule, config, data=case.data, tensor=case.tensor)
    losses, grads = pipeline.loss_and_grads(pipeline.to_stages(params), batch, SCALE)
    return losses, pipeline.from_stages(grads)


def errors_of(case: Case) -> dict[str, float]:
    schedule = build(case.schedule, num_devices=case.num_devices, num_microbatches=case.num_microbatches)
    config = config_of(case.family, num_layers=schedule.num_stages + 1, recompute=case.recompute)
    params, batch = random_params(config), random_batch(case.num_microbatches, seed=1)
    losses, grads = found(case, config, params, batch)
    wanted, wanted_grads = expected(case, config, params, batch)
    of_losses = {name: float(abs(losses[name] - wanted[name]) / abs(wanted[name])) for name in SCALE}
    assert losses.keys() == SCALE.keys()
    return of_losses | relative_errors(grads, wanted_grads)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_device(case):
    errors = errors_of(case)
    assert max(errors.values()) < BOUND, errors


def without_a_token(chosen: jax.Array, num_experts: int) -> experts.Tiles:
    """The first choice's row is one that is filled up."""
    tiles = TILES_OF(chosen, num_experts)
    first = tiles.row[0, 0]
    return experts.Tiles(
        tiles.choice.at[first // tiles.choice.shape[1], first % tiles.choice.shape[1]].set(chosen.size),
        tiles.row,
        tiles.expert,
    )


def of_this_device_alone(self: TensorAxis, x: jax.Array) -> jax.Array:
    return x * self.num_sharing


TILES_OF, LOSS_SUMS = experts.tiles_of, experts.Routing.loss_sums


@pytest.mark.parametrize(
    ("patched", "name", "wrong"),
    [
        pytest.param(experts, "tiles_of", without_a_token, id="a token without its expert"),
        pytest.param(TensorAxis, "sum_over_batch", of_this_device_alone, id="load of one device", marks=pytest.mark.ci),
        pytest.param(
            experts.Routing,
            "loss_sums",
            lambda self, *arguments: {n: 2 * v for n, v in LOSS_SUMS(self, *arguments).items()},
            id="losses twice",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_a_mistake_would_be_seen(patched, name, wrong, monkeypatch):
    case = Case("mixtral", "1f1b", data=2)
    config = config_of(case.family, num_layers=3)
    params, batch = random_params(config), random_batch(case.num_microbatches, seed=1)
    wanted = expected(case, config, params, batch)[1]
    monkeypatch.setattr(patched, name, wrong)
    jax.clear_caches()  # checkpointed functions are traced once
    errors = relative_errors(found(case, config, params, batch)[1], wanted)
    jax.clear_caches()
    assert max(errors.values()) > 100 * BOUND


def test_losses_of_routers_are_those_of_their_papers():
    """All experts used alike: the balance loss is the number of chosen ones."""
    routing = experts.Routing(4, 2, normalized=True, balance_loss=1.0, z_loss=1.0)
    logits = jnp.zeros((1, 8, 4))
    sums = routing.loss_sums(logits, jnp.full(4, 2 / 4), 1)
    np.testing.assert_allclose(sums["balance"] / 8, 2.0, rtol=1e-6)
    np.testing.assert_allclose(sums["router_z"] / 8, np.log(4) ** 2, rtol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 1000])
def test_each_choice_has_a_row_of_its_expert(num_tokens):
    chosen = np.random.default_rng(0).integers(5, size=(num_tokens, 2)).astype(np.int32)
    tiles = jax.tree.map(np.asarray, experts.tiles_of(jnp.asarray(chosen), 5))
    size = tiles.choice.shape[1]
    flat = tiles.choice.reshape(-1)
    np.testing.assert_array_equal(flat[tiles.row.reshape(-1)], np.arange(chosen.size))
    np.testing.assert_array_equal(tiles.expert[tiles.row // size], chosen)
    assert (flat == chosen.size).sum() == flat.size - chosen.size


def test_few_rows_are_filled_up():
    for num_rows, num_experts in ((2 * 4096, 8), (8 * 4096, 128), (8 * 8192, 128)):
        rows = experts.num_tiles(num_rows, num_experts) * experts.tile_size(num_rows, num_experts)
        assert rows <= 1.1 * num_rows
