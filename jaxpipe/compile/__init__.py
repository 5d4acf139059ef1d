"""Compiles a config's training step for GPUs that need not be present, and reports bytes and overlapped transfers.

Goes in: a checked config and the devices of a topology. Comes out: bytes per device as compiled and as predicted, and
how many transfers overlap with an action. Nothing is run, so only the time of compiling is measured.
"""

from jaxpipe.compile.gpus import absent_gpus
from jaxpipe.compile.hlo import Computation, Instruction, computations, whole_writes
from jaxpipe.compile.prediction import Prediction, predict
from jaxpipe.compile.report import Report, report
from jaxpipe.compile.step import CompiledStep, TrainingStep, compile_step, training_step

__all__ = [
    "CompiledStep",
    "Computation",
    "Instruction",
    "Prediction",
    "Report",
    "TrainingStep",
    "absent_gpus",
    "compile_step",
    "computations",
    "predict",
    "report",
    "training_step",
    "whole_writes",
]
