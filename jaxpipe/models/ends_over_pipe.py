"""Embedding and head of a language model whose vocabulary is split by rows over `pipe`.

Every device looks up the rows that it has and computes the logits of its part of the vocabulary; the program adds up or
gathers in between what needs all parts: see `jaxpipe.program.contract.SplitEnds`, whose functions these are. The layers
before the logits are not split: a final norm, BERT's transform and sentence order. Every device computes them, in S and
again in T, where the gradient of its own logits gives its term of all gradients before them. Devices so stay equally
long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.mesh import Randomness, only_on_the_first
from jaxpipe.models.cross_entropy import Statistics
from jaxpipe.models.embedding_and_head import Microbatch
from jaxpipe.models.model_head import ModelHead
from jaxpipe.models.parameters import Params
from jaxpipe.models.token_values import TokenValues
from jaxpipe.models.vocabulary_over_pipe import softmax_of_part, values_of_parts

# What all devices need of one device's S: of its logits; and the head's other losses, which all compute alike.
HeadStatistics = tuple[Statistics, Params]


@dataclass(frozen=True)
class EndsOverPipe:
    """The ends of a `LanguageModel`, which has this module's functions of its own for whole ones."""

    model: Any

    @property
    def _head(self) -> ModelHead:
        return self.model.model_head

    def embed_backward(
        self, shared: Params, microbatch: Microbatch, random: Randomness | None, dx: jax.Array, sums: Params
    ) -> Params:
        """See `LanguageModel.embed_backward`, on every device."""
        return self.model.embed_backward(shared, microbatch, random, dx, sums)

    def rows(self, shared: Params, microbatch: Microbatch) -> jax.Array:
        """This device's term of the rows of the tokens, "batch local_seq hidden"."""
        embedding = self.model._module("embedding", shared["embedding"])
        return self.model.sharing.scatter_sum(embedding.rows(microbatch), 1)

    def embed_rows(
        self, shared: Params, rows: jax.Array, microbatch: Microbatch, random: Randomness | None
    ) -> jax.Array:
        """The residual stream from the sum of all devices' `rows`."""
        return self.model._module("embedding", shared["embedding"]).with_own_rows(rows, microbatch, random)

    def head_statistics(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, HeadStatistics]:
        """The exponentials of this device's logits, kept for `head_gradients`, and their statistics."""
        features, others = self._head.features(microbatch)(shared["head"], x)
        kept, words = self.model.loss.part(features, self._head.rows(shared, microbatch), self._head.vocabulary(shared))
        return kept, (words, others)

    def head_losses(self, shared: Params, statistics: HeadStatistics, microbatch: Microbatch) -> Any:
        """The result of `head` from the statistics of all devices, "device ..." each."""
        of_words, of_others = statistics
        # Alike on all devices, so the first one's is the loss.
        others = jax.tree.map(lambda of_devices: of_devices[0], of_others)
        words = self.model.loss.of_parts(of_words, self._head.rows(shared, microbatch))
        return self._head.module(shared["head"]).losses(words, others)

    def value_statistics(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> Statistics:
        """The statistics of this device's logits that `head_values` needs."""
        features, _ = self._head.features(microbatch)(shared["head"], x)
        targets = self._head.rows(shared, microbatch).targets
        # The exponentials are for gradients; XLA leaves them out.
        return softmax_of_part(features, targets, self._head.vocabulary(shared), entropies=True)[1]

    def head_values(self, shared: Params, statistics: Statistics, microbatch: Microbatch) -> TokenValues:
        """The values of the targets from `value_statistics` of all devices."""
        rows = self._head.rows(shared, microbatch)
        return rows.whole(values_of_parts(statistics, rows.targets))

    def head_gradients(
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
        # Computed again, not kept from S: residuals of all microbatches between S and T would stay in memory.
        (features, others), vjp = jax.vjp(self._head.features(microbatch), shared["head"], x)
        head = self._head.module(shared["head"])
        words_scale, others_scale = self._head.scales(head, microbatch, others, scale)
        d_features, of_words = self.model.loss.backward_of_part(
            features,
            self._head.rows(shared, microbatch),
            self._head.vocabulary(shared),
            kept=kept,
            parts=statistics[0],
            scale=words_scale,
            sums=self._head.words_sums(sums),
        )
        # The others' gradient from one device, since `pipe` sums the terms of all.
        d_params, dx = vjp((d_features, only_on_the_first(others_scale, "pipe")))
        return dx, self._head.with_head(sums, d_params, of_words)
