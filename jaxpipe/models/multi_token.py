"""Multi-token prediction: a module of the head that predicts the token after the next one, and the loss of both.

With h(t) the model's normed output at position t, and e(t + 1) the embedding of the next token:

    x(t) = projection([token_norm(e(t + 1)); stream_norm(h(t))])
    logits of token t + 2 = norm(block(x))(t) @ kernel of the model's own logits

The block is a layer like the model's last ones, with the same positions. A position whose next token is not in its row,
or in another document, predicts nothing, and its stream goes to no expert.
Source: DeepSeek-V3, 2024 (arXiv 2412.19437), section 2.2, one module. The text leaves open if h is normed; the code
that runs the published weights, as vLLM, norms it, and so does Megatron-LM. Both put it second, the text first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import MEASURED, PyTree, TensorAxis, with_losses
from jaxpipe.mesh.in_order import after, ordered_after
from jaxpipe.models.anatomy import LOAD_BIAS
from jaxpipe.models.choices import num_valid
from jaxpipe.models.cross_entropy import KernelSums, Vocabulary
from jaxpipe.models.kinds import layer_of_head
from jaxpipe.models.linear import Linear, Normalize, RMSNorm, initial_deviation, times
from jaxpipe.models.routing import EXPERT_LOAD
from jaxpipe.models.sequence_parts import Rows
from jaxpipe.models.token_loss import CROSS_ENTROPY

WORDS = "words"  # the name of the loss of the next token
FURTHER = "mtp"  # that of the module's, and what those of its block begin with
Microbatch = dict[str, jax.Array]
Features = tuple[jax.Array, jax.Array]  # of the next token, and of the one after it


def has_next(microbatch: Microbatch) -> jax.Array:
    """Whether the token after each of "tokens" "... seq" is in its row, and in its document."""
    tokens = microbatch["tokens"]
    follows = jnp.ones_like(tokens[..., 1:], bool)
    if "positions" in microbatch:
        positions = microbatch["positions"]
        follows &= positions[..., 1:] == positions[..., :-1] + 1
    if "is_token" in microbatch:
        is_token = microbatch["is_token"] != 0
        follows &= is_token[..., 1:] & is_token[..., :-1]
    return jnp.concatenate([follows, jnp.zeros_like(tokens[..., :1], bool)], -1)


def with_next_tokens(microbatch: Microbatch) -> Microbatch:
    """The microbatch with the next token in the place of each."""
    # Of the last one any token would do: nothing is predicted there.
    return {**microbatch, "tokens": _shifted(microbatch["tokens"], 0)}


def targets_after_next(microbatch: Microbatch) -> jax.Array:
    """The token after the next one of each, int32 "... seq"; below 0 where it is not to be predicted."""
    return jnp.where(has_next(microbatch), _shifted(microbatch["targets"], -1), -1)


def _shifted(x: jax.Array, last: Any) -> jax.Array:
    """What stands at the next position of each "... seq", and `last` at the last one."""
    return jnp.concatenate([x[..., 1:], jnp.full_like(x[..., :1], last)], -1)


def further_losses(of_block: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the module's losses and measures; what its block tells of each expert is left out.

    Example:
        >>> further_losses(("balance", "measured_expert_load", "measured_fullest_expert"))
        ('mtp', 'mtp_balance', 'measured_mtp_fullest_expert')
    """
    return FURTHER, *(_further_name(name) for name in of_block if name != MEASURED + EXPERT_LOAD)


