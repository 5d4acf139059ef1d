"""Configs: their fields, the checks on them, and the command line that sets them."""

from jaxpipe.config.base import RunConfig, base_config
from jaxpipe.config.checks import check, layers_per_stage, model_config
from jaxpipe.config.command_line import read_config_file
from jaxpipe.config.costs import expected_costs
from jaxpipe.config.pipeline import build_schedule

__all__ = [
    "RunConfig",
    "base_config",
    "build_schedule",
    "check",
    "expected_costs",
    "layers_per_stage",
    "model_config",
    "read_config_file",
]
