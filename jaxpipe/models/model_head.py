"""The head of a language model as pure functions: norm, whatever else it has before the logits, and the loss.

Left to others: the modules (`embedding_and_head`, `bert`, `multi_token`), the loss (`token_loss`), and a head whose
vocabulary is split over `pipe` (`ends_over_pipe`), which calls the parts of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.mesh import added
from jaxpipe.models.cross_entropy import KernelSums, Vocabulary
from jaxpipe.models.embedding_and_head import Microbatch
from jaxpipe.models.multi_token import BothTokens, waiting, with_next_tokens
from jaxpipe.models.parameters import Params
from jaxpipe.models.sequence_parts import Rows
from jaxpipe.models.token_values import TokenValues, token_values


@dataclass(frozen=True)
class ModelHead:
    """The head of a `LanguageModel`; `shared` are the parameters of embedding and head."""

    model: Any

    def losses(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> Any:
        """See `LanguageModel.head`."""
        head = self.module(shared["head"])
        ahead = self._ahead(shared, x, microbatch)
        features, others = self.features(microbatch)(shared["head"], x, *ahead)
        if ahead:
            features = waiting(features, (features, others))
        words = self._loss(head).sum(features, self.rows(shared, microbatch), self.vocabulary(shared))
        return head.losses(words, others)

    def values(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> TokenValues:
        """See `LanguageModel.head_values`."""
        features, _ = self.features(microbatch)(shared["head"], x)
        rows = self.rows(shared, microbatch)
        return rows.whole(token_values(features, rows.targets, self.vocabulary(shared)))

    def backward(
        self, shared: Params, x: jax.Array, microbatch: Microbatch, scale: Any, sums: Params
    ) -> tuple[Any, jax.Array, Params]:
        """See `LanguageModel.head_backward`."""
        head = self.module(shared["head"])
        ahead = self._ahead(shared, x, microbatch)
        (features, others), vjp = jax.vjp(self.features(microbatch), shared["head"], x, *ahead)
        if ahead:
            features = waiting(features, (features, others))
        words_scale, others_scale = self.scales(head, microbatch, others, scale)
        words, d_features, of_words = self._loss(head).backward(
            features,
            self.rows(shared, microbatch),
            self.vocabulary(shared),
            scale=words_scale,
            sums=self.words_sums(sums),
        )
        if ahead:
            vjp = waiting(vjp, d_features, besides=shared)
        d_params, dx, *d_ahead = vjp((d_features, others_scale))
        sums = self.with_head(sums, d_params, of_words)
        return head.losses(words, others), dx, self._with_ahead(shared, microbatch, d_ahead, sums)

    # ---- Parts

    def module(self, params: Params) -> Any:
        """The module of the head's parameters."""
        return self.model._module("head", params)

    def rows(self, shared: Params, microbatch: Microbatch) -> Rows:
        """The rows of a microbatch, with the targets that this device's features predict."""
        return Rows.of(microbatch, self.module(shared["head"]), self.model.sharing.context)

    def token_table(self, shared: Params) -> jax.Array | None:
        """The table that the logits use; None if the head has a kernel."""
        return shared["embedding"]["token"] if self.model.config.tie_embeddings else None

    def vocabulary(self, shared: Params) -> Vocabulary:
        """The rows of the logits' kernel."""
        owner, kernel = self._kernel_path
        size = self.model.config.anatomy.vocab_size
        return Vocabulary(shared[owner][kernel], self.model.sharing, shared["head"].get("bias"), size)

    def features(self, microbatch: Microbatch) -> Callable[..., tuple[Any, Params]]:
        """The head up to its logits: (its parameters, the stream, what it reads ahead) -> (features, other losses)."""
        return lambda params, x, *ahead: self.module(params).features(x, microbatch, *ahead)

    def scales(self, head: Any, microbatch: Microbatch, others: Params, scale: Any) -> tuple[Any, Params]:
        """The factors of the words' losses and of the others, from those of the head's result."""
        # `losses` is linear, so its transpose at any point has the factors; zeros are the cheapest.
        _, vjp = jax.vjp(head.losses, self._loss(head).zeros(microbatch), others)
        return vjp(scale)

    def words_sums(self, sums: Params) -> KernelSums:
        """The running sums of the gradients of the logits' kernel and bias, among those of the shared parameters."""
        owner, kernel = self._kernel_path
        return KernelSums(sums[owner][kernel], sums["head"].get("bias"))

    def with_head(self, sums: Params, d_params: Params, of_words: KernelSums) -> Params:
        """`sums` with the gradients of the head's parameters before the logits added, and with those of the logits."""
        owner, kernel = self._kernel_path
        bias = {} if of_words.bias is None else {"bias": of_words.bias}
        sums = {**sums, "head": {**added(sums["head"], d_params), **bias}}
        return {**sums, owner: {**sums[owner], kernel: of_words.kernel}}

    @property
    def _kernel_path(self) -> tuple[str, str]:
        """Where the logits' kernel is among the shared parameters."""
        return ("embedding", "token") if self.model.config.tie_embeddings else ("head", "kernel")

    # ---- A head that reads the next tokens

    def _loss(self, head: Any) -> Any:
        further = getattr(head, "further", None)
        return BothTokens(further.factor) if further else self.model.loss

    def _ahead(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, ...]:
        """What the head reads beside the stream: rows of the next tokens' embeddings, or nothing."""
        if not hasattr(self.module(shared["head"]), "further"):
            return ()
        rows = self.model._module("embedding", shared["embedding"]).rows(with_next_tokens(microbatch))
        return (waiting(rows, x),)

    def _with_ahead(self, shared: Params, microbatch: Microbatch, d_ahead: list[jax.Array], sums: Params) -> Params:
        """`sums` with the gradients of what the head read ahead added; those of the token table in place."""
        embedding = self.model._module("embedding", shared["embedding"])
        for d_rows in d_ahead:
            token = embedding.add_at_rows(sums["embedding"]["token"], with_next_tokens(microbatch), d_rows)
            sums = {**sums, "embedding": {**sums["embedding"], "token": token}}
        return sums
