"""Means of several kinds of loss are over the whole batch, and there is none of no terms."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from running import metrics, run, train

from jaxpipe.config import base_config
from jaxpipe.data.prepare.preparation import prepare
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.training import loop
from jaxpipe.training.run_folder import read_config
from jaxpipe.training.step import mean_factors, where_terms
from jaxpipe.training.task import task_of


def test_a_mean_of_nothing_pulls_nowhere_and_is_not_told():
    means = {"many": 1.5, "none": 0.0}
    shown = where_terms({"loss": 1.5, "many_loss": 1.5, "none_loss": 0.0}, means, {"many": 4, "none": 0})
    assert {name: float(value) for name, value in shown.items()} == pytest.approx(
        {"loss": 1.5, "many_loss": 1.5, "none_loss": np.nan}, nan_ok=True
    )
    assert np.isnan(where_terms({"loss": 0.0, "a_loss": 0.0, "b_loss": 0.0}, {"a": 0.0, "b": 0.0}, 0)["loss"])
    found = mean_factors({"many": np.int32(4), "none": np.int32(0)})
    assert {name: float(value) for name, value in found.items()} == {"many": 0.25, "none": 1.0}


WORDS_AND_ORDER = {"eval_loss": 2.5 + 1.5, "eval_words_loss": 2.5, "eval_order_loss": 1.5}
WORDS = {"eval_loss": 2.5, "eval_words_loss": 2.5}


@pytest.mark.parametrize(
    ("num_words", "num_sequences", "expected"), [(3, 2, WORDS_AND_ORDER), (3, 0, WORDS), (0, 0, {})]
)
def test_held_out_means_weigh_every_term_alike(num_words, num_sequences, expected, monkeypatch):
    """Two batches, of 3 words and 1, and of no sequence and 2; or of no sequence in either, or of no word either."""
    more = num_words > 0
    sums = [{"words": 6.0 * more, "order": 0.0}, {"words": 4.0 * more, "order": 1.5 * num_sequences}]
    nums = [{"words": num_words, "order": 0}, {"words": int(more), "order": num_sequences}]
    # Losses of training alone are left out, and with them their terms.
    for each, value in ((sums, 7.0), (nums, 3)):
        each[:] = [of | {"mtp": value} for of in each]
    monkeypatch.setattr(loop, "put_batch", lambda _, batch: batch)
    setup: Any = SimpleNamespace(
        pipeline=None,
        task=SimpleNamespace(
            model=SimpleNamespace(num_losses=nums.__getitem__, training_losses=("mtp",)),
            heldout_batches=SimpleNamespace(first=lambda num_batches: range(num_batches)),
        ),
    )
    found = loop.heldout_losses(lambda _, batch: sums[batch], setup, None, num_batches=2)
    assert found == pytest.approx(expected)


def prompts(folder):
    """Sixty answered prompts much longer than a row of 16, of which few have a letter of an answer."""
    lines = [{"prompt": "a" * 1000, "answer": "yes"}] * 60
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sizes = {"file_format": "chat", "seq_len": 1100, "overwrite": True}
    prepare([str(folder / "chats.jsonl")], tokenizer="byte", output=str(folder / "out"), **sizes)
    return [
        f"--config.data.files=indexed:{folder}/out",
        "--config.data.tokenizer=byte",
        "--config.data.packing=documents",
        "--config.model.hidden_dropout=0",
    ]


def test_nothing_to_learn_in_the_held_out_rows_is_told_before_training(tmp_path):
    done = train(tmp_path / "run", *prompts(tmp_path))
    assert done.returncode == 2
    assert "nothing to learn in the held-out rows that train.eval_batches=2 takes" in done.stderr
    assert "longer than a row and so cut: 57 of 57" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("packing", ["documents", "none", "windows"])
def test_nothing_to_learn_is_told_before_training(tmp_path, packing):
    prompts(tmp_path)
    learned = np.memmap(tmp_path / "out.loss.bin", np.uint8, "r+")
    learned[:] = 0
    learned.flush()
    config = base_config()
    config.data.update(files=f"indexed:{tmp_path}/out", tokenizer="byte", packing=packing, batch_size=4, seq_len=16)
    config.pipeline.num_microbatches = 1
    with pytest.raises(DataError, match=r"nothing to learn to train on(.|\n)*rule learned-tokens"):
        task_of(config)
    learned[:] = 1
    learned.flush()
    task_of(config)


def test_a_masked_model_does_not_ignore_what_is_learned(tmp_path):
    prompts(tmp_path)
    config = base_config("bert")
    config.data.update(files=f"indexed:{tmp_path}/out", tokenizer="byte", batch_size=4, seq_len=16)
    config.pipeline.num_microbatches, config.model.vocab_size = 1, 260
    with pytest.raises(ConfigError, match=r"says which tokens are learned, and a masked model asks for others"):
        task_of(config)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream_2bw"])
def test_a_batch_of_prompts_alone_has_no_loss(tmp_path, schedule):
    workdir = tmp_path / "run"
    more = ["--config.train.eval_batches=99", f"--config.pipeline.schedule={schedule}", "--config.mesh.data=1"]
    done = train(workdir, *prompts(tmp_path), *more)
    assert done.returncode == 0, done.stderr
    batches = task_of(read_config(str(workdir))).train_batches
    has_terms = [bool((batches.at(step)["targets"] >= 0).any()) for step in range(12)]
    assert 0 < sum(has_terms) < 12
    rows = metrics(workdir)
    assert [row["loss"] is not None for row in rows] == has_terms
    assert not any(row["skipped"] for row in rows)
    assert rows[-1]["eval_loss"] > 3
    few = run("eval", f"--workdir={workdir}", "--config.train.eval_batches=1")
    assert few.returncode == 2
    assert "nothing to learn in the held-out rows that train.eval_batches=1 takes" in few.stderr
