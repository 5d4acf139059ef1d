"""The defaults of every field."""

from jaxpipe.config import base_config


def get_config():
    return base_config()