def num_further_losses(batch: Microbatch, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """The number of terms of the losses of these names over a batch, int32."""
    if not names:
        return {}
    num_tokens = jnp.sum(has_next(batch), dtype=jnp.int32)
    return {name: num_valid(targets_after_next(batch)) if name == FURTHER else num_tokens for name in names}


class FurtherToken(nnx.Module):
    """The module, whose parameters are among the head's.

    Args:
        norms: of the embedded token, of the stream, and of what the logits are made of.
        block: the layer, as `jaxpipe.models.block.Block`.
        factor: of its loss.
        num_layers: layers over which the block's own measures are means; they are told as those of one.
    """

    def __init__(
        self,
        norms: tuple[RMSNorm, RMSNorm, RMSNorm],
        block: nnx.Module,
        *,
        hidden: int,
        factor: float,
        num_layers: int,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        self.token_norm, self.stream_norm, self.norm = norms
        deviation = initial_deviation(2 * hidden)
        # Whole on every device: over `tensor` each has other tokens of the stream.
        self.projection = Linear(2 * hidden, hidden, split=None, bias=False, deviation=deviation, rngs=rngs)
        self.block = block
        self.factor = factor
        self.num_layers = num_layers
        self.tensor = tensor

    def __call__(
        self, normed: jax.Array, rows: jax.Array, microbatch: Microbatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The gathered stream "batch seq hidden" that the logits' kernel multiplies, and sums of the block's losses.

        Args:
            normed: the model's normed output, "batch local_seq hidden".
            rows: this device's rows of the next tokens' embeddings, "batch seq hidden": see `Embedding.rows`.
            microbatch: that of the model.
        """
        tokens = self.tensor.scatter_sum(rows, 1)
        norms = self.token_norm.arrays(), self.stream_norm.arrays()
        x = _projected(self.token_norm.apply, tokens, normed, norms, self.projection.arrays()["kernel"])
        # Of positions without a next token nothing is predicted, and none of their document sees them.
        arrays = {**microbatch, "is_token": has_next(microbatch).astype(jnp.int32)}
        x, losses = with_losses(self.block(x, arrays, None))
        normed = jax.checkpoint(self.norm.apply, prevent_cse=False)(x, self.norm.arrays())
        features = self.tensor.gather(normed, 1)
        return features, {_further_name(name): self._of_one(name, of) for name, of in losses.items() if not of.ndim}

    def _of_one(self, name: str, total: jax.Array) -> jax.Array:
        """A sum of the block as it is told: losses stay terms of the mean over layers, as those of any layer."""
        is_mean = name.startswith(MEASURED) and name != MEASURED + LOAD_BIAS
        return self.num_layers * total if is_mean else total


# prevent_cse=False: backward reads what `waiting` has passed on, with which nothing can be merged.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _projected(norm: Normalize, tokens: jax.Array, stream: jax.Array, norms: Any, kernel: jax.Array) -> jax.Array:
    """The block's input "batch local_seq hidden"; backward saves `tokens` and `stream` alone."""
    of_tokens, of_stream = norms
    return times(jnp.concatenate([norm(tokens, of_tokens), norm(stream, of_stream)], -1), kernel)


def _further_name(name: str) -> str:
    """The name of a sum of the module's block."""
    is_measured = name.startswith(MEASURED)
    return f"{MEASURED * is_measured}{FURTHER}_{name.removeprefix(MEASURED)}"


@dataclass(frozen=True)
class BothTokens:
    """The cross entropies of the next token and of the one after it, of two features by one kernel.

    It has the methods of `jaxpipe.models.token_loss.CrossEntropy` that a whole head calls.
    """

    factor: float  # of the second one

    def zeros(self, microbatch: Microbatch) -> dict[str, jax.Array]:
        """Zeros of the structure of the losses."""
        return dict.fromkeys((WORDS, FURTHER), CROSS_ENTROPY.zeros(microbatch))

    def sum(self, features: Features, rows: Rows, vocabulary: Vocabulary) -> dict[str, jax.Array]:
        """Both losses."""
        of_next, of_further = features
        words = CROSS_ENTROPY.sum(of_next, rows, vocabulary)
        further = CROSS_ENTROPY.sum(waiting(of_further, words), _with_targets_after_next(rows), vocabulary)
        return {WORDS: words, FURTHER: self.factor * further}

    def backward(
        self,
        features: Features,
        rows: Rows,
        vocabulary: Vocabulary,
        *,
        scale: dict[str, jax.Array],
        sums: KernelSums,
    ) -> tuple[dict[str, jax.Array], Features, KernelSums]:
        """Both losses, the gradients of `features` times `scale`, and `sums` with the others."""
        of_next, of_further = features
        words, d_next, sums = CROSS_ENTROPY.backward(of_next, rows, vocabulary, scale=scale[WORDS], sums=sums)
        further, d_further, sums = CROSS_ENTROPY.backward(
            waiting(of_further, (d_next, sums)),
            _with_targets_after_next(rows),
            vocabulary,
            scale=self.factor * scale[FURTHER],
            sums=sums,
        )
        losses = {WORDS: words, FURTHER: self.factor * further}
        return losses, (waiting(d_next, d_further), d_further), sums


def _with_targets_after_next(rows: Rows) -> Rows:
    return replace(rows, targets=targets_after_next(rows.microbatch))


def check_further(config: Any, tensor: TensorAxis, *, of_words: bool = True) -> None:
    """Raises ConfigError for what a head with a layer of its own does not go together with.

    Args:
        config: config of a family.
        tensor: the devices that share each layer.
        of_words: whether the loss is the cross entropy of words.
    """
    if layer_of_head(config) is None:
        return
    others = (
        (
            tensor.num_pipe > 1,
            "pipeline.vocab_over_pipe=true",
            "of a split head every device computes all but the logits, which would be the layer too",
            "set pipeline.vocab_over_pipe=false",
        ),
        (
            tensor.context.size > 1,
            f"mesh.context={tensor.context.size}",
            "the next token of a chunk's last one is on another device",
            "set mesh.context=1",
        ),
        (not of_words, "loss= of one's own", "a further token has the loss of words", "leave loss= out"),
    )
    for is_there, what, why, repair in others:
        if is_there:
            raise ConfigError(
                f"a head that predicts a further token with {what}",
                rule=f"further-token: it has a layer of its own; {why}",
                repair=f"{repair}, or set model.mtp_factor=0.0",
            )


def waiting(values: PyTree, for_what: PyTree, *, besides: PyTree = ()) -> PyTree:
    """`values`, of which nothing is computed before `for_what` is there.

    So the logits of both tokens are never in memory at once, XLA does not merge what backward computes again with what
    forward has computed, and no loop over chunks of logits meets another collective: see `jaxpipe.mesh.in_order`.

    Args:
        besides: parameters, which nothing has made and which would be copied.
    """
    there = {id(leaf) for leaf in jax.tree.leaves(besides)}
    num_done = after(jnp.int32(0), for_what)
    return jax.tree.map(lambda leaf: leaf if id(leaf) in there else ordered_after(leaf, num_done), values)
