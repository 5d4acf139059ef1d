"""Configs: their fields, the checks on them, and the command line that sets them."""

from jaxpipe.config.base import base_config
from jaxpipe.config.checks import check, layers_per_stage, model_config
from jaxpipe.config.costs import expected_costs
from jaxpipe.config.pipeline import build_schedule

__all__ = ["base_config", "build_schedule", "check", "expected_costs", "layers_per_stage", "model_config"]
