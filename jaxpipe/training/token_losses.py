"""Rows of tokens become batches and log-probabilities, and the losses that fine-tuning by preferences is made of.

Who samples and rewards answers thinks of tokens: position t of an array is of token t. A model predicts: position t of
its `targets` is of token t + 1. `token_batch` goes from the former to the latter, `log_probs` goes back. The losses are
values of `jaxpipe.models.TokenLoss`; one of your own is another function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.data import Batch
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.mesh import BATCH_AXES, num_batch_parts
from jaxpipe.models import TokenLoss, TokenValues
from jaxpipe.models.token_loss import num_targets
from jaxpipe.program import Pipeline
from jaxpipe.training.batches import put_batch

PAIR = 2  # rows: the preferred answer, then the other one


def token_batch(tokens: Any, *, documents: Any = None, is_answer: Any = None, **of_tokens: Any) -> Batch:
    """A batch of rows of tokens, with what belongs to a token where it is predicted.

    Args:
        tokens: "row token", whole numbers.
        documents: "row token", the number of each token's document where several stand back to back; None: one a row.
        is_answer: "row token", whether a token is one whose log-probability counts; None: all are. The first token of
            a document has none.
        of_tokens: further arrays, "row token ..." by token, which are moved along, or "row", which stay.

    Returns:
        "tokens" and "targets", -1 where there is none; "positions" with `documents`; and the further arrays.

    Raises:
        DataError: an array has other rows or tokens.

    Example:
        >>> batch = token_batch([[5, 6, 7, 8]], is_answer=[[0, 0, 1, 1]], advantages=[[0.0, 0.0, 1.0, 2.0]])
        >>> batch["targets"].tolist(), batch["advantages"].tolist()
        ([[-1, 7, 8, -1]], [[0.0, 1.0, 2.0, 0.0]])
    """
    tokens = np.asarray(tokens, np.int32)
    arrays = {name: np.asarray(leaf) for name, leaf in of_tokens.items()}
    given = {"documents": documents, "is_answer": is_answer}
    masks = {name: np.asarray(leaf) for name, leaf in given.items() if leaf is not None}
    wrong = [
        f"{name} {list(leaf.shape)}"
        for name, leaf in (masks | arrays).items()
        if leaf.shape[:2] != tokens.shape and (name in masks or leaf.shape != tokens.shape[:1])
    ]
    if tokens.ndim != 2 or wrong:
        raise DataError(
            f"rows of tokens {list(tokens.shape)} with {', '.join(wrong) or 'nothing else'}",
            rule="token-rows: tokens are [row, token], and so is what belongs to a token; of a row it is [row]",
            repair="pad all rows to one length; is_answer=0 marks padding",
        )
    is_next = np.ones(tokens.shape, bool)
    is_next[:, -1] = False
    batch: Batch = {"tokens": tokens}
    if "documents" in masks:
        is_same = masks["documents"][:, 1:] == masks["documents"][:, :-1]
        is_next[:, :-1] &= is_same
        places = np.arange(tokens.shape[1])
        starts = np.maximum.accumulate(np.where(np.pad(is_same, ((0, 0), (1, 0))), 0, places), axis=1)
        batch["positions"] = (places - starts).astype(np.int32)
    if "is_answer" in masks:
        is_next &= _moved(masks["is_answer"].astype(bool))
    batch["targets"] = np.where(is_next, _moved(tokens), -1).astype(np.int32)
    return batch | {name: _moved(leaf) if leaf.ndim > 1 else leaf for name, leaf in arrays.items()}


def pair_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], *, seq_len: int) -> Batch:
    """A batch of pairs for `dpo`, the preferred answer and then the other one, each in a row of `seq_len` tokens.

    Args:
        pairs: (tokens of the prompt, of the preferred answer, of the other answer) each.

    Raises:
        DataError: a prompt with an answer is longer than a row.

    Example:
        >>> pair_batch([([1, 2], [3], [4, 5])], seq_len=5)["targets"].tolist()
        [[-1, 3, -1, -1, -1], [-1, 4, 5, -1, -1]]
    """
    tokens = np.zeros((PAIR * len(pairs), seq_len), np.int32)
    is_answer = np.zeros(tokens.shape, bool)
    for number, (prompt, *answers) in enumerate(pairs):
        for row, answer in enumerate(answers, start=PAIR * number):
            text = [*prompt, *answer]
            if len(text) > seq_len:
                raise DataError(
                    f"pair {number + 1}: a prompt with its answer has {len(text)} tokens, a row {seq_len}",
                    rule="whole-answers: an answer that is cut has another probability",
                    repair="leave the pair out, or set a larger seq_len",
                )
            tokens[row, : len(text)] = text
            is_answer[row, len(prompt) : len(text)] = True
    return token_batch(tokens, is_answer=is_answer)


def log_probs(
    pipeline: Pipeline, params: Any, tokens: Any, *, documents: Any = None, is_answer: Any = None
) -> TokenValues:
    """Log-probability of each token given those before it in its document, by forwards alone through the pipeline.

    For models that read "tokens", "positions" and "targets": those of a config that predict the next token, and others
    that have `head_values`. Rows are filled up to whole microbatches. Every process gets all rows, and must call it.

    Args:
        pipeline: of any schedule and mesh, as `Run.pipeline`.
        params: staged parameters, as `TrainState.params`.
        tokens, documents, is_answer: as to `token_batch`.

    Returns:
        Float32 of NumPy, "row token": position t is of token t. The first token of each document, and what is no
        answer, has 0; so has the entropy of the probabilities there.
    """
    batch = token_batch(tokens, documents=documents, is_answer=is_answer)
    num_rows = len(batch["tokens"])
    num_microbatches = pipeline.schedule.num_microbatches
    missing = -num_rows % (num_microbatches * num_batch_parts(pipeline.mesh))
    # Rows that fill up are like the last one: any numbers do, since nobody reads theirs.
    rows = np.minimum(np.arange(num_rows + missing), num_rows - 1)
    whole = {name: leaf[rows].reshape(num_microbatches, -1, leaf.shape[1]) for name, leaf in batch.items()}
    values = pipeline.values(params, put_batch(pipeline, whole))
    everywhere = jax.jit(lambda values: values, out_shardings=NamedSharding(pipeline.mesh, P()))(values)

    def of_tokens(leaf: Any) -> np.ndarray:
        told = np.asarray(leaf).reshape(len(rows), -1)[:num_rows]
        return np.pad(told[:, :-1], ((0, 0), (1, 0)))

    return jax.tree.map(of_tokens, everywhere)


def policy_gradient(*, clip: float = 0.2, divergence: float = 0.0, entropy: float = 0.0) -> TokenLoss:
    """The loss of a policy gradient: a clipped ratio, a divergence from a reference, and the entropy.

    The batch has "advantages"; "old_log_probs" of the policy that sampled, without which the ratio is 1 and only has a
    gradient; "reference_log_probs" with `divergence`; and "weights" of tokens, if they are not all 1: "row target"
    each, or "row". The loss is the sum over targets of weight times term, over the sum of weights.

    Args:
        clip: the ratio of probabilities counts between 1 - clip and 1 + clip.
        divergence: factor of exp(r) - r - 1, r the reference's log-probability less the policy's.
        entropy: factor of the entropy, which is made larger.

    Source: Schulman et al., Proximal policy optimization algorithms, 2017, equation 7; Shao et al., DeepSeekMath, 2024,
    equation 4 (the divergence). The entropy is exact, over the whole vocabulary.
    """

    def loss(values: TokenValues, microbatch: Any) -> dict[str, jax.Array]:
        weights = _weights(microbatch)
        old = microbatch.get("old_log_probs", jax.lax.stop_gradient(values.log_probs))
        ratio = jnp.exp(values.log_probs - old)
        advantages = _of_targets(microbatch["advantages"], microbatch)
        clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
        sums = {"policy": -(weights * jnp.minimum(ratio * advantages, clipped * advantages)).sum()}
        if divergence:
            above = microbatch["reference_log_probs"] - values.log_probs
            sums["divergence"] = divergence * (weights * (jnp.exp(above) - above - 1)).sum()
        if entropy:
            sums["entropy"] = -entropy * (weights * values.entropies).sum()
        sums["measured_clipped"] = (weights * (clipped != ratio)).sum()
        return sums

    def num_terms(batch: Any) -> jax.Array:
        return _weights(batch).sum() if "weights" in batch else num_targets(batch)

    return TokenLoss(loss, num_terms)


def dpo(*, beta: float = 0.1) -> TokenLoss:
    """The loss of preferences between two answers: rows 2 i and 2 i + 1 are the preferred answer and the other one.

    The batch has "reference_log_probs" "row target", those of the model from which the run starts, as `log_probs` and
    `token_batch` make them. Both rows of a pair are in one microbatch on one device: `fit` cuts batches so if a
    microbatch has an even number of rows on each device, which is checked. The loss is the mean over pairs.

    Source: Rafailov et al., Direct preference optimization, NeurIPS 2023, equation 7.
    """

    def loss(values: TokenValues, microbatch: Any) -> dict[str, jax.Array]:
        num_rows = len(values.log_probs)
        if num_rows % PAIR:
            raise ConfigError(
                f"a microbatch has {num_rows} rows on a device",
                rule="whole-pairs: the two answers of a pair are in one microbatch on one device",
                repair="set data.batch_size to a multiple of "
                + " x ".join(map(str, (PAIR, "pipeline.num_microbatches", *(f"mesh.{axis}" for axis in BATCH_AXES)))),
            )
        is_valid = microbatch["targets"] >= 0
        of_rows = jnp.where(is_valid, values.log_probs - microbatch["reference_log_probs"], 0.0).sum(axis=-1)
        margins = beta * (of_rows[0::PAIR] - of_rows[1::PAIR])
        return {
            "preference": -jax.nn.log_sigmoid(margins).sum(),
            "measured_accuracy": (margins > 0).sum(dtype=jnp.float32),
            "measured_margin": margins.sum(),
        }

    def num_pairs(batch: Any) -> int:
        return batch["targets"].size // batch["targets"].shape[-1] // PAIR

    return TokenLoss(loss, num_pairs)


def _moved(of_tokens: np.ndarray) -> np.ndarray:
    """What belongs to tokens, where they are predicted: one place before; zeros in the last place."""
    return np.concatenate([of_tokens[:, 1:], np.zeros_like(of_tokens[:, :1])], axis=1)


def _weights(batch: Any) -> jax.Array:
    """Weights of targets, 0 where there is none."""
    weights = _of_targets(batch["weights"], batch) if "weights" in batch else 1.0
    return jnp.where(batch["targets"] >= 0, weights, 0.0)


def _of_targets(array: Any, batch: Any) -> Any:
    """An array "... row target" of one that may be "... row"."""
    return array if array.ndim == batch["targets"].ndim else array[..., None]
