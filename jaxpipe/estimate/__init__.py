"""Which way to train is fastest, and does it fit? Numbers only: no device is needed, nothing is compiled or traced."""

from jaxpipe.estimate.memory import Bytes, fits, memory
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.setting import Setting, setting_of
from jaxpipe.estimate.step import Estimate, estimate
from jaxpipe.estimate.times import Link, Times, TimeSource

__all__ = [
    "Bytes",
    "Estimate",
    "Link",
    "Roofline",
    "Setting",
    "TimeSource",
    "Times",
    "estimate",
    "fits",
    "memory",
    "setting_of",
]
