"""Embedding and head of a language model whose vocabulary is split by rows over `pipe`.

Every device looks up the rows that it has and computes the logits of its part of the vocabulary. The program adds up
or gathers in between what needs all parts; see `jaxpipe.program.StageFunctions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.mesh import PyTree, Randomness
from jaxpipe.models.cross_entropy import Statistics, backward_of_part, loss_of_parts, softmax_of_part

if TYPE_CHECKING:
    from jaxpipe.models.language_model import LanguageModel, Microbatch
    from jaxpipe.models.parameters import Params


class HeadStatistics(NamedTuple):
    """The results of one device's S that all devices need."""

    words: Statistics  # of its logits
    others: Params  # the head's other losses, which all devices compute alike


@dataclass(frozen=True)
class EndsOverPipe:
    """The functions of `jaxpipe.program.SplitEnds` for `model`.

    The layers before the logits are not split: a final norm, BERT's transform and sentence order. Every device computes
    them, in S and again in T, where the gradient of its own logits gives its term of all gradients before them. Devices
    so stay equally long. Other losses (sentence order) are computed alike on every device; only one of them contributes
    the gradient.
    """

    model: LanguageModel

    def rows(self, shared: Params, microbatch: Microbatch) -> jax.Array:
        """This device's term of the rows of the tokens, "batch local_seq hidden"."""
        embedding = self.model._module("embedding", shared["embedding"])
        return self.model.tensor.scatter_sum(embedding.rows(microbatch), 1)

    def embed(self, shared: Params, rows: jax.Array, microbatch: Microbatch, random: Randomness | None) -> jax.Array:
        """The residual stream from the sum of all devices' `rows`."""
        return self.model._module("embedding", shared["embedding"]).with_own_rows(rows, microbatch, random)

    def embed_backward(
        self, shared: Params, microbatch: Microbatch, random: Randomness | None, dx: jax.Array, sums: Params
    ) -> Params:
        """As `LanguageModel.embed_backward`, for this device's rows."""
        return self.model.embed_backward(shared, microbatch, random, dx, sums)

    def statistics(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, HeadStatistics]:
        """The exponentials of this device's logits, kept for `gradients`, and their statistics."""
        features, others = self.model._features(microbatch)(shared["head"], x)
        kept, of_words = softmax_of_part(
            features, targets=microbatch["targets"], tensor=self.model.tensor, **self.model._words(shared)
        )
        return kept, HeadStatistics(of_words, others)

    def losses(self, shared: Params, statistics: HeadStatistics, microbatch: Microbatch) -> Any:
        """The result of `head` from the statistics of all devices, "device ..." each."""
        words = loss_of_parts(statistics.words, microbatch["targets"])
        # Alike on all devices, so the first one's is the loss.
        others = jax.tree.map(lambda of_devices: of_devices[0], statistics.others)
        return self.model._module("head", shared["head"]).losses(words, others)

    def gradients(
        self,
        shared: Params,
        x: jax.Array,
        kept: jax.Array,
        statistics: HeadStatistics,
        microbatch: Microbatch,
        scale: Any,
        sums: Params,
    ) -> tuple[jax.Array, Params]:
        """This device's term of the gradient of `x`, and `sums` with its terms of the others added."""
        model = self.model
        owner, kernel = self.model._kernel_path
        # Computed again, not kept from S: T runs later, and the residuals of all microbatches between would stay in
        # memory.
        (features, others), vjp = jax.vjp(model._features(microbatch), shared["head"], x)
        words_scale, others_scale = model._scales(model._module("head", shared["head"]), others, scale)
        d_features, of_words = backward_of_part(
            features,
            shared[owner][kernel],
            microbatch["targets"],
            model.tensor,
            exponentials=kept,
            parts=statistics.words,
            scale=words_scale,
            sums=model._words_sums(sums),
        )
        # The others' gradient from one device, since `pipe` sums the terms of all.
        d_params, dx = vjp((d_features, only_on_the_first(others_scale)))
        return dx, model._with_head(sums, d_params, of_words)


def only_on_the_first(values: PyTree) -> PyTree:
    """`values`, equal on all devices of `pipe`, on the first of them, and zeros on the others."""
    # Zeros on the others, so that a sum over `pipe` counts the value once.
    return jax.tree.map(lambda leaf: jnp.where(jax.lax.axis_index("pipe") == 0, leaf, 0), values)
