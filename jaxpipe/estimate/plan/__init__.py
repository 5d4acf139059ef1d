"""The planner: ranks the ways to train a model on a cluster by their predicted time of a step."""

from jaxpipe.estimate.plan.describe import describe_schedule
from jaxpipe.estimate.plan.exposure import exposed_fraction
from jaxpipe.estimate.plan.ranking import MEMORY_MARGIN, search
from jaxpipe.estimate.plan.recomputed import bytes_within
from jaxpipe.estimate.plan.report import TIME_ERROR
from jaxpipe.estimate.plan.rows import Row
from jaxpipe.estimate.plan.space import space_of

__all__ = [
    "MEMORY_MARGIN",
    "TIME_ERROR",
    "Row",
    "bytes_within",
    "describe_schedule",
    "exposed_fraction",
    "search",
    "space_of",
]
