"""Values of tokens through a pipeline, and losses of one's own over them: those of plain `jax.nn.log_softmax`.

The reference is `LanguageModel.logits` on one device and `jax.grad`; it shares nothing with a head but the features.
Values are within 1e-5, gradients within 1e-5 of each parameter's norm in each layer. Companions show that a weight of
another token, and a part of the vocabulary left out, would be seen.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import all_equations
from test_packed_documents import documents
from tiers import tiers
from tiny_models import MICROBATCH_SIZE, SEQ_LEN, VOCAB_SIZE, config_of, random_batch, random_params, relative_errors

from jaxpipe.data import PackedSequences
from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis, make_mesh, trained
from jaxpipe.models import LanguageModel, TokenLoss, TokenValues, cross_entropy
from jaxpipe.models.lora import Lora
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.held_bytes import held_bytes
from jaxpipe.program.without_flush import one_batch
from jaxpipe.schedules import build, simulate
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.training.step import mean_factors, name_losses
from jaxpipe.training.token_losses import dpo, policy_gradient

LARGEST_ERROR = 1e-5


class Case(NamedTuple):
    schedule: str
    family: str
    pipe: int
    num_microbatches: int
    num_layers: int
    data: int = 1
    tensor: int = 1
    split: bool = False  # whether the head is split over `pipe`
    chunk: int = 4096  # most tokens of a chunk of the head
    packed: bool = False
    vocab_multiple: int | None = None
    expert: int = 1
    loss: str = "own"  # a key of LOSSES
    rank: int = 0  # of adapters; the rest is frozen
    context: int = 1

    def __str__(self) -> str:
        return "-".join(map(str, self))


ONE = Case("1f1b", "llama", 2, 3, 2, chunk=5)
SPLIT = Case("1f1b", "gpt", 3, 2, 3, split=True, vocab_multiple=48)  # 32 words in 48 rows: one device has none
CASES = tiers(
    [],
    ci=[ONE, Case("zb_h1", "llama", 2, 2, 2, tensor=2, chunk=3, packed=True, context=2)],
    slow=[
        Case("1f1b", "gpt", 2, 2, 2, context=4, loss="dpo"),
        Case("1f1b", "llama", 2, 2, 2, split=True, chunk=3, context=2, loss="policy"),
        Case("1f1b", "bert", 2, 3, 2, tensor=2, context=2),
        Case("zb_h1", "bert", 2, 2, 2, split=True, vocab_multiple=8, context=2),
        Case("1f1b", "mixtral", 1, 3, 2, expert=2, chunk=5, context=2),
        Case("1f1b", "llama", 2, 3, 2, split=True, chunk=5, loss="dpo"),
        SPLIT,
        Case("zb_h1", "llama", 2, 3, 2, tensor=2, chunk=5, loss="dpo", rank=2),
        Case("bitpipe", "gpt", 2, 4, 4, tensor=2, chunk=5, packed=True),
        Case("zb_v", "llama", 2, 4, 4, data=2, packed=True),
        Case("bpipe", "llama", 4, 6, 4, tensor=2, chunk=7),
        Case("1f1b", "gpt", 2, 3, 2, data=2, tensor=2, split=True, chunk=3, packed=True),
        Case("zb_v", "qwen3", 2, 4, 4, tensor=2, split=True),
        Case("bitpipe", "gpt", 2, 4, 4, split=True, packed=True),
        Case("chimera", "llama", 4, 4, 4, split=True, chunk=5),
        Case("zb_h1", "gpt", 4, 3, 4, data=2, split=True),
        Case("interleaved_1f1b", "llama", 2, 4, 4, split=True, chunk=3),
        Case("gems", "gpt", 2, 3, 2, data=2, tensor=2),
        Case("dualpipe", "gpt", 2, 4, 4, chunk=5, packed=True),
        Case("gpipe", "qwen3", 4, 4, 4, packed=True),
        Case("hanayo", "llama", 4, 4, 8, chunk=5),
        Case("v_half", "gpt", 2, 4, 4, tensor=2),
        Case("1f1b", "mixtral", 2, 3, 2, expert=2, chunk=5),
        Case("1f1b", "mixtral", 2, 4, 2, data=2, split=True),
        Case("1f1b", "bert", 2, 3, 2, tensor=2, chunk=3),
        Case("zb_h1", "bert", 3, 2, 3, split=True, vocab_multiple=12),
        Case("breadth_first", "llama", 2, 4, 4, data=2),
        Case("bpipe", "llama", 4, 6, 4, chunk=7, loss="dpo"),
        Case("zb_v", "gpt", 2, 4, 4, tensor=2, split=True, loss="dpo"),
        Case("bitpipe", "gpt", 2, 4, 4, loss="dpo"),
        Case("zb_h1", "llama", 2, 4, 4, tensor=2, chunk=5, packed=True, loss="policy"),
        Case("interleaved_1f1b", "gpt", 2, 4, 4, data=2, split=True, loss="policy"),
        Case("bitpipe", "gpt", 2, 4, 4, loss="policy", rank=2),
        Case("bitpipe", "llama", 2, 4, 4, split=True, chunk=5, loss="dpo"),
        Case("1f1b", "llama", 2, 3, 2, split=True, chunk=5, loss="policy"),
        Case("zb_v", "llama", 2, 4, 4, data=2, chunk=5, loss="policy"),
        Case("bpipe", "gpt", 4, 6, 4, tensor=2, packed=True, loss="policy"),
        Case("1f1b", "gpt", 2, 3, 2, tensor=2, split=True, packed=True, loss="dpo", rank=2),
    ],
)


def own_loss(values: TokenValues, microbatch: Any) -> dict[str, Any]:
    """A clipped ratio, a divergence from a reference, entropy; a number that is reported and must have no gradient."""
    log_probs, entropies = values
    ratio = jnp.exp(log_probs - microbatch["old"])
    gain = jnp.minimum(ratio * microbatch["advantages"], jnp.clip(ratio, 0.8, 1.2) * microbatch["advantages"])
    gap = microbatch["reference"] - log_probs
    return {
        "policy": -(microbatch["weights"] * gain).sum(),
        "divergence": 0.2 * (microbatch["weights"] * (jnp.exp(gap) - gap - 1)).sum(),
        # Of all places: those without a target must have no gradient.
        "certainty": -0.3 * entropies.sum(),
        "measured_ratio": (microbatch["weights"] * ratio).sum(),
    }


LOSSES = {
    "own": TokenLoss(own_loss, lambda batch: batch["weights"].sum()),
    "dpo": dpo(beta=0.7),
    "policy": policy_gradient(divergence=0.2, entropy=0.1),
}


def batch_of(case: Case) -> dict[str, np.ndarray]:
    batch = random_batch(case.num_microbatches, seed=0, family=case.family)
    if case.packed:
        rows = PackedSequences(documents(), SEQ_LEN)
        some = np.linspace(0, rows.num_sequences - 1, case.num_microbatches * MICROBATCH_SIZE).astype(int)
        shape = case.num_microbatches, MICROBATCH_SIZE, SEQ_LEN
        batch = {name: leaf.reshape(shape) for name, leaf in rows.take(some, epoch=0).items()}
    generator = np.random.default_rng(1)
    shape = batch["targets"].shape
    around = -np.log(VOCAB_SIZE)  # so that some ratios are clipped
    own = {
        "advantages": generator.normal(size=shape),
        "weights": generator.random(shape) * (batch["targets"] >= 0),
        "old": generator.normal(around, 0.5, shape),
        "reference": generator.normal(around, 0.5, shape),
    }
    own |= {f"{name}_log_probs": own[name] for name in ("old", "reference")}
    return batch | {name: leaf.astype(np.float32) for name, leaf in own.items()}


def config_of_case(case: Case) -> Any:
    choices: dict[str, Any] = {"vocab_multiple": case.vocab_multiple} if case.vocab_multiple else {}
    choices |= {"num_experts": 4} if case.expert > 1 else {}
    choices |= {"lora": Lora(case.rank, 6.0, ("all",))} if case.rank else {}
    choices |= {"attention": "chunked"} if case.context > 1 else {}
    return config_of(case.family, num_layers=case.num_layers, **choices)


def pipeline_of_case(case: Case, **options: Any) -> Pipeline:
    schedule = one_batch(build(case.schedule, num_devices=case.pipe, num_microbatches=case.num_microbatches))
    sizes = {"data": case.data, "expert": case.expert, "tensor": case.tensor, "context": case.context}
    axis = TensorAxis.of(num_pipe=case.pipe if case.split else 1, deterministic=False, **sizes)
    return Pipeline(
        vocabulary(schedule) if case.split else schedule,
        make_mesh(pipe=case.pipe, **sizes),
        StageFunctions.of(LanguageModel(config_of_case(case), axis, **options)),
        num_layers=case.num_layers,
    )


def plain_values(config: Any, params: Any, microbatch: Any) -> TokenValues:
    """By `jax.nn.log_softmax` of whole logits."""
    logits = LanguageModel(config).logits(params, microbatch)
    if isinstance(logits, dict):
        logits = jnp.take_along_axis(logits["masked_lm"], microbatch["predicted"][..., None], axis=1)
    log_probs = jax.nn.log_softmax(logits)
    is_valid = microbatch["targets"] >= 0
    of_targets = jnp.take_along_axis(log_probs, jnp.maximum(microbatch["targets"], 0)[..., None], axis=-1)[..., 0]
    entropies = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
    return TokenValues(jnp.where(is_valid, of_targets, 0.0), jnp.where(is_valid, entropies, 0.0))


def plain(case: Case, params: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Losses, gradients and values, microbatch by microbatch."""
    config = config_of_case(case)
    own_loss = LOSSES[case.loss]
    scale = mean_factors(LanguageModel(config, loss=own_loss).num_losses(batch))

    def loss(params: Any, microbatch: Any) -> tuple[Any, Any]:
        values = plain_values(config, params, microbatch)
        own = own_loss.function(values, microbatch)
        own |= {name: jax.lax.stop_gradient(own[name]) for name in own if "measured" in name}
        others = LanguageModel(config).loss_sum(params, microbatch)
        if isinstance(others, dict):
            words, *names = others
            own = ({words: own} if words == "masked_lm" else own) | {name: others[name] for name in names}
        means = jax.tree.map(jnp.multiply, scale, own)
        return name_losses(means)["loss"], (means, values)

    each = [
        jax.jit(jax.value_and_grad(loss, has_aux=True))(params, jax.tree.map(lambda leaf, m=m: leaf[m], batch))
        for m in range(case.num_microbatches)
    ]
    total = jax.tree.map(
        lambda *leaves: sum(np.asarray(leaf, np.float64) for leaf in leaves),
        *[(means, grads) for (_, (means, _)), grads in each],
    )
    return *total, jax.tree.map(lambda *leaves: np.stack(leaves), *[values for (_, (_, values)), _ in each])


