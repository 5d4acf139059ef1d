"""Losses of one's own in a run: rows of tokens become batches, log-probabilities come back, and `fit` trains."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_gru import MODEL
from own_gru import batches as gru_batches
from running import settings

from jaxpipe.config import base_config
from jaxpipe.config.model import model_config
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.mesh import TensorAxis, key_of, make_mesh
from jaxpipe.models import LanguageModel, TokenLoss, TokenValues
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build
from jaxpipe.training import dpo, fit, log_probs, pair_batch, policy_gradient, token_batch

SEQ_LEN, NUM_ROWS = 12, 8


@pytest.fixture(autouse=True)
def _settings():
    with settings():
        yield


def config_of(**changed: Any) -> Any:
    config = base_config("llama")
    config.model.update(num_layers=2, hidden=16, num_heads=2, num_kv_heads=1, feed_forward=24)
    config.data.update(tokenizer="byte", batch_size=NUM_ROWS, seq_len=SEQ_LEN)
    config.pipeline.update(schedule="1f1b", num_microbatches=2)
    config.mesh.update(platform="cpu", pipe=2)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=0)
    config.train.update(steps=3, eval_every=3, eval_batches=1, log_every=1)
    config.checkpoint.save_at_end = False
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changed.items()})
    return config


def tokens_of(seed: int = 0, rows: int = NUM_ROWS) -> np.ndarray:
    return np.random.default_rng(seed).integers(24, size=(rows, SEQ_LEN))


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_log_probs_are_of_each_token_given_those_before_in_its_document(context):
    """Five rows, in microbatches of two; documents of 3, 1 and 8 tokens, in every other row one alone."""
    model = LanguageModel(model_config(config_of()))
    params = model.init(jax.random.key(0))
    schedule = build("1f1b", num_devices=2, num_microbatches=2)
    of_mesh = LanguageModel(model_config(config_of(model__attention="chunked")), TensorAxis.of(context=context))
    mesh = make_mesh(pipe=2, context=context)
    pipeline = Pipeline(schedule, mesh, StageFunctions.of(of_mesh), num_layers=2)
    tokens = tokens_of(rows=5)
    documents = np.repeat([[0, 0, 0, 1, *[2] * 8]], 5, axis=0)
    documents[1::2] = 0
    is_answer = np.random.default_rng(1).random(tokens.shape) < 0.8
    found = log_probs(pipeline, pipeline.to_stages(params), tokens, documents=documents, is_answer=is_answer)
    assert found.log_probs.shape == tokens.shape
    wanted = TokenValues(np.zeros(tokens.shape), np.zeros(tokens.shape))
    for row in range(5):
        starts = [*np.flatnonzero(np.diff(documents[row], prepend=-1)), SEQ_LEN]
        for start, stop in pairwise(starts):
            document = tokens[row, start:stop]
            of_all = jax.nn.log_softmax(model.logits(params, {"tokens": document[None]}))[0, :-1]
            places = np.arange(start + 1, stop)
            wanted.log_probs[row, places] = of_all[np.arange(len(places)), document[1:]]
            wanted.entropies[row, places] = -(np.exp(of_all) * of_all).sum(axis=-1)
    for ours, others in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, others * is_answer, atol=1e-5)
    assert (found.log_probs[:, 1:] < 0).sum() > 30


VALUES = TokenValues(
    np.log(np.float32([[0.5, 0.3, 0.2], [0.1, 0.6, 1.0]])), np.float32([[1.0, 0.5, 0.25], [2.0, 0.125, 0.0]])
)
TARGETS = np.int32([[1, 2, 3], [4, 5, -1]])


def test_a_policy_gradient_is_the_formula_of_its_paper():
    batch = {
        "targets": TARGETS,
        "advantages": np.float32([2, -1]),
        "weights": np.float32([[1, 1, 0.5], [1, 0, 9]]),
        "old_log_probs": np.log(np.float32([[0.5, 0.2, 0.4], [0.2, 0.6, 1.0]])),
        "reference_log_probs": np.log(np.float32([[0.25, 0.3, 0.2], [0.1, 0.6, 1.0]])),
    }
    loss = policy_gradient(clip=0.2, divergence=10.0, entropy=0.1)
    sums = loss.of_values(VALUES, batch)
    # Ratios 1, 1.5, 0.5 with advantage 2: the second counts as 1.2. Ratio 0.5 with advantage -1 counts as 0.8.
    assert sums["policy"] == pytest.approx(-(2 * 1 + 2 * 1.2 + 0.5 * 2 * 0.5 - 0.8))
    # exp(r) - r - 1 of a reference with half the probability.
    assert sums["divergence"] == pytest.approx(10 * (0.5 + np.log(2) - 1))
    assert sums["entropy"] == pytest.approx(-0.1 * (1 + 0.5 + 0.125 + 2))
    assert sums["measured_clipped"] == pytest.approx(2.5)
    assert loss.num_terms(batch) == 3.5
    alone = {name: batch[name] for name in ("targets", "advantages")}
    assert policy_gradient().of_values(VALUES, alone)["policy"] == -(3 * 2 - 2 * 1)
    assert policy_gradient().num_terms(alone) == 5


def test_a_preference_is_the_formula_of_its_paper():
    batch = {"targets": TARGETS, "reference_log_probs": np.zeros((2, 3), np.float32)}
    sums = dpo(beta=0.5).of_values(VALUES, batch)
    margin = 0.5 * (np.log(0.5 * 0.3 * 0.2) - np.log(0.1 * 0.6))  # the last target is not valid
    assert sums["preference"] == pytest.approx(-np.log(1 / (1 + np.exp(-margin))))
    assert sums["measured_margin"] == pytest.approx(margin)
    assert sums["measured_accuracy"] == 0
    assert dpo().num_terms({"targets": np.zeros((3, 4, 5))}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream_2bw"])
def test_the_cross_entropy_as_a_loss_of_ones_own_trains_alike(schedule, context, tmp_path):
    given = {
        "train_batches": lambda step: token_batch(tokens_of(step)),
        "heldout_batches": [token_batch(tokens_of(99))],
    }
    own = TokenLoss(lambda values, microbatch: -values.log_probs.sum())
    of_mesh = {"pipeline__schedule": schedule, "mesh__context": context, "model__attention": "chunked"}
    rows = [
        fit(config_of(**changed), tmp_path / str(number), **given, **loss).metrics
        for number, (changed, loss) in enumerate([({"pipeline__schedule": schedule}, {}), (of_mesh, {"loss": own})])
    ]
    for name in ("loss", "grad_norm", "eval_loss"):
        values = [[row[name] for row in of_run if name in row] for of_run in rows]
        assert values[0]
        np.testing.assert_allclose(*values, rtol=1e-5)


@pytest.mark.ci
def test_preferences_are_learned_from_the_model_that_the_run_starts_from(tmp_path):
    """The first loss is that of a model that is its own reference: log 2, exactly that of no margin."""
    pairs = [(row[:4], row[4:7], row[7:11]) for row in tokens_of().tolist()[: NUM_ROWS // 2]]
    batch = pair_batch(pairs, seq_len=SEQ_LEN)
    start = fit(config_of(), tmp_path / "start", train_batches=[batch], dry_run=True)
    params = LanguageModel(model_config(config_of())).init(key_of(config_of().train.seed))
    reference = log_probs(start.pipeline, start.pipeline.to_stages(params), batch["tokens"]).log_probs
    of_targets = token_batch(batch["tokens"], reference_log_probs=reference)["reference_log_probs"]
    run = fit(
        config_of(train__steps=8),
        tmp_path / "run",
        loss=dpo(),
        train_batches=[batch | {"reference_log_probs": of_targets}] * 8,
    )
    first, *_, last = run.metrics
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert first["margin"] == pytest.approx(0, abs=1e-6)
    assert last["loss"] < 0.6
    assert last["accuracy"] == 1


CASES = [
    ({}, {"model": MODEL, "loss": dpo(), "train_batches": gru_batches}, ConfigError, "loss is given with a model"),
    ({}, {"train_batches": lambda step: {"tokens": tokens_of()}}, ConfigError, "train_batches have no targets"),
    ({}, {"train_batches": lambda step: token_batch(tokens_of(rows=4))}, ConfigError, "set data.batch_size=4"),
    ({}, {"train_batches": lambda step: token_batch(tokens_of()[:, :6])}, ConfigError, "set data.seq_len=6"),
    ({}, {"heldout_batches": [token_batch(tokens_of())]}, ConfigError, "heldout_batches is given without a model"),
    (
        {"mesh__data": 4},
        {
            "loss": dpo(),
            "train_batches": lambda step: token_batch(tokens_of(), reference_log_probs=np.zeros((8, SEQ_LEN))),
        },
        ConfigError,
        "a microbatch has 1 rows on a device",
    ),
]


@pytest.mark.parametrize(("changed", "given", "error", "message"), CASES)
def test_what_does_not_fit_is_refused_before_compilation(changed, given, error, message, tmp_path):
    with pytest.raises(error, match=message):
        fit(config_of(**changed), tmp_path, **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: token_batch(tokens_of(), advantages=np.zeros((NUM_ROWS, 3))), r"advantages \[8, 3\]"),
        (lambda: token_batch(tokens_of(), is_answer=np.zeros(NUM_ROWS)), r"is_answer \[8\]"),
        (lambda: token_batch(tokens_of()[0]), r"rows of tokens \[12\]"),
        (lambda: pair_batch([([1, 2], [3], [4, 5])], seq_len=3), "pair 1: a prompt with its answer has 4 tokens"),
    ],
)
def test_rows_that_do_not_fit_are_refused(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_a_row_has_what_belongs_to_it_as_it_is():
    batch = token_batch(tokens_of(), advantages=np.arange(NUM_ROWS), documents=np.zeros((NUM_ROWS, SEQ_LEN)))
    assert batch["advantages"].tolist() == list(range(NUM_ROWS))
    assert batch["positions"].tolist() == [list(range(SEQ_LEN))] * NUM_ROWS
    assert jnp.all(batch["targets"][:, -1] == -1)
