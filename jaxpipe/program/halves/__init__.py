"""The backward of any layer in two halves: what may wait, and what it has to be given."""

from jaxpipe.program.halves.halves import Halves, halve

__all__ = ["Halves", "halve"]