def errors_of(case: Case, change: Any = None) -> dict[str, float]:
    """Errors of gradients, losses and values; `change` of the batch that the pipeline gets."""
    params, batch = random_params(config_of_case(case)), batch_of(case)
    wanted_losses, wanted_grads, wanted_values = plain(case, params, batch)
    pipeline = pipeline_of_case(case, loss=LOSSES[case.loss])
    given = change(batch) if change else batch
    scale = mean_factors(LanguageModel(config_of_case(case), loss=LOSSES[case.loss]).num_losses(batch))
    staged = jax.jit(pipeline.to_stages, out_shardings=pipeline.shardings(jax.eval_shape(pipeline.to_stages, params)))(
        params
    )
    losses, grads = pipeline.loss_and_grads(staged, given, scale)
    names = {"advantages", "weights", "old", "reference"}  # of the loss, which values do not need
    values = pipeline.values(staged, {name: leaf for name, leaf in given.items() if name.split("_")[0] not in names})
    wanted_grads = trained(wanted_grads, pipeline.functions.is_trained)
    errors = relative_errors(jax.tree.map(np.asarray, pipeline.from_stages(grads)), wanted_grads)
    for name, found in (("training", losses), ("loss", pipeline.loss(staged, given, scale))):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted_losses), strict=True)
        errors[name] = max(float(np.abs(one - other).max() / (1 + np.abs(other).max())) for one, other in pairs)
    for name, found, wanted in zip(values._fields, values, wanted_values, strict=True):
        assert found.dtype == np.float32
        errors[name] = np.abs(found - wanted).max()
    return errors


