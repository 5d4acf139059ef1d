"""Models as three pure functions (embed, layer, head) over plain parameter trees.

A model knows nothing of schedules or meshes: it says what one layer computes, and how the ends do.
"""

from jaxpipe.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
