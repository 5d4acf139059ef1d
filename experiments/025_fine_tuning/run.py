"""What packing wastes and costs, what Muon gains on the quickstart, and how fast sampling is.

    python experiments/025_fine_tuning/run.py                 # about half an hour on 2 cores
    python experiments/025_fine_tuning/run.py --only=waste    # or loader, steps, attention, sampling, training
    python experiments/025_fine_tuning/run.py --quick         # half a minute: waste and sampling, smaller

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxpipe.config import base_config, model_config
from jaxpipe.data import Documents, PackedSequences
from jaxpipe.estimate import resolve
from jaxpipe.models import LanguageModel
from jaxpipe.models.attention import Visible, chunked
from jaxpipe.sample import generate
from jaxpipe.training.batches import batches_of, example_batch, put_batch, read_corpus
from jaxpipe.training.setup import devices_of, pipeline_of
from jaxpipe.training.task import language_model

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
PACKINGS = ("windows", "documents")


def row(*cells: object) -> None:
    """Prints a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def table(*heads: str) -> None:
    """Prints the head of a table."""
    print()
    row(*heads)
    print("|" + "---|" * len(heads))


def quickstart(**data: Any) -> ConfigDict:
    """The config of configs/quickstart.py."""
    sys.path.insert(0, str(ROOT))
    from configs.quickstart import get_config

    config = get_config()
    config.data.update(data)
    return config


# ---- Waste


def waste(*, is_quick: bool) -> None:
    """Fractions of columns that are padding."""
    table("documents", "tokens of a row", "rows", "padding, best fit", "padding, one document a row")
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(4096), 5000)).astype(int)
    texts = {"5,000 of 16 to 4,096 tokens, logarithms even": np.cumsum(lengths)}
    if not is_quick:
        (texts["files of the standard library, bytes"],) = (
            source.spans[1] for source in read_corpus(quickstart()).sources.values()
        )
    for name, ends in texts.items():
        documents = Documents.ending_at(np.zeros(0, np.uint8), lambda ends=ends: ends)
        for seq_len in (1024, 4096):
            packed, alone = (PackedSequences(documents, seq_len, one_each) for one_each in (False, True))
            row(name, seq_len, f"{packed.num_sequences:,}", f"{packed.padding:.3%}", f"{alone.padding:.1%}")


# ---- Loader


def loader(*, is_quick: bool) -> None:
    """Tokens per second of `Batches.at`, in this process, on one core."""
    table("rows", "first batch, s", "tokens/s")
    for packing in PACKINGS:
        config = quickstart(packing=packing)
        batches = batches_of(config, read_corpus(config).train)
        begun_s = time.perf_counter()
        num_tokens = batches.at(0)["tokens"].size
        first_s, begun_s, steps = time.perf_counter() - begun_s, time.perf_counter(), 0
        while time.perf_counter() - begun_s < (0.3 if is_quick else 5):
            steps += 1
            batches.at(steps)
        row(packing, f"{first_s:.2f}", f"{steps * num_tokens / (time.perf_counter() - begun_s):,.0f}")


# ---- A step


def steps(*, is_quick: bool) -> None:
    """Processor time of loss and gradients, and bytes of a page, without and with documents in a row."""
    of = ("page, bytes", "processor s")
    table("attention", *(f"{what}: {packing}" for what in of for packing in PACKINGS), "ratio")
    for attention in ("xla", "chunked"):
        found = {}
        for packing in PACKINGS:
            config = quickstart(packing=packing, seq_len=256, batch_size=8)
            config.model.update(hidden=256, num_heads=4, attention=attention)
            config.pipeline.num_microbatches, config.mesh.pipe = 4, 4
            devices = devices_of(config)
            spec = resolve(config)
            model = language_model(spec.config)
            pipeline = pipeline_of(spec, model, devices.devices)
            params = jax.jit(lambda key, p=pipeline, m=model: p.to_stages(m.init(key)))(jax.random.key(0))
            batch = put_batch(pipeline, example_batch(config))
            shapes = pipeline.shapes(params, batch, random=False)
            step = jax.jit(pipeline.loss_and_grads)
            found[packing] = shapes.storage.pools[0].page_bytes, lambda s=step, p=params, b=batch: s(p, b, 1.0)
        times = in_turn([run for _, run in found.values()], 1 if is_quick else 15)
        pages = [page for page, _ in found.values()]
        row(attention, *pages, *(f"{one:.3f}" for one in times), f"{times[1] / times[0]:.3f}")


