"""One compiled SPMD program from a schedule, a mesh and a model's functions."""

from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.pipeline import Pipeline
from jaxpipe.program.staged_params import balanced_split

__all__ = ["Pipeline", "StageFunctions", "balanced_split"]
