"""Show a schedule: `python -m jaxpipe.show 1f1b --num_devices=4 --num_microbatches=8`.

Goes in: a schedule's name, or a user's own CSV or JSON, and costs. Comes out: a grid and its figures, or the same
as JSON, CSV, SVG, PNG or a Chrome trace, or a picture of what devices store, or a page on which to look at all of it.
Both clocks are told: the asynchronous one (`simulate`), and the one of the compiled program (`spmd`, replayed from
the round table that the program executes). No JAX here, but for `--placement`, which shows where the stages stand on a
cluster instead, and loads the mesh for it.
"""

from jaxpipe.drawing.html.compare import Page, to_html
from jaxpipe.show.command import main

__all__ = ["Page", "main", "to_html"]
