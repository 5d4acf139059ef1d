"""The losses of words that a language model's head can end in: the sum of cross entropies, or a function of one's own.

Both classes have the same methods, which take the head's features and this device's rows of the vocabulary.
`CrossEntropy` makes loss and gradients in one pass over chunks of tokens. `TokenLoss` first makes each target's
log-probability and entropy, then the gradients from those of its function: four products with the logits' kernel, not
three. Where `pipe` splits the vocabulary the values are there between S and T, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.mesh import MEASURED
from jaxpipe.models.choices import num_valid
from jaxpipe.models.cross_entropy import (
    KernelSums,
    Statistics,
    Vocabulary,
    cross_entropy_backward,
    cross_entropy_sum,
)
from jaxpipe.models.embedding_and_head import Microbatch
from jaxpipe.models.sequence_parts import Rows
from jaxpipe.models.token_values import TokenValues, statistics_of, token_values, token_values_backward, values_of
from jaxpipe.models.vocabulary_over_pipe import backward_of_part, loss_of_parts, softmax_of_part, values_of_parts

Words = Any  # a float32 sum over a microbatch's rows on a device, or a dict of such sums by name


def num_targets(batch: Microbatch) -> jax.Array:
    """Number of "targets" that are not below 0, int32."""
    return num_valid(batch["targets"])


@dataclass(frozen=True)
class CrossEntropy:
    """The sum of the targets' negative log-probabilities."""

    def num_losses(self, batch: Microbatch, nums: Any) -> Any:
        """The number of terms of each loss, given those of the family, whose first are of words."""
        del batch
        return nums

    def zeros(self, microbatch: Microbatch) -> Words:
        """Zeros of the structure of the loss."""
        del microbatch
        return jnp.zeros((), jnp.float32)

    def sum(self, features: jax.Array, rows: Rows, vocabulary: Vocabulary) -> Words:
        """The loss."""
        return cross_entropy_sum(features, rows.targets, vocabulary)

    def backward(
        self, features: jax.Array, rows: Rows, vocabulary: Vocabulary, *, scale: Words, sums: KernelSums
    ) -> tuple[Words, jax.Array, KernelSums]:
        """The loss, the gradient of `features` times `scale`, and `sums` with the others."""
        return cross_entropy_backward(features, rows.targets, vocabulary, scale=scale, sums=sums)

    def part(self, features: jax.Array, rows: Rows, vocabulary: Vocabulary) -> tuple[jax.Array, Statistics]:
        """What this device of `pipe` keeps, and what it tells the others."""
        return softmax_of_part(features, rows.targets, vocabulary)

    def of_parts(self, parts: Statistics, rows: Rows) -> Words:
        """The loss from what all devices of `pipe` tell."""
        return loss_of_parts(parts, rows.targets)

    def backward_of_part(
        self,
        features: jax.Array,
        rows: Rows,
        vocabulary: Vocabulary,
        *,
        kept: jax.Array,
        parts: Statistics,
        scale: Words,
        sums: KernelSums,
    ) -> tuple[jax.Array, KernelSums]:
        """This device's term of the gradient of `features`, and `sums` with its terms of the others."""
        targets = rows.targets
        return backward_of_part(features, targets, vocabulary, exponentials=kept, parts=parts, scale=scale, sums=sums)


