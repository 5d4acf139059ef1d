"""Pictures of schedules on timelines: text grid, SVG, PNG, Chrome trace, memory, page. They only draw, never decide."""

from jaxpipe.schedules.render.chrome import chrome_trace
from jaxpipe.schedules.render.html import Shown, html
from jaxpipe.schedules.render.memory import memory
from jaxpipe.schedules.render.panel import Panel
from jaxpipe.schedules.render.png import png
from jaxpipe.schedules.render.svg import svg
from jaxpipe.schedules.render.text import text

__all__ = ["Panel", "Shown", "chrome_trace", "html", "memory", "png", "svg", "text"]
