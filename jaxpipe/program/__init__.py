"""One compiled SPMD program from a schedule, a mesh and a model's functions."""

from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.layout import balanced_split
from jaxpipe.program.pipeline import Pipeline

__all__ = ["Pipeline", "StageFunctions", "balanced_split"]
