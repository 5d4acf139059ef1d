"""The head with its backward, at two vocabularies, by the tokens of a chunk, beside the roofline.

Logits, cross entropy, gradients; that of the kernel is added to a float32 sum in place, as in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np

from experiments.gpu.cells import Cell, Part, Record, Size
from jaxpipe.estimate import Matmul, Roofline
from jaxpipe.mesh import TensorAxis
from jaxpipe.models import cross_entropy
from jaxpipe.models.cross_entropy import KernelSums, Vocabulary, cross_entropy_backward

WORDS = (32768, 131072)
CHUNKS = (512, 1024, 2048, 4096, 8192)  # tokens


def cells(size: Size) -> Iterator[Cell]:
    """A cell for each vocabulary and chunk."""
    for words in (1024, 4096) if size.quick else WORDS:
        for chunk in (64, 256) if size.quick else CHUNKS:
            yield Cell(f"{words} words, chunks of {chunk}", partial(_head, size, words, chunk))


PART = Part("head", "The head", cells, minutes=3)


def _head(size: Size, words: int, chunk: int) -> Record:
    num_tokens, hidden = (256, 128) if size.quick else (8192, 4096)
    rng = np.random.default_rng(0)
    x, kernel = size.normal(rng, (num_tokens, hidden)), size.normal(rng, (words, hidden))
    targets = jax.device_put(rng.integers(words, size=num_tokens, dtype=np.int32), size.device)
    sums = jax.device_put(np.zeros((words, hidden), np.float32), size.device)

    def head(sums: jax.Array, x: jax.Array, kernel: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        loss, dx, added = cross_entropy_backward(
            x, targets, Vocabulary(kernel, TensorAxis()), scale=1.0 / num_tokens, sums=KernelSums(sums, None)
        )
        return added.kernel, dx, loss

    default = cross_entropy.MOST_TOKENS, cross_entropy.FEWER_TOKENS
    cross_entropy.MOST_TOKENS = cross_entropy.FEWER_TOKENS = chunk
    try:
        compiled = jax.jit(head, donate_argnums=0).lower(sums, x, kernel, targets).compile()
    finally:
        cross_entropy.MOST_TOKENS, cross_entropy.FEWER_TOKENS = default
    held = [sums]

    def call() -> jax.Array:
        held[0], dx, _ = compiled(held[0], x, kernel, targets)
        return dx

    (seconds,) = size.seconds(call)
    record: Record = {"ms": 1e3 * seconds, "tflop_per_s": 6 * num_tokens * hidden * words / seconds / 1e12}
    record["temporary_gib"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
    if size.hardware:
        record["estimated_ms"] = 1e3 * _estimated_s(Roofline(size.hardware), num_tokens, hidden, words, chunk)
    return record


def _estimated_s(source: Roofline, num_tokens: int, hidden: int, words: int, chunk: int) -> float:
    """The roofline's seconds of the products and of the passes over logits, without the norm before them."""
    logits = Matmul(chunk, words, hidden, num_tokens // chunk)
    summed = Matmul(words, hidden, chunk, num_tokens // chunk, summed=True)
    products_s = sum(source.matmul_s(each, "bfloat16") for each in (logits, logits.of_inputs, summed))
    return products_s + source.memory_s(num_tokens * words * (3 * 4 + 2))
