"""Compiles a config's training step for GPUs that need not be there, and says what it takes of each.

Goes in: a checked config and the devices of a topology. Comes out: bytes per device as compiled and as predicted, and
which transfers an action hides. Nothing is run, so there are no times but that of compiling.
"""

from jaxpipe.compile.gpus import absent_gpus
from jaxpipe.compile.prediction import Prediction, predict
from jaxpipe.compile.report import Report, report
from jaxpipe.compile.step import CompiledStep, compile_step

__all__ = ["CompiledStep", "Prediction", "Report", "absent_gpus", "compile_step", "predict", "report"]
