"""The backward of any layer, split into I and W: which equations W can defer, and which values it needs for them."""

from jaxpipe.program.split_vjp.split import SplitBackward, split_vjp

__all__ = ["SplitBackward", "split_vjp"]
