"""Pictures of a schedule on a timeline: text grid, SVG, PNG, Chrome trace, memory. They only draw, never decide."""

from jaxpipe.schedules.render.chrome import chrome_trace
from jaxpipe.schedules.render.memory import memory
from jaxpipe.schedules.render.png import png
from jaxpipe.schedules.render.svg import svg
from jaxpipe.schedules.render.text import text

__all__ = ["chrome_trace", "memory", "png", "svg", "text"]
