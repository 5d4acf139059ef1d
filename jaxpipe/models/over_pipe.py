"""Embedding and head of a language model whose vocabulary is split by rows over `pipe`.

Every device looks up the rows that it has and finds the logits of its part of the vocabulary. What only all of them
know together, the program exchanges in between; see `jaxpipe.program.StageFunctions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jaxpipe.mesh import Randomness, added
from jaxpipe.models.cross_entropy import (
    KernelSums,
    Statistics,
    backward_of_part,
    loss_of_parts,
    softmax_of_part,
)

if TYPE_CHECKING:
    from jaxpipe.models.language_model import LanguageModel, Microbatch, Params


@dataclass(frozen=True)
class EndsOverPipe:
    """The functions of `jaxpipe.program.SplitEnds` for `model`."""

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

    def statistics(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, Statistics]:
        """What this device's logits leave for `gradients`, and their statistics."""
        features, _ = self._features(shared["head"], x, microbatch)
        return softmax_of_part(
            features, targets=microbatch["targets"], tensor=self.model.tensor, **self.model._words(shared)
        )

    def losses(self, shared: Params, statistics: Statistics, microbatch: Microbatch) -> jax.Array:
        """The result of `head` from the statistics of all devices, "device ..." each."""
        del shared
        return loss_of_parts(statistics, microbatch["targets"])

    def gradients(
        self,
        shared: Params,
        x: jax.Array,
        kept: jax.Array,
        statistics: Statistics,
        microbatch: Microbatch,
        scale: Any,
        sums: Params,
    ) -> tuple[jax.Array, Params]:
        """This device's term of the gradient of `x`, and `sums` with its terms of the others added."""
        (owner, kernel), model = self.model._kernel_path, self.model

        def features_of(params: Params, x: jax.Array) -> jax.Array:
            return self._features(params, x, microbatch)[0]

        features, vjp = jax.vjp(features_of, shared["head"], x)
        d_features, of_words = backward_of_part(
            features,
            targets=microbatch["targets"],
            tensor=model.tensor,
            exponentials=kept,
            parts=statistics,
            scale=scale,
            sums=KernelSums(sums[owner][kernel], None),
            **model._words(shared),
        )
        d_params, dx = vjp(d_features)
        sums = {**sums, "head": added(sums["head"], d_params)}
        return dx, {**sums, owner: {**sums[owner], kernel: of_words.kernel}}

    def _features(self, head: Params, x: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, dict[str, Any]]:
        return self.model._module("head", head).features(x, microbatch)
