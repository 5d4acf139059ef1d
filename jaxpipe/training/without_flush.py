"""The train step of a schedule without flush: each call takes the next batch, and ends the one before.

The first call of a process fills the pipeline with the batch of its step; each call then ends the batch of its step,
whose row of metrics it returns, while the pipeline works on the batch after it. The last step's call drains. A
checkpoint has W(t) and W(t-1) and nothing else that is in flight: a run that goes on fills again with the same batch,
and finds the same digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.checkpoints.state import has_tree_of
from jaxpipe.lowering.table import DRAIN, FILL, STEADY, RoundTable
from jaxpipe.mesh import key_of
from jaxpipe.program import Pipeline
from jaxpipe.program.optimizer_step import StagedOptimizer
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.without_flush import Stream
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.training.optimizer import is_load_bias
from jaxpipe.training.step import (
    Older,
    TrainState,
    first_bad,
    mean_factors,
    name_losses,
    norm_of,
    shardings_of,
    where_terms,
)
from jaxpipe.training.task import Trained


@dataclass
class StepWithoutFlush:
    """The step of a schedule without flush; see `run_step.Step`.

    Clipping is by the norm of the batch before, the last one that was finite: all stages know it in time. The first
    step is not clipped. If the gradient of a layer, or of what all stages share, is not finite, its update is left out
    and all others are made: a stage updates before the others know. `skipped` tells that, and the optimizer's count
    advances with every step. The metrics are otherwise those of `make_train_step`.

    Attributes:
        stream: the program of the run.
        optimizer: elementwise, or `reads_matrices`.
        learning_rate: for the metrics; None: it is left out.
        max_grad_norm: gradients are scaled down as if the last norm were theirs.
        dropout_seed: seed of dropout, folded with the step; None for models without dropout.
        num_steps: the last step's call drains.
        reads_matrices: whether the optimizer's update of a layer reads whole matrices.
    """

    model: Trained
    stream: Stream
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule | None
    max_grad_norm: float
    dropout_seed: int | None
    num_steps: int
    reads_matrices: bool = False

    def __post_init__(self) -> None:
        """Compiles nothing yet."""
        self._begin: Any = jax.jit(self._fill, donate_argnums=0)
        self._call: Any = jax.jit(self._step, donate_argnums=(0, 1))
        self._older: Any = jax.jit(self.stream.older)
        # None before the first call, and after a resume: the pipeline is empty then.
        self._flight: Any = None
        self._batch: Any = None  # the newest batch in flight
        self._num_done = 0

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of one batch with a flush."""
        return self.stream.pipeline

    @property
    def schedule(self) -> Schedule:
        """The schedule of several batches."""
        return self.stream.schedule

    @property
    def table(self) -> RoundTable:
        """The round table of all calls."""
        return self.stream.table

    def shapes(self, params: Any, batch: Any, *, random: bool = True) -> StepShapes:
        """The shapes of a call."""
        return self.stream.shapes(params, batch, random=random)

    def init(self, state: TrainState) -> TrainState:
        """The state with W(t-1), which is W(t) where it has none; traceable."""
        # A checkpoint has W(t-1); overwriting it with W(t) would change what a resumed run computes.
        if state.older is not None:
            return state
        shardings = Older(self.pipeline.shardings(state.params), NamedSharding(self.pipeline.mesh, P()))
        # The results of a jit are arrays of their own, even in the same dtype: the first call donates both.
        return replace(state, older=jax.jit(self._as_before, out_shardings=shardings)(state.params))

    def _as_before(self, params: Any) -> Older:
        dtype = self.pipeline.dtype
        return Older(jax.tree.map(lambda leaf: leaf.astype(dtype or leaf.dtype), params), jnp.zeros(()))

    def lower(self, state: TrainState, batch: Any) -> StepWithoutFlush:
        """Traces both programs; returns a step that `compile` finishes."""
        # In this order: the call takes what `_begin` returns, whose shapes only its tracing tells.
        self._begin = self._begin.lower(state, batch)
        begun, flight = self._begin.out_info
        self._call = self._call.lower(begun, flight, batch, batch, jnp.int32(FILL))
        return self

    def compile(self, compiler_options: dict[str, Any] | None = None) -> StepWithoutFlush:
        """Compiles what `lower` has traced."""
        self._begin = self._begin.compile(compiler_options)
        self._call = self._call.compile(compiler_options)
        return self

    def between_calls(self, state: TrainState) -> TrainState:
        """The state, or its shapes, as it is between two calls, where W(t-1) is in flight."""
        return replace(state, older=replace(_older(state), weights=None))

    def memory_analysis(self) -> Any:
        """Bytes of a compiled call, as XLA counts them."""
        return self._call.memory_analysis()

    def as_text(self) -> str:
        """The optimized HLO of a compiled call."""
        return self._call.as_text()

    def __call__(self, state: TrainState, take: Callable[[], Any]) -> tuple[TrainState, dict[str, jax.Array]]:
        """Ends the batch of the next step; `take` returns the batches from that one on, in turn."""
        if self._flight is None:
            self._num_done = int(state.step)
            self._batch = take()
            state, flight = self._begin(state, self._batch)
            # The first call fills the pipeline. Its type masks all that belongs to a batch before, so any batch may
            # stand there.
            state, self._flight, _ = self._call(state, flight, self._batch, self._batch, jnp.int32(FILL))
        self._num_done += 1
        is_last = self._num_done >= self.num_steps
        # The last call starts no forward: the batch is a placeholder of the right shape.
        newest = self._batch if is_last else take()
        call_type = jnp.int32(DRAIN if is_last else STEADY)
        state, self._flight, metrics = self._call(state, self._flight, newest, self._batch, call_type)
        self._batch = newest
        return state, metrics

    def flush(self, state: TrainState) -> TrainState:
        """The state with W(t-1), as a checkpoint holds it and the first call takes it; the stream goes on."""
        if self._flight is None:
            return state
        weights = self._older(self._flight, state.params, state.step)
        return replace(state, older=Older(weights, _older(state).norm))

    def _fill(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        older = _older(state).weights
        random = self.dropout_seed is not None
        flight = self.stream.begin(state.params, older, batch, state.step, random=random)
        return self.between_calls(state), flight

    def _step(
        self, state: TrainState, flight: Any, newest: Any, previous: Any, call_type: jax.Array
    ) -> tuple[TrainState, Any, dict[str, jax.Array]]:
        # The call that fills ends no batch, so no counter may advance.
        is_step = (call_type != FILL).astype(jnp.int32)
        call_index = state.step + is_step
        both = partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
        num_losses = [self.model.num_losses(batch) for batch in (newest, previous)]
        keys = None
        if self.dropout_seed is not None:
            key = key_of(self.dropout_seed)
            # Forwards of the newest batch, backwards of the one before: each with the key of its own step.
            keys = jnp.stack([jax.random.fold_in(key, call_index), jax.random.fold_in(key, call_index - 1)])
        last = _older(state).norm
        shardings = shardings_of(state, self.pipeline)
        optimizer = StagedOptimizer(
            self.optimizer,
            has_tree_of(state.params),
            jax.tree.map(lambda sharding: sharding.spec, shardings.optimizer),
            is_load_bias,
            self.reads_matrices,
        )
        params, moments, flight, measured = self.stream.call(
            optimizer,
            state.params,
            state.optimizer,
            flight,
            both(newest, previous),
            both(*map(mean_factors, num_losses)),
            keys,
            # The norm of this batch is known only when all stages have updated.
            jnp.where(last > self.max_grad_norm, self.max_grad_norm / last, 1.0),
            call_type=call_type,
            call_index=call_index,
        )
        norm = norm_of(measured.squares, params)
        skipped = (measured.num_left_out > 0).astype(jnp.int32)
        num_in_row = jnp.where(is_step == 1, skipped * (state.num_skipped_in_row + 1), state.num_skipped_in_row)
        num_updates = state.step - state.num_skipped
        metrics = {
            **where_terms(name_losses(measured.losses), measured.losses, num_losses[1]),
            "grad_norm": norm,
            **({} if self.learning_rate is None else {"learning_rate": self.learning_rate(num_updates)}),
            "skipped": skipped,
            "num_skipped_in_row": num_in_row,
            "bad_parameter": first_bad(measured.squares),
        }
        after = TrainState(
            params,
            moments,
            call_index,
            state.num_skipped,  # the optimizer has counted this step, even where an update was left out
            num_in_row,
            # An infinite norm would clip every later gradient to 0.
            Older(None, jnp.where((is_step == 1) & jnp.isfinite(norm), norm, last)),
        )
        return lax.with_sharding_constraint(after, shardings), flight, metrics


def _older(state: TrainState) -> Older:
    assert state.older is not None
    return state.older
