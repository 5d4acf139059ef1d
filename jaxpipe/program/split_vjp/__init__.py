"""The backward of any layer, split into I and W: the equations that W can defer, and the values they need."""

from jaxpipe.program.split_vjp.cut import needed_inputs
from jaxpipe.program.split_vjp.split import SplitBackward, split_vjp

__all__ = ["SplitBackward", "needed_inputs", "split_vjp"]