def in_turn(runs: list[Callable[[], Any]], num: int) -> list[float]:
    """Median processor seconds of each of `runs`, called in turn."""
    seconds: list[list[float]] = [[] for _ in runs]
    for each in range(num + 1):
        for found, run in zip(seconds, runs, strict=True):
            begun_s = time.process_time()
            jax.block_until_ready(run())
            if each:
                found.append(time.process_time() - begun_s)
    return [statistics.median(found) for found in seconds]


def attention(*, is_quick: bool) -> None:
    """Processor time of chunked attention, forward and backward, by the documents of a row of 2048 tokens."""
    seq, heads, size = 2048, 8, 64
    arrays = jax.random.normal(jax.random.key(0), (4, 1, seq, heads, size))

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, weight: jax.Array, positions: Any) -> jax.Array:
        return (chunked(query, key, value, visible=Visible(positions=positions), dropout=None) * weight).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    place = np.arange(seq)
    rows = {"no documents": None, "1": place, "8, equal": place % (seq // 8)}
    for seed in SEEDS:
        starts = np.sort(np.random.default_rng(seed).choice(np.arange(1, seq), 7, replace=False))
        first = np.concatenate([[0], starts])[np.searchsorted(starts, place, side="right")]
        rows[f"8, cut at random ({seed})"] = place - first
    runs = [
        lambda p=positions: step(*arrays, None if p is None else jnp.array(p, jnp.int32)[None])
        for positions in rows.values()
    ]
    times = in_turn(runs, 1 if is_quick else 9)
    table("documents in the row", "processor s", "of one document's")
    for name, seconds in zip(rows, times, strict=True):
        row(name, f"{seconds:.3f}", f"{seconds / times[1]:.2f}")


# ---- Sampling


def sampling(*, is_quick: bool) -> None:
    """Tokens per second of a model of the quickstart's size, all computed again, and with keys and values kept."""
    num_tokens = 64 if is_quick else 512
    config = base_config()
    config.model.update(num_layers=8, hidden=128, num_heads=2)
    config.data.seq_len = num_tokens
    model = LanguageModel(model_config(config))
    params = model.init(jax.random.key(0))

    @dataclasses.dataclass(frozen=True)
    class Forgetful(LanguageModel):
        def new_cache(self, *_: Any, **__: Any) -> None:
            return None

    table("model", "samples", "tokens/s", "same tokens")
    said = []
    for name, one, num_samples in (
        ("all computed again", Forgetful(model.config), 1),
        ("kept keys and values", model, 1),
        ("kept keys and values", model, 16),
    ):
        begun_s, tokens = 0.0, []
        sizes = {"num_tokens": num_tokens - 3, "window": num_tokens, "num_samples": num_samples}
        walk = generate(one, params, [1, 2, 3], temperature=0.0, **sizes)
        for index, token in enumerate(walk):
            tokens.append(int(token[0]))
            if index == 1:  # both programs are compiled
                begun_s = time.perf_counter()
        rate = (len(tokens) - 2) * num_samples / (time.perf_counter() - begun_s)
        said.append(tokens)
        row(name, num_samples, f"{rate:,.0f}", tokens == said[0])


# ---- Training


def training(*, is_quick: bool) -> None:
    """Held-out loss of the quickstart at equal tokens: rows and optimizers."""
    del is_quick
    table("rows", "optimizer", "seed", "held-out loss", "tokens/s")
    for packing, name, seeds in (
        ("windows", "adamw", SEEDS),
        ("windows", "muon", SEEDS),
        ("documents", "adamw", SEEDS[:1]),
    ):
        for seed in seeds:
            loss, rate = trained(packing, name, seed)
            row(packing, name, seed, f"{loss:.4f}", f"{rate:,.0f}")


def trained(packing: str, optimizer: str, seed: int) -> tuple[float, float]:
    """Last held-out loss and median tokens per second of a run."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"data.packing": packing, "optimizer.name": optimizer, "train.seed": seed, "data.seed": seed}
        command = [sys.executable, "-m", "jaxpipe.train", "--config=configs/quickstart.py", f"--workdir={folder}/run"]
        command += [f"--config.{name}={value}" for name, value in flags.items()]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [one["eval_loss"] for one in rows if "eval_loss" in one]
    return losses[-1], statistics.median(one["tokens_per_s"] for one in rows if "tokens_per_s" in one)


PARTS: dict[str, Callable[..., None]] = {
    "waste": waste,
    "loader": loader,
    "steps": steps,
    "attention": attention,
    "sampling": sampling,
    "training": training,
}
QUICK = ("waste", "sampling")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="less of each, and not all")
    parser.add_argument("--only", choices=PARTS, help="one part")
    flags = parser.parse_args()
    for name in [flags.only] if flags.only else QUICK if flags.quick else PARTS:
        PARTS[name](is_quick=flags.quick)


if __name__ == "__main__":
    main()
