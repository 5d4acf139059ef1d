"""Pictures of schedules: text grid, timeline (SVG, PNG, PDF), stored activations, Chrome trace, HTML page.

Drawing takes schedules, timelines and round tables as they are; it decides nothing. No JAX; matplotlib is loaded
when the first picture is drawn.
"""

from jaxpipe.drawing.html.compare import Page, to_html
from jaxpipe.drawing.memory_chart import memory
from jaxpipe.drawing.summary import Summary
from jaxpipe.drawing.text_grid import text
from jaxpipe.drawing.timeline import chrome_trace, pdf, png, svg

__all__ = ["Page", "Summary", "chrome_trace", "memory", "pdf", "png", "svg", "text", "to_html"]
