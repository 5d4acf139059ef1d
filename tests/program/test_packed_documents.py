"""Documents back to back in a row: the step has the loss and gradients of the documents one by one, under plain grad.

The reference has each document in a row of its own, padded at its end, where no causal token sees it: neither positions
nor masks of documents take part in it. The bound is that of `tiny_gpt`.
"""

import functools

import jax
import numpy as np
import pytest
from tiers import tiers
from tiny_gpt import LARGEST_ERROR
from tiny_models import MICROBATCH_SIZE, SEQ_LEN, VOCAB_SIZE, config_of, pipeline_of, random_params, relative_errors

from jaxpipe.data import Documents, PackedSequences
from jaxpipe.lowering.pairs import pairs_in_rounds
from jaxpipe.models import LanguageModel, attention_chunked
from jaxpipe.schedules import build
from jaxpipe.schedules.passes.overlap import overlap

NUM_LAYERS, NUM_MICROBATCHES = 4, 8
PAIRED = "interleaved_1f1b, paired"

# Family, schedule, attention, recomputation, tensor, data: every pair of values at least once, with `slow`.
CASES = tiers(
    [("gpt", "1f1b", "xla", "none", 1, 1)],
    ci=[
        ("llama", "bpipe", "xla", "full", 1, 1),
    ],
    slow=[
        ("qwen3", "zb_h1", "chunked", "none", 2, 1),
        ("gpt", "zb_h1", "xla", "attention", 1, 2),
        ("qwen3", "chimera", "xla", "none", 1, 2),
        ("llama", "interleaved_1f1b", "chunked", "full", 1, 1),
        ("gpt", "bitpipe", "chunked", "full", 2, 1),
        ("gpt", "gpipe", "chunked", "none", 2, 2),
        ("llama", "gpipe", "xla", "full", 1, 1),
        ("gpt", "dualpipe_v", "xla", "attention", 2, 1),
        ("qwen3", "dualpipe", "chunked", "full", 1, 1),
        ("gpt", "hanayo", "chunked", "full", 1, 1),
        ("qwen3", "v_half", "xla", "attention", 2, 2),
        ("gpt", "zb_h2", "xla", "full", 2, 1),
        ("qwen3", "mixpipe", "xla", "attention", 2, 1),
        ("gpt", "gems", "xla", "none", 1, 1),
        ("llama", "v_min", "chunked", "full", 2, 1),
        ("gpt", "breadth_first", "xla", "full", 1, 2),
        ("llama", "zb_v", "chunked", "none", 2, 1),
        ("gpt", "zb_v", "xla", "full", 1, 2),
        ("qwen3", "1f1b", "chunked", "full", 1, 2),
        ("qwen3", "bpipe", "chunked", "none", 2, 1),
        ("llama", PAIRED, "chunked", "none", 2, 1),
        ("gpt", PAIRED, "xla", "full", 1, 1),
    ],
)


@functools.cache
def documents() -> Documents:
    """Of 1 to 20 tokens: some are left out, some fill a row, some are cut."""
    generator = np.random.default_rng(4)
    ends = np.cumsum(generator.choice([1, 2, 3, 4, 5, 6, 9, 12, 20], 300))
    tokens = generator.integers(VOCAB_SIZE, size=ends[-1])
    return Documents.ending_at(tokens, lambda: ends, (generator.random(ends[-1]) < 0.8).astype(np.uint8))


def packed() -> dict[str, np.ndarray]:
    """Rows of short documents, but for the first; the last has padding."""
    rows = PackedSequences(documents(), SEQ_LEN)
    last = rows.num_sequences - 1
    some = np.linspace(0.65 * last, last, NUM_MICROBATCHES * MICROBATCH_SIZE).astype(int)
    batch = rows.take(some, epoch=0)
    return {name: values.reshape(NUM_MICROBATCHES, MICROBATCH_SIZE, SEQ_LEN) for name, values in batch.items()}


