"""Configs: the fields there are, the checks on them, and how they come from the command line."""

from jaxpipe.config.base import base_config
from jaxpipe.config.checks import build_schedule, check, layers_per_stage, model_config

__all__ = ["base_config", "build_schedule", "check", "layers_per_stage", "model_config"]
