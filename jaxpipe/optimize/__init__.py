"""Look for a short schedule: `python -m jaxpipe.optimize --num_devices=8 --num_microbatches=32 --memory_bound=5`.

Goes in: a problem or a schedule to start from, costs, and what a device may store. Comes out: what the search has
found beside the best registered schedule that fits, and the schedule as CSV or JSON, for `pipeline.schedule` of a
config and for `jaxpipe.show`. The search itself is `jaxpipe.schedules.optimize`. No JAX here.
"""

from jaxpipe.optimize.command import main

__all__ = ["main"]
