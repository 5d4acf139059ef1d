"""Mixtures of experts under every schedule: losses, routers' too, and gradients are those of plain `jax.grad`.

What rounding may change by a choice of another expert would be no mistake, so no token may stand between two of them.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors, summed

from jaxpipe.mesh import TensorAxis
from jaxpipe.models import GptOssConfig, LanguageModel, MixtureConfig, dispatch, experts
from jaxpipe.models.grouped import grouped
from jaxpipe.program.jaxprs import InStack, Summand
from jaxpipe.program.running_sums import add_layer
from jaxpipe.program.split_vjp import split_vjp
from jaxpipe.program.vjp import trace_vjp
from jaxpipe.schedules import REGISTRY, build, split_backward

BOUND = 1e-5
LEAST_GAP = 1e-5  # of scores of about 1, which rounding changes by less than 1e-6
SCALE = {"words": 0.01, "balance": 0.02, "router_z": 0.03}
MEASURED = {f"measured_{name}": 0.01 for name in ("expert_load", "fullest_expert", "emptiest_expert", "router_entropy")}


class Case(NamedTuple):
    family: str
    schedule: str
    recompute: str = "none"
    data: int = 1
    expert: int = 1
    tensor: int = 1
    dispatch: str = "dropless"
    num_devices: int = 2
    num_microbatches: int = 4
    split: bool = False
    bias_rate: float = 0.0
    padding: int = 0  # columns at the end of each row
    shard: str = "optimizer"

    def __str__(self) -> str:
        return "-".join(map(str, self))


def covering() -> list[Case]:
    """Each method once with each family; the other fields take turns."""
    cases = []
    for each, name in enumerate(sorted(REGISTRY)):
        for turn, family in enumerate(("mixtral", "qwen3_moe")):
            d = 4 if name in ("bpipe",) or (each + turn) % 3 == 0 else 2
            expert, tensor = ((1, 2), (2, 1), (1, 1) if d == 4 else (4, 1), (2, 1))[(each + turn) % 4]
            cases.append(
                Case(
                    family,
                    name,
                    recompute=("none", "attention", "full")[(each + 2 * turn) % 3],
                    data=8 // (d * expert * tensor) if (each + turn) % 2 else 1,
                    expert=expert,
                    tensor=tensor,
                    dispatch=("dropless", "capacity")[(each // 2 + turn) % 2],
                    num_devices=d,
                    num_microbatches=2 * d + turn,
                    split=(each + turn) % 4 == 0 and not REGISTRY[name].has_split_backward,
                    bias_rate=0.1 * (each % 2),
                    shard=("weights", "optimizer", "gradients")[(each // 3 + turn) % 3],
                )
            )
    return cases


CASES = tiers(
    [],
    ci=[
        Case("mixtral", "1f1b", expert=2, dispatch="capacity", bias_rate=0.1),
        Case("qwen3_moe", "1f1b", recompute="full", data=2, tensor=2, padding=3, shard="weights"),
    ],
    slow=[
        Case("gpt_oss", "1f1b", data=2, expert=2, dispatch="capacity", shard="weights"),
        Case("mixtral", "zb_h1", expert=2, tensor=2, dispatch="capacity", bias_rate=0.1),
        Case("gpt_oss", "bitpipe", recompute="full", tensor=2, padding=3),
        Case("gpt_oss", "zb_v", expert=2, tensor=2),
        Case("qwen3_moe", "1f1b", expert=2, tensor=2, bias_rate=0.1, padding=5),
        Case("mixtral", "zb_h1", recompute="full", data=2, padding=3, shard="gradients"),
        Case("qwen3_moe", "zb_v", recompute="full", tensor=2),
        Case("mixtral", "bitpipe", data=2, expert=2, dispatch="capacity", shard="weights"),
        *covering(),
        Case("gpt_oss", "bpipe", num_devices=4, num_microbatches=8, expert=2),
        Case("gpt_oss", "interleaved_1f1b", split=True, tensor=2, bias_rate=0.1),
        Case("gpt_oss", "chimera", data=2, recompute="full", shard="gradients"),
        Case("mixtral", "1f1b", data=2),
        Case("qwen3_moe", "chimera", recompute="attention", data=2, tensor=2),
        Case("mixtral", "bpipe", num_devices=4, num_microbatches=6, tensor=2),
        Case("mixtral", "dualpipe_v", data=2),
        Case("qwen3_moe", "1f1b", data=2, expert=2, bias_rate=0.1),
        Case("qwen3_moe", "interleaved_1f1b", recompute="full", split=True, tensor=2, bias_rate=0.1),
        Case("mixtral", "zb_v", recompute="attention", expert=4),
        Case("mixtral", "zb_h1", recompute="full:2,1", expert=2, dispatch="capacity", bias_rate=0.1),
        Case("qwen3_moe", "chimera", expert=4, bias_rate=0.1),
        Case("mixtral", "1f1b", tensor=2, expert=2, data=2, num_devices=1),
    ],
)


def model_of(case: Case, *, num_layers: int) -> Any:
    """Of capacity, a sixth of the choices or so are dropped."""
    sizes = {"num_experts": 8} if case.expert > 1 else {}
    dispatch = {"dispatch": case.dispatch, "capacity_factor": 0.75}
    recompute = "none" if ":" in case.recompute else case.recompute
    choices = {"recompute": recompute, "bias_rate": case.bias_rate, **sizes, **dispatch}
    return config_of(case.family, num_layers=num_layers, **choices)


def scale_of(case: Case) -> dict[str, float]:
    dropped = {"measured_dropped_choices": 0.01} if case.dispatch == "capacity" else {}
    of_bias = {"measured_load_bias": 0.01} if case.bias_rate else {}
    return SCALE | MEASURED | dropped | of_bias


def batch_of(case: Case) -> Any:
    """Four sequences a microbatch where as many devices split it; padding has tokens as good as any."""
    parts = [random_batch(case.num_microbatches, seed=seed) for seed in range(1, 1 + -(-case.data * case.expert // 2))]
    batch = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    if case.padding:
        batch["is_token"] = np.ones_like(batch["targets"])
        batch["is_token"][..., -case.padding :] = 0
        batch["targets"][..., -case.padding :] = -1
    return batch


def without_padding(case: Case, batch: Any) -> Any:
    """Shorter rows, and no such array."""
    kept = batch["targets"].shape[-1] - case.padding
    return {name: leaf[..., :kept] for name, leaf in batch.items() if name != "is_token"}


GAPS: list[float] = []


class WatchedRouting(experts.Routing):
    """Keeps in `GAPS` how far the score of the last chosen expert is above that of the first left out, at least."""

    def choose(self, logits: jax.Array, bias: jax.Array | None) -> jax.Array:
        scores = logits if bias is None else jax.nn.softmax(logits) + bias
        best = jax.lax.top_k(scores, self.num_chosen + 1)[0]
        jax.debug.callback(lambda gap: GAPS.append(float(gap)), (best[..., -2] - best[..., -1]).min())
        return super().choose(logits, bias)


class Watched:
    @property
    def routing(self) -> WatchedRouting:
        routing = super().routing
        return WatchedRouting(**{each.name: getattr(routing, each.name) for each in fields(routing)})


class WatchedConfig(Watched, MixtureConfig):
    pass


class WatchedGptOss(Watched, GptOssConfig):
    pass


def expected(case: Case, config: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    """Scaled losses and gradients of one device, whose choices no rounding changes."""
    watched = WatchedGptOss if isinstance(config, GptOssConfig) else WatchedConfig
    model = LanguageModel(watched(**{each.name: getattr(config, each.name) for each in fields(config)}))
    GAPS.clear()
    scale = scale_of(case)

    def total(params: Any, microbatch: Any, m: int) -> tuple[Any, Any]:
        sums = model.loss_sum(params, microbatch, None, m)
        losses = {name: scale[name] * sums[name] for name in scale}
        return sum(map(jnp.sum, losses.values())), losses

    of_microbatch = jax.jit(jax.grad(total, has_aux=True))
    each = [
        of_microbatch(params, jax.tree.map(lambda leaf, m=m: leaf[m], batch), m) for m in range(case.num_microbatches)
    ]
    grads, losses = summed(each)
    jax.effects_barrier()
    assert len(GAPS) >= config.num_layers * case.num_microbatches
    assert min(GAPS) > LEAST_GAP
    return losses, grads


def found(case: Case, config: Any, params: Any, batch: Any) -> tuple[Any, Any]:
    schedule = build(case.schedule, num_devices=case.num_devices, num_microbatches=case.num_microbatches)
    schedule = split_backward(schedule) if case.split else schedule
    mesh = {axis: getattr(case, axis) for axis in ("data", "expert", "tensor")}
    pipeline = pipeline_of(schedule, config, shard=case.shard, again=case.recompute, **mesh)
    losses, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch, scale_of(case))
    return losses, jax.jit(pipeline.from_stages)(grads)


def errors_of(case: Case) -> dict[str, float]:
    schedule = build(case.schedule, num_devices=case.num_devices, num_microbatches=case.num_microbatches)
    config = model_of(case, num_layers=schedule.num_stages + 1)
    params, batch = random_params(config), batch_of(case)
    losses, grads = found(case, config, params, batch)
    wanted, wanted_grads = expected(case, config, params, without_padding(case, batch))
    of_losses = {name: float(abs(losses[name] - wanted[name]).max() / abs(wanted[name]).max()) for name in wanted}
    assert losses["measured_expert_load"].shape == (config.num_layers, config.num_experts)
    assert losses.keys() == wanted.keys() == scale_of(case).keys()
    return of_losses | relative_errors(grads, wanted_grads)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_device(case):
    errors = errors_of(case)
    assert max(errors.values()) < BOUND, errors


TILES_OF, LOSS_SUMS, OWN = dispatch.Dropless.tiles, experts.Routing.loss_sums, dispatch.Dropless.own


def without_a_token(self: dispatch.Dropless, chosen: jax.Array) -> dispatch.Tiles:
    """The first choice's row is one that is filled up."""
    tiles = TILES_OF(self, chosen)
    first, size = tiles.row[0, 0], tiles.choice.shape[1]
    return dispatch.Tiles(tiles.choice.at[first // size, first % size].set(tiles.row.size), tiles.row, tiles.expert)


def of_own_experts_alone(self: dispatch.Dropless, y: jax.Array, seq_len: int) -> jax.Array:
    """The sum over the devices of other experts is missing."""
    of_all = y.reshape(self.expert.size, -1, seq_len, *y.shape[1:])
    return of_all[self.expert.index()]


def of_this_device_alone(self: TensorAxis, x: jax.Array) -> jax.Array:
    return x * self.num_sharing


def twice(self: experts.Routing, *arguments: jax.Array) -> dict[str, jax.Array]:
    return {name: 2 * sum_ for name, sum_ in LOSS_SUMS(self, *arguments).items()}


MISTAKES = {
    "a token without its expert": (dispatch.Dropless, "tiles", without_a_token, "data"),
    "no sum over experts": (dispatch.Dropless, "own", of_own_experts_alone, "expert"),
    "load of one device": (TensorAxis, "sum_over_batch", of_this_device_alone, "data"),
    "losses twice": (experts.Routing, "loss_sums", twice, "data"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_seen(mistake, monkeypatch):
    patched, name, wrong, axis = MISTAKES[mistake]
    case = Case("mixtral", "1f1b", num_devices=1, num_microbatches=2)._replace(**{axis: 2})
    config = model_of(case, num_layers=2)
    params, batch = random_params(config), batch_of(case)
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
    sums = jax.jit(lambda logits: routing.loss_sums(logits, routing.choose(logits, None), jnp.full(4, 2 / 4), None, 1))(
        logits
    )
    np.testing.assert_allclose(sums["balance"] / 8, 2.0, rtol=1e-6)
    np.testing.assert_allclose(sums["router_z"] / 8, np.log(4) ** 2, rtol=1e-6)


def test_a_bias_chooses_and_neither_weighs_nor_learns():
    """The first expert is chosen for its bias, and has the weight of its probability; the gradient is of loads."""
    routing = experts.Routing(3, 1, normalized=False, balance_loss=0.0, z_loss=0.0, has_bias=True)
    logits = jnp.log(jnp.array([[[0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]]))
    bias = jnp.array([0.4, 0.0, 0.0])
    chosen = routing.choose(logits, bias)
    assert chosen[0, :, 0].tolist() == [0, 2]
    assert routing.choose(logits, None)[0, :, 0].tolist() == [1, 2]
    np.testing.assert_allclose(routing.weights(logits, chosen)[0, :, 0], [0.2, 0.7], rtol=1e-6)
    share = jnp.array([0.5, 0.0, 0.5])

    def told(logits: jax.Array, bias: jax.Array) -> jax.Array:
        return routing.loss_sums(logits, chosen, share, bias, 1)["measured_load_bias"] / 2

    of_logits, of_bias = jax.jit(jax.grad(told, (0, 1)))(logits, bias)
    np.testing.assert_allclose(of_bias, [0.5, -1.0, 0.5], rtol=1e-6)  # 1.5, 0 and 1.5 times the mean
    assert not of_logits.any()


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 1000])
def test_each_choice_has_a_row_of_its_expert(num_tokens):
    chosen = np.random.default_rng(0).integers(5, size=(1, num_tokens, 2)).astype(np.int32)
    tiles = jax.tree.map(np.asarray, jax.jit(dispatch.Dropless(5, 2).tiles)(chosen))
    size = tiles.choice.shape[1]
    flat = tiles.choice.reshape(-1)
    np.testing.assert_array_equal(flat[tiles.row.reshape(-1)], np.arange(chosen.size))
    np.testing.assert_array_equal(tiles.expert[tiles.row // size], chosen[0])
    assert (flat == chosen.size).sum() == flat.size - chosen.size


def test_capacity_serves_the_first_choices_of_each_sequence():
    chosen = np.random.default_rng(0).integers(4, size=(3, 16, 2)).astype(np.int32)
    way = dispatch.Capacity(4, 2, 0.75)
    assert way.rows(16) == 6
    tiles = jax.tree.map(np.asarray, jax.jit(way.tiles)(chosen))
    has_row = tiles.row.reshape(chosen.shape) < tiles.choice.size
    for one, served in zip(chosen.reshape(3, -1), has_row.reshape(3, -1), strict=True):
        for expert in range(4):
            assert served[one == expert].tolist() == [place < 6 for place in range((one == expert).sum())]
    kept = tiles.row.reshape(-1)[has_row.reshape(-1)]
    np.testing.assert_array_equal(tiles.choice.reshape(-1)[kept], np.flatnonzero(has_row.reshape(-1)))
    np.testing.assert_array_equal(kept // tiles.choice.shape[1], chosen.reshape(-1)[has_row.reshape(-1)])


@pytest.mark.parametrize(("way", "most"), [(dispatch.Dropless(4, 2), 32), (dispatch.Capacity(4, 2, 0.75), 6)])
def test_padding_takes_no_row(way, most):
    chosen = np.random.default_rng(0).integers(4, size=(2, 16, 2)).astype(np.int32)
    chosen[0, :9] = chosen[1, 9:] = 4  # no expert
    tiles = jax.tree.map(np.asarray, jax.jit(way.tiles)(chosen))
    row = tiles.row.reshape(chosen.shape)
    has_row = row < tiles.choice.size
    assert (row[~has_row] == tiles.choice.size).all()
    for one, served in zip(chosen.reshape(2, -1), has_row.reshape(2, -1), strict=True):
        assert not served[one == 4].any()
        for expert in range(4):
            assert served[one == expert].tolist() == [place < most for place in range((one == expert).sum())]
    np.testing.assert_array_equal(tiles.choice.reshape(-1)[row[has_row]], np.flatnonzero(has_row.reshape(-1)))


@pytest.mark.parametrize("normalized", [True, False])
def test_weights_of_padding_are_finite_and_so_are_their_gradients(normalized):
    """However unlikely the expert is that padding would have."""
    routing = experts.Routing(3, 2, normalized=normalized, balance_loss=0.0, z_loss=0.0)
    chosen = jnp.array([[[0, 1], [3, 3]]])
    weight_of = jax.jit(jax.grad(lambda logits: routing.weights(logits, chosen)[0, 0, 0]))
    gradient = weight_of(jnp.array([[[2.0, 1.0, -60.0], [0.0, 1.0, -60.0]]]))
    assert jnp.isfinite(gradient).all()
    assert gradient[0, 0].any()
    assert not gradient[0, 1].any()


def test_few_rows_are_filled_up():
    for num_tokens, num_experts, num_chosen in ((4096, 8, 2), (4096, 128, 8), (8192, 128, 8)):
        tiles, size = dispatch.Dropless(num_experts, num_chosen).shape(1, num_tokens)
        assert tiles * size <= 1.1 * num_tokens * num_chosen


@pytest.mark.parametrize("padding", [0, 3])
def test_kernels_are_read_and_gradients_added_where_they_stand(padding):
    """In a stack of two chunks of three layers; gradients to one that may be padded, as if split over devices."""
    random = np.random.default_rng(0)
    kernels, sums = (jnp.asarray(random.standard_normal((2, 3, 4, 6, 5)), jnp.float32) for _ in range(2))
    sums = jnp.pad(sums, [(0, 0)] * 4 + [(0, padding)])
    x = jnp.asarray(random.standard_normal((3, 8, 6)), jnp.float32)
    expert = jnp.array([0, 2, 2], jnp.int32)

    def layer(params, x):
        return jnp.tanh(grouped(x, params["kernel"], expert, False)) + params["bias"]

    vjp = trace_vjp(layer, {"bias": kernels[0, 0, 0, 0], "kernel": kernels[0, 0]}, x)
    assert vjp.in_stack == {1}
    split = split_vjp(vjp)

    def both(read):
        chunk, turn = jnp.int32(1), jnp.int32(2)
        params = {"bias": kernels[0, 0, 0, 0], "kernel": read(kernels, chunk, turn)}
        y, residuals = vjp.forward(params, x)
        d_params, dx = vjp.backward(params, residuals, y)
        _, early, deferred = split.input_gradient(params, residuals, y)
        late = split.weight_gradient(params, [residuals[i] for i in split.shared_with_w], deferred)
        assert isinstance(late[1], Summand) == isinstance(d_params["kernel"], Summand) == (read is InStack)
        added = [add_layer([sums], [(chunk, turn)], [d])[0] for d in (d_params["kernel"], late[1])]
        return y, dx, d_params["bias"], early[0], added

    for ours, expected in zip(
        jax.tree.leaves(jax.jit(lambda: both(InStack))()),
        jax.tree.leaves(jax.jit(lambda: both(lambda leaf, chunk, turn: leaf[chunk, turn]))()),
        strict=True,
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (128, 8)])  # Mixtral 8x7B, Qwen3-30B-A3B
def test_experts_have_at_most_a_tenth_more_rows_than_they_need(monkeypatch, num_experts, num_chosen):
    """Every row of a tile is multiplied; with a capacity of equal shares no row is filled up."""

    def rows_by_need(of: dispatch.Dispatch) -> float:
        tiles, size = of.shape(1, 4096)
        return tiles * size / (4096 * num_chosen)

    assert rows_by_need(dispatch.Capacity(num_experts, num_chosen, 1.0)) == 1.0
    assert 1.0 <= rows_by_need(dispatch.Dropless(num_experts, num_chosen)) <= 1.1
    monkeypatch.setattr(dispatch, "PADDING", 2.0)  # whose tiles are too large
    assert rows_by_need(dispatch.Dropless(num_experts, num_chosen)) > 1.1