def one_by_one(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each document, and each run of padding, in a row of its own, "document seq"."""
    flat = {name: values.reshape(-1) for name, values in batch.items()}
    parts = np.split(np.arange(len(flat["tokens"])), np.flatnonzero(flat["positions"] == 0)[1:])
    alone = {
        "tokens": np.zeros((len(parts), SEQ_LEN), np.int32),
        "targets": np.full((len(parts), SEQ_LEN), -1, np.int32),
    }
    for row, part in enumerate(parts):
        for name, values in alone.items():
            values[row, : len(part)] = flat[name][part]
    return alone


@functools.cache
def expected(family: str):
    config = config_of(family, num_layers=NUM_LAYERS)
    batch, params = packed(), random_params(config)
    scale = 1 / (batch["targets"] >= 0).sum()
    loss = lambda params: scale * LanguageModel(config).loss_sum(params, one_by_one(batch))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_loss_and_gradients_are_those_of_the_documents_one_by_one(case, monkeypatch):
    family, method, attention, recompute, tensor, data = case
    monkeypatch.setattr(attention_chunked, "BLOCK_MULTIPLE", 1)  # eight blocks of queries, and keys left out
    config = config_of(family, num_layers=NUM_LAYERS, attention=attention, recompute=recompute)
    num_devices = 4 if method == "bpipe" else 2  # of fewer it saves nothing
    sizes = {"num_devices": num_devices, "num_microbatches": NUM_MICROBATCHES // data}
    if method == PAIRED:
        schedule = overlap(build("interleaved_1f1b", **sizes, extra_warm_up=True))
        assert pairs_in_rounds(schedule).has_pairs
    else:
        schedule = build(method, **sizes)
    # What devices along `data` share takes turns.
    shard = ("weights", "gradients")[method == "gpipe"] if data == 2 else "optimizer"
    pipeline = pipeline_of(schedule, config, tensor=tensor, data=data, shard=shard)
    batch = {name: values.reshape(NUM_MICROBATCHES // data, -1, SEQ_LEN) for name, values in packed().items()}
    params = jax.jit(pipeline.to_stages)(random_params(config))
    loss, grads = pipeline.loss_and_grads(params, batch, 1 / (batch["targets"] >= 0).sum())
    wanted, wanted_grads = expected(family)
    assert float(loss) == pytest.approx(float(wanted), rel=LARGEST_ERROR)
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted_grads)
    assert max(errors.values()) <= LARGEST_ERROR, errors


# Rotary positions do not show where a document begins, only how far apart two of its tokens are.
@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("gpt", "a key"),
        pytest.param("llama", "a key", marks=pytest.mark.ci),
        ("gpt", "a position"),
        ("gpt", "a border"),
    ],
)
def test_the_bound_would_show(family, wrong):
    """One key of another document seen, one document's positions off by one, or one target of the next document."""
    config = config_of(family, num_layers=NUM_LAYERS)
    model, batch, params = LanguageModel(config), packed(), random_params(config)
    batch = {name: values.reshape(-1, SEQ_LEN) for name, values in batch.items()}
    row, column = np.argwhere((batch["positions"] == 0) & (batch["targets"] >= 0) & (np.arange(SEQ_LEN) > 1))[0]
    end = column + 1
    while end < SEQ_LEN and batch["positions"][row, end]:
        end += 1
    others = {name: values.copy() for name, values in batch.items()}
    if wrong == "a border":
        others["targets"][row, column - 1] = batch["tokens"][row, column]
    elif wrong == "a position":
        others["positions"][row, column:end] += 1
    else:
        others["positions"][row, column - 1] = 0
        others["positions"][row, column:end] += 1

    def loss(params, batch):
        return model.loss_sum(params, batch) / (packed()["targets"] >= 0).sum()

    found = jax.jit(jax.grad(loss))(params, others)
    assert max(relative_errors(found, expected(family)[1]).values()) > 100 * LARGEST_ERROR