@dataclass(frozen=True)
class TokenLoss:
    """A loss of one's own over each target's log-probability and entropy.

    Attributes:
        function: (values, microbatch) -> float32 scalar, the *sum* of the losses, or a dict of such sums by name. The
            values are a `TokenValues` "row target", 0 where a target is below 0. The microbatch has all arrays of the
            batch "row ...", of the rows of one microbatch on one device; all tokens of a row are there, also where
            `mesh.context` splits it. A sum whose name begins with "measured_" is reported and no part of the loss. Pure
            and differentiable by the values.
        num_terms: (batch) -> number by which the sum over the whole batch is divided, so that the loss and its
            gradients do not depend on how a batch is cut: an array of the batch summed up, for one. By default the
            number of its targets that are not below 0.
    """

    function: Callable[[TokenValues, Microbatch], Any]
    num_terms: Callable[[Microbatch], Any] = num_targets

    def num_losses(self, batch: Microbatch, nums: Any) -> Any:
        """See `CrossEntropy.num_losses`."""
        num_terms = self.num_terms(batch)
        # Of one microbatch: the function sees rows of targets, whatever dims stand before them.
        num_leading = jnp.ndim(batch["targets"]) - 2
        of_rows = {
            name: jax.ShapeDtypeStruct(jnp.shape(leaf)[num_leading:], leaf.dtype) for name, leaf in batch.items()
        }
        words = jax.tree.map(lambda _: num_terms, self._outline(of_rows))
        if not isinstance(nums, dict):
            return words
        name, *others = nums
        own = words if isinstance(words, dict) and name == "words" else {name: words}
        return own | {other: nums[other] for other in others}

    def zeros(self, microbatch: Microbatch) -> Words:
        """See `CrossEntropy.zeros`."""
        return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), self._outline(microbatch))

    def sum(self, features: jax.Array, rows: Rows, vocabulary: Vocabulary) -> Words:
        """See `CrossEntropy.sum`."""
        return self._of_own(token_values(features, rows.targets, vocabulary), rows)

    def of_values(self, values: TokenValues, microbatch: Microbatch) -> Words:
        """The loss from the values of the targets of whole rows."""
        words = self.function(values, microbatch)
        if not isinstance(words, dict):
            return words
        return {name: jax.lax.stop_gradient(of) if name.startswith(MEASURED) else of for name, of in words.items()}

    def backward(
        self, features: jax.Array, rows: Rows, vocabulary: Vocabulary, *, scale: Words, sums: KernelSums
    ) -> tuple[Words, jax.Array, KernelSums]:
        """See `CrossEntropy.backward`."""
        targets = rows.targets
        statistics = statistics_of(features, targets, vocabulary)
        words, gradients = self._differentiated(values_of(statistics, targets), rows, scale)
        dx, sums = token_values_backward(
            features, targets, vocabulary, statistics=statistics, gradients=gradients, sums=sums
        )
        return words, dx, sums

    def part(self, features: jax.Array, rows: Rows, vocabulary: Vocabulary) -> tuple[jax.Array, Statistics]:
        """See `CrossEntropy.part`."""
        return softmax_of_part(features, rows.targets, vocabulary, entropies=True)

    def of_parts(self, parts: Statistics, rows: Rows) -> Words:
        """See `CrossEntropy.of_parts`."""
        return self._of_own(values_of_parts(parts, rows.targets), rows)

    def backward_of_part(
        self,
        features: jax.Array,
        rows: Rows,
        vocabulary: Vocabulary,
        *,
        kept: jax.Array,
        parts: Statistics,
        scale: Words,
        sums: KernelSums,
    ) -> tuple[jax.Array, KernelSums]:
        """See `CrossEntropy.backward_of_part`."""
        targets = rows.targets
        _, gradients = self._differentiated(values_of_parts(parts, targets), rows, scale)
        return backward_of_part(
            features, targets, vocabulary, exponentials=kept, parts=parts, scale=gradients, sums=sums
        )

    def _differentiated(self, values: TokenValues, rows: Rows, scale: Words) -> tuple[Words, TokenValues]:
        """The loss, and its gradients by the values, times `scale`."""
        words, vjp = jax.vjp(lambda values: self._of_own(values, rows), values)
        return words, vjp(scale)[0]

    def _of_own(self, values: TokenValues, rows: Rows) -> Words:
        """The loss from the values of this device's targets: every device finds that of whole rows."""
        # The program adds up the losses of all devices that split a sequence.
        return rows.context.counted_once(self.of_values(rows.whole(values), rows.microbatch))

    def _outline(self, microbatch: Any) -> Words:
        of_targets = jax.ShapeDtypeStruct(jnp.shape(microbatch["targets"]), jnp.float32)
        return jax.eval_shape(self.of_values, TokenValues(of_targets, of_targets), microbatch)


CROSS_ENTROPY = CrossEntropy()
