"""Updates of what all stages share, without flush: all devices sum and update embedding and head together.

A call of three devices with four microbatches a batch. Upper case is of its batch t, lower case of batch t-1, whose
microbatches are numbered alike; U is the UPDATE of the device's layers:

    round      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23
    device 0  F0  .  .  . b2  . F1  .  .  . b3  u F2  .  . B0  .  . F3  .  .  . B1  .
    device 1  b2  . F0  .  .  . b3  u F1  .  .  . B0  . F2  .  .  . B1  . F3  .  .  .
    device 2   . b3  .  u F0  .  .  . B0  . F1  .  . B1  .  . F2  .  .  . B2  . F3  .
    all           H                                   O     S

* The head's gradients of batch t-1 are complete with its last F on the last stage, the embedding's with its last B on
  the first one: by then other devices are at work on batch t, so each is collected in a meeting of its own.
* H, COLLECT_HEAD: the last stage gives up its sums, and takes the new compute copies for batch t, which wait since the
  call before. The other stages have taken theirs as the call began: the first one embeds batch t in round 0.
* O, COLLECT_OTHERS: the other stages give up theirs. A tied embedding is summed twice: in H with the head's gradients,
  in O with the embedding's.
* S, UPDATE_SHARED: all learn whether the sums are finite and what batch t-1 measured, make masters and moments of W(t),
  and gather the compute copies, which wait for batch t+1.
* Of a head without delay (WPipe) UPDATE_HEAD follows H at once: batch t uses the new one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.cluster.axes import LOSS_AXES
from jaxpipe.lowering.transfers.shared_sums import Meeting
from jaxpipe.mesh import PyTree
from jaxpipe.mesh.collectives import sum_over
from jaxpipe.program.carry import Row, State
from jaxpipe.program.device_sums import sum_of_parts
from jaxpipe.program.in_place import cond_in_place, of_round
from jaxpipe.program.optimizer_step import (
    NAME,
    OLDER,
    DeviceOptimizer,
    Measured,
    NewValues,
    UpdateState,
    squares_of,
)
from jaxpipe.program.partition import Part
from jaxpipe.program.shared_use import SharedUse, shared_of, some_of, with_some


class Arrived(NamedTuple):
    """What a meeting brings: one that collects has `collected` alone, one that updates has all else."""

    collected: PyTree = None  # sums of the gradients that devices have given up, those of before included
    copies: PyTree = None  # the new compute copies
    measured: Measured | None = None  # `Measured`, of batch t-1; from UPDATE_SHARED alone
    is_finite: Any = None  # bool: whether the gradients are, so that the new values are used
    masters: PyTree = None  # the new masters, this device's parts


@dataclass(frozen=True)
class SharedUpdates:
    """The updates of what all stages share, on one device."""

    optimizer: DeviceOptimizer
    use: SharedUse

    def first_copies(self, is_begun: jax.Array, copies: PyTree, next_copies: PyTree) -> PyTree:
        """Compute copies with which a call begins: where the run has begun, the embedding's are those that wait.

        On the last stage it is not that of a parameter which the head reads, too: its batch t-1 is not done yet.
        """
        # The call that fills has nothing that waits, and computes with what `Stream.begin` has made.
        takes = is_begun & ~is_last_stage()

        def taken(by_both: bool, new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(takes if by_both else is_begun, new, old)

        chosen = self.use.by_embedding
        after = jax.tree.map(
            taken, *(some_of(chosen, tree) for tree in (self.use.by_both, next_copies, copies["shared"]))
        )
        return {**copies, "shared": with_some(chosen, copies["shared"], after)}

    # ---- What a meeting brings

    def exchange(self, meeting: Meeting, row: Row, state: State) -> Arrived:
        """What all devices tell each other in a round with a meeting; begins with the round, as messages do.

        In a call without the meeting nobody gives anything, and nothing is stored.
        """
        update = state.of[NAME]
        sums = state.grads["shared"]
        use = self.use
        if meeting is Meeting.COLLECT_HEAD:
            return Arrived(self._collected(use.by_head, use.by_embedding, sums, gives=is_last_stage()))
        if meeting is Meeting.COLLECT_OTHERS:
            new = self._collected(use.by_embedding, use.by_head, sums, gives=~is_last_stage())
            before = some_of(use.by_embedding, update.collected)
            by_both = some_of(use.by_embedding, use.by_head)
            # The head's terms of a tied parameter came in COLLECT_HEAD; of all others the sums are complete with these.
            new = jax.tree.map(lambda both, new, before: before + new if both else new, by_both, new, before)
            return Arrived(with_some(use.by_embedding, update.collected, new))
        # Of this round, so that XLA does not move a collective out of the loop of the rounds.
        _, (loss, collected, squares, num_left_out) = of_round(
            row, (state.loss, update.collected, update.squares, update.num_left_out)
        )
        if meeting is Meeting.UPDATE_HEAD:
            measured = None
            is_finite = self._is_head_finite(collected)
        else:
            measured, is_finite = self._measured(loss, squares, num_left_out)
        # The copies travel while all learn whether they are to be used.
        chosen = self._updated_in(meeting)
        choose = partial(shared_of, chosen)
        nodes = self.optimizer.nodes_of(update, choose)
        _, _, structure = self.optimizer.nodes(update)
        masters, _ = self.optimizer.apply(choose({"shared": collected}), choose(update.masters), nodes, structure)
        parts = some_of(chosen, self.optimizer.parts["shared"])
        return Arrived(
            copies=self.optimizer.copies(masters["shared"], parts),
            measured=measured,
            is_finite=is_finite,
            masters=masters,
        )

    def store(self, meeting: Meeting, row: Row, arrived: Arrived, state: State) -> State:
        """Returns `state` with what `exchange` has brought; the sums that were given up are zeros."""
        # All calls run this program; the filling one has no such event. The sums are large, so they pass a loop.
        is_here = row.of[NAME].event == meeting
        return cond_in_place(is_here, lambda state: self._stored(meeting, arrived, state), state)

    def _stored(self, meeting: Meeting, arrived: Arrived, state: State) -> State:
        update = state.of[NAME]
        shared = state.grads["shared"]
        use = self.use
        if meeting is Meeting.COLLECT_HEAD:
            collected = with_some(use.by_head, update.collected, arrived.collected)
            takes = jax.tree.map(operator.and_, use.by_head, use.has_delay)
            copies = {**update.copies, "shared": with_some(takes, update.copies["shared"], update.next_copies)}
            update = update._replace(collected=collected, copies=copies)
            shared = _left(use.by_head, use.by_embedding, shared, gives=is_last_stage())
        elif meeting is Meeting.COLLECT_OTHERS:
            squares = {**update.squares, "shared": squares_of(arrived.collected)}
            update = update._replace(collected=arrived.collected, squares=squares)
            shared = _left(use.by_embedding, use.by_head, shared, gives=~is_last_stage())
        else:
            update = self._with_shared(meeting, arrived, update)
        return state._replace(of={**state.of, NAME: update}, grads={**state.grads, "shared": shared})

    # ---- Sums

    def _collected(self, chosen: PyTree, others: PyTree, sums: PyTree, *, gives: jax.Array) -> PyTree:
        """Sums over all devices of the chosen `sums`, this device's parts; of those that others have too, of some.

        Args:
            chosen: the parameters that one of embedding and head reads.
            others: those that the other one reads.
            gives: whether this device gives up sums of parameters of both, which may have other terms elsewhere.
        """
        deterministic = self.optimizer.deterministic

        def collected(by_both: bool, leaf: jax.Array, part: Part) -> jax.Array:
            # Zeros from devices that give nothing: a sum over devices needs all of them.
            return part.reduce(jnp.where(gives, leaf, 0.0) if by_both else leaf, deterministic=deterministic)

        return jax.tree.map(
            collected, *(some_of(chosen, tree) for tree in (others, sums, self.optimizer.parts["shared"]))
        )

    def _is_head_finite(self, collected: PyTree) -> jax.Array:
        chosen = self.use.is_updated_first
        squares = some_of(chosen, squares_of(collected))
        parts = some_of(chosen, self.optimizer.parts["shared"])
        totals = sum_of_parts(
            jax.tree.leaves(squares), jax.tree.leaves(parts), deterministic=self.optimizer.deterministic
        )
        return jnp.isfinite(totals.sum())

    def _measured(self, losses: PyTree, squares: PyTree, num_left_out: jax.Array) -> tuple[Measured, jax.Array]:
        """What the batch that ends has measured, and whether the gradients of all that is shared are finite."""
        parts = self.optimizer.parts
        deterministic = self.optimizer.deterministic
        total = partial(sum_over, deterministic=deterministic)
        totals = sum_of_parts(jax.tree.leaves(squares), jax.tree.leaves(parts), deterministic=deterministic)
        num_of_layers = len(jax.tree.leaves(squares["layers"]))  # "layers" come before "shared"
        is_finite = jnp.isfinite(totals[num_of_layers:].sum())
        # Of the batch that ends; the newest one's sums go on.
        losses = jax.tree.map(lambda leaf: total(leaf[OLDER], (*LOSS_AXES, "pipe")), losses)
        num_left_out = total(num_left_out, ("pipe",)) + (~is_finite).astype(jnp.int32)
        return Measured(losses, totals, num_left_out), is_finite

    # ---- The update

    def _updated_in(self, meeting: Meeting) -> PyTree:
        """Whether each parameter is updated in this meeting: of a head without delay, or all else."""
        return self.use.is_updated_first if meeting is Meeting.UPDATE_HEAD else self.use.has_delay

    def _with_shared(self, meeting: Meeting, arrived: Arrived, update: UpdateState) -> UpdateState:
        """`update` after the update of what all stages share in this meeting, if its gradients are finite."""
        is_head = meeting is Meeting.UPDATE_HEAD
        chosen = self._updated_in(meeting)
        choose = partial(shared_of, chosen)
        is_finite = arrived.is_finite
        grads = choose({"shared": update.collected})

        def make(walk: tuple[PyTree, list[PyTree]]) -> tuple[PyTree, list[PyTree]]:
            return self.optimizer.stepped(update, grads, is_finite, *walk, changed=arrived.masters)

        # A guard of its own, as that of a layer: all is read before anything is written in place.
        new = cond_in_place(
            update.num_left_out >= 0, make, (choose(update.masters), self.optimizer.nodes_of(update, choose))
        )
        after = self.optimizer.put(
            update,
            NewValues(*new, {}, is_finite),
            lambda tree, new: {**tree, "shared": with_some(chosen, tree["shared"], new["shared"])},
            is_last=not is_head,
        )
        before = some_of(chosen, update.copies["shared"]) if is_head else update.next_copies
        # Copies were gathered before it was known whether gradients are finite; if not, the older ones stay.
        copies = cond_in_place(is_finite, lambda _: arrived.copies, before)
        if is_head:
            shared = with_some(chosen, update.copies["shared"], copies)
            return after._replace(copies={**update.copies, "shared": shared})
        return after._replace(next_copies=copies, measured=arrived.measured)


def is_last_stage() -> jax.Array:
    """Whether this device holds the last stage."""
    return lax.axis_index("pipe") == lax.axis_size("pipe") - 1


def _left(chosen: PyTree, others: PyTree, sums: PyTree, *, gives: jax.Array) -> PyTree:
    """`sums` without what `SharedUpdates._collected` takes of them."""

    def left(is_chosen: bool, is_of_other: bool, leaf: jax.Array) -> jax.Array:
        if not is_chosen:
            return leaf
        return jnp.where(gives, 0.0, leaf) if is_of_other else jnp.zeros_like(leaf)

    return jax.tree.map(left, chosen, others, sums)
