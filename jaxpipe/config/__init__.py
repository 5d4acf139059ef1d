"""Configs: the fields there are, the checks on them, and how they come from the command line."""

from jaxpipe.config.base import base_config
from jaxpipe.config.checks import check

__all__ = ["base_config", "check"]
