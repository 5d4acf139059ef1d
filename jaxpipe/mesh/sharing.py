"""The devices that share each layer, as layers see them: those of `tensor`, and who else has parts of a microbatch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.cluster.axes import BATCH_AXES, MeshSizes
from jaxpipe.mesh.collectives import Axis, sum_over
from jaxpipe.mesh.context import ContextAxis


@dataclass(frozen=True)
class TensorAxis(Axis):
    """The devices that share each layer, and the others that have parts of the same microbatches.

    Attributes:
        batch: the axes over which each microbatch is split.
        context: the axis over which each sequence is split.
        num_pipe: devices of `pipe` over which the vocabulary is split as well; 1: it is not.
    """

    name: str = field(default="tensor", init=False)
    batch: tuple[Axis, ...] = ()
    context: ContextAxis = field(default_factory=ContextAxis)
    num_pipe: int = 1

    @classmethod
    def of(cls, *, deterministic: bool = False, num_pipe: int = 1, **sizes: int) -> TensorAxis:
        """The axis in a mesh of these sizes, as in `MeshSizes`."""
        mesh = MeshSizes(**sizes)
        batch = tuple(Axis(name, mesh.axes[name], deterministic) for name in BATCH_AXES)
        context = ContextAxis(mesh.context, deterministic)
        return cls(mesh.tensor, deterministic, batch, context, num_pipe)

    @property
    def expert(self) -> Axis:
        """The devices among which a layer's experts are split."""
        # A mesh of one device has no such axis; size 1 makes its collectives identities.
        return next((axis for axis in self.batch if axis.name == "expert"), Axis("expert"))

    @property
    def num_sharing(self) -> int:
        """Devices that share a microbatch in one stage."""
        return math.prod(axis.size for axis in (*self.batch, self.context, self))

    @property
    def num_vocab_parts(self) -> int:
        """Devices that have rows of the vocabulary."""
        return self.size * self.num_pipe

    def vocab_index(self) -> jax.Array | int:
        """The index of this device among those that have rows of the vocabulary."""
        return self.index() if self.num_pipe == 1 else self.index() * self.num_pipe + lax.axis_index("pipe")

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """The sum of `x` over all devices that share a microbatch in one stage; no gradient passes through it."""
        # Axes of one device would only lengthen the program.
        axes = [axis.name for axis in (*self.batch, self.context, self) if axis.size > 1]
        return sum_over(x, axes, deterministic=self.deterministic)

    def own(self, x: jax.Array) -> jax.Array:
        """The numbers of `x` "batch seq" that are of this device's tokens of the stream."""
        return self.part(self.context.own(x, 1), 1)

    def positions(self, num_tokens: int) -> jax.Array:
        """The positions in a sequence of this device's `num_tokens` tokens of the stream, int32 "token"."""
        if self.context.size == 1:
            return self.index() * num_tokens + jnp.arange(num_tokens)
        return self.part(self.context.positions(num_tokens * self.size * self.context.size), 0)