def chunked(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_TOKENS", "FEWER_TOKENS"):
        monkeypatch.setattr(cross_entropy, name, case.chunk)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_losses_and_gradients_are_those_of_plain_log_softmax(case, monkeypatch):
    chunked(case, monkeypatch)
    errors = errors_of(case)
    assert max(errors.values()) <= LARGEST_ERROR, errors


def shifted(name: str) -> Any:
    return lambda batch: batch | {name: np.roll(batch[name], 1, axis=-1)}


@pytest.mark.parametrize("case", tiers([], slow=[ONE, SPLIT]), ids=str)
def test_what_belongs_to_another_token_would_be_seen(case, monkeypatch):
    chunked(case, monkeypatch)
    errors = errors_of(case, shifted("advantages"))
    assert all(error > 100 * LARGEST_ERROR for name, error in errors.items() if "[" in name), errors
    assert max(errors[name] for name in TokenValues._fields) <= LARGEST_ERROR
    errors = errors_of(case, shifted("targets"))
    assert errors["log_probs"] > 0.1
    assert errors["training"] > 100 * LARGEST_ERROR


@pytest.mark.parametrize("split", tiers([], slow=[True, False]))
def test_the_mean_cross_entropy_as_a_loss_of_ones_own_is_the_models(split):
    case = ONE._replace(split=split)
    config, params, batch = config_of_case(case), random_params(config_of_case(case)), batch_of(case)
    words = TokenLoss(lambda values, microbatch: -values.log_probs.sum())
    factor = 1 / (batch["targets"] >= 0).sum()
    found = []
    for loss in ({}, {"loss": words}):
        assert LanguageModel(config, **loss).num_losses(batch) == (batch["targets"] >= 0).sum()
        pipeline = pipeline_of_case(case, **loss)
        found.append(pipeline.loss_and_grads(pipeline.to_stages(params), batch, factor))
    (loss, grads), (own_loss, own_grads) = found
    assert abs(loss - own_loss) <= 1e-6 * loss
    assert max(relative_errors(jax.tree.map(np.asarray, own_grads), grads).values()) <= LARGEST_ERROR


def test_forwards_alone_keep_nothing_for_a_backward():
    pipeline = pipeline_of_case(ONE)
    given = pipeline.to_stages(random_params(config_of_case(ONE))), batch_of(ONE)
    shapes = pipeline.shapes(*given, random=False, table=pipeline.forward_table, values=True)
    assert held_bytes(shapes)["pages"] == 0
    assert {leaf.shape for leaf in jax.tree.leaves(shapes.values)} == {(MICROBATCH_SIZE, SEQ_LEN)}
    # As many rounds as the forwards of a pipeline take.
    assert simulate(pipeline.forward_table.schedule).makespan == ONE.num_microbatches + ONE.pipe - 1


@pytest.mark.parametrize("loss", [None, "own"])
def test_a_head_holds_the_logits_of_a_chunk_alone(loss, monkeypatch):
    chunked(ONE, monkeypatch)
    config, batch = config_of_case(ONE), batch_of(ONE)
    model = LanguageModel(config, **({"loss": LOSSES[loss]} if loss else {}))
    shared = random_params(config)["shared"]
    microbatch = jax.tree.map(lambda leaf: leaf[0], batch)
    x = np.ones((MICROBATCH_SIZE, SEQ_LEN, 16), np.float32)
    own = model.loss.zeros(microbatch)
    for function, more in ((model.head_values, ()), (model.head_backward, (own, shared))):
        jaxpr = jax.make_jaxpr(function)(shared, x, microbatch, *more).jaxpr
        sizes = {var.aval.shape for eqn in all_equations(jaxpr) for var in eqn.outvars}
        most = max(int(np.prod(shape[:-1])) for shape in sizes if shape[-1:] == (VOCAB_SIZE,))
        assert most == MICROBATCH_SIZE * SEQ_LEN // 4  # of at most five tokens four chunks


def test_a_pair_on_two_devices_is_refused_before_compilation():
    case = Case("1f1b", "llama", 2, 3, 2, data=2, loss="dpo")
    pipeline = pipeline_of_case(case, loss=LOSSES["dpo"])
    with pytest.raises(ConfigError, match="a microbatch has 1 rows on a device"):
        pipeline.shapes(pipeline.to_stages(random_params(config_of_case(case))), batch_of(case))
