"""Primitives that read an operand, or add their result, where it stands: in a stack of such, one for each layer.

A foreign kernel takes and makes whole arrays, so that XLA copies a layer's part out of the stack before each call, and
adds a gradient to the stack of sums in a kernel of its own: 6,912 MiB a microbatch for a layer of Qwen3-30B-A3B. A
kernel that is told where the part begins reads it, or adds to it, in place.
"""

from __future__ import annotations

import jax.extend.core as core

# Primitive -> the place of the operand, "kernel ...", that may be a stack of such, "layer * kernel ...", then with the
# number of kernels before the layer's own added to the last operand, int32.
READ_IN_STACK: dict[core.Primitive, int] = {}
# Primitive that makes "kernel ..." -> the primitive that adds the same to a float32 stack, with the operands (stack,
# those of the first, number of kernels before the layer's own); it returns the stack.
ADDED_IN_STACK: dict[core.Primitive, core.Primitive] = {}
