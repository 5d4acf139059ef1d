"""Tokens per second of the loader alone, beside what training takes of them.

python experiments/009_loader/run.py            # about two minutes on 2 cores
python experiments/009_loader/run.py --quick    # half a minute: less of each
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from jaxpipe.data import Batches
from jaxpipe.data.indexed_writer import write_indexed
from jaxpipe.training.batches import batches_of, read_corpus

ROOT = Path(__file__).parents[2]
NUM_TRAINED_STEPS, NUM_TRAINED_STEPS_QUICKLY = 60, 10
NUM_INDEXED_TOKENS = 64 * 2**20  # of two bytes: 128 MiB
VOCAB_SIZE = 50257
MEASURED_S, MEASURED_QUICKLY_S = 3.0, 0.3


def quickstart(name: str = "quickstart") -> ConfigDict:
    """The config of `configs/NAME.py`."""
    sys.path.insert(0, str(ROOT))
    return import_module(f"configs.{name}").get_config()


def write_tokens(prefix: Path, num_tokens: int) -> None:
    """Random words of GPT-2's vocabulary, as prepared files."""
    draw = np.random.default_rng(0)
    with write_indexed(str(prefix), vocab_size=VOCAB_SIZE) as writer:
        for begin in range(0, num_tokens, 2**20):
            writer.add(draw.integers(VOCAB_SIZE, size=min(2**20, num_tokens - begin)))


def indexed(files: str, *, batch_size: int = 32, seq_len: int = 64) -> ConfigDict:
    """The quickstart on prepared files."""
    config = quickstart()
    config.model.vocab_size = VOCAB_SIZE
    config.data.update(files=files, batch_size=batch_size, seq_len=seq_len)
    return config


def cases(folder: Path, num_tokens: int) -> Iterator[tuple[str, ConfigDict]]:
    """What is read, by name; writes the prepared files to `folder`."""
    yield "quickstart: text, 32 x 64", quickstart()
    yield "quickstart_bert: text, masked, 32 x 128", quickstart("quickstart_bert")
    for name in ("a", "b"):
        write_tokens(folder / name, num_tokens)
    size = f"{2 * num_tokens / 2**20:.0f} MiB"
    blend = f"indexed:0.7 {folder / 'a'} 0.3 {folder / 'b'}"
    yield f"indexed, {size}, 32 x 64", indexed(f"indexed:{folder / 'a'}")
    yield f"blend of two, each {size}, 32 x 64", indexed(blend)
    yield f"blend of two, each {size}, 64 x 2048", indexed(blend, batch_size=64, seq_len=2048)


def tokens_per_s(batches: Iterator, num_tokens: int, *, measured_s: float) -> float:
    """Tokens per second of `batches` of `num_tokens` each, behind a first one."""
    next(batches)
    num_batches, start = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start) < measured_s or num_batches == 0:
        next(batches)
        num_batches += 1
    return num_batches * num_tokens / elapsed_s


def measure(config: ConfigDict, *, measured_s: float) -> tuple[float, float]:
    """Tokens per second of batches made one after the other where they are used, and of batches read ahead."""
    num_tokens = config.data.batch_size * config.data.seq_len
    batches = batches_of(config, read_corpus(config).train)
    following = batches.following(10**6)
    try:
        ahead = tokens_per_s(following, num_tokens, measured_s=measured_s)
    finally:
        following.close()
    return tokens_per_s(_each(batches), num_tokens, measured_s=measured_s), ahead


def _each(batches: Batches) -> Iterator:
    step = 0
    while True:
        yield batches.at(step)
        step += 1


def trained_tokens_per_s(folder: Path, num_steps: int) -> float:
    """The median of a short run of the quickstart."""
    command = ["jaxpipe.train", "--config=configs/quickstart.py", f"--workdir={folder / 'run'}"]
    steps = [f"--config.train.steps={num_steps}", "--config.checkpoint.save_at_end=False"]
    subprocess.run([sys.executable, "-m", *command, *steps], cwd=ROOT, check=True, capture_output=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["tokens_per_s"] for line in lines)


def table(folder: Path, *, num_tokens: int, measured_s: float, trained: float) -> str:
    """Markdown: tokens per second of each case, and how many times what the quickstart trains with."""
    rows = [
        "| what is read, sequences x tokens | in place, tokens/s | read ahead, tokens/s | x training |",
        "|---|---|---|---|",
    ]
    for name, config in cases(folder, num_tokens):
        in_place, ahead = measure(config, measured_s=measured_s)
        rows.append(f"| {name} | {in_place:,.0f} | {ahead:,.0f} | {min(in_place, ahead) / trained:,.0f} |")
    return "\n".join(rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Tokens per second of the loader alone, as Markdown.")
    parser.add_argument("--quick", action="store_true", help="fewer steps and shorter times")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained = trained_tokens_per_s(folder, NUM_TRAINED_STEPS_QUICKLY if quick else NUM_TRAINED_STEPS)
        measured_s = MEASURED_QUICKLY_S if quick else MEASURED_S
        print(f"the quickstart trains with {trained:,.0f} tokens/s\n")
        print(table(folder, num_tokens=NUM_INDEXED_TOKENS, measured_s=measured_s, trained=trained))


if __name__ == "__main__":
    main()
