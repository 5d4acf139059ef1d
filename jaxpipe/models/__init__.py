"""Models as three pure functions (embed, layer, head) over plain parameter trees.

A model knows nothing of schedules: it says what one layer computes on a device, alone or together with
those that share the layer, and how the ends do.
"""

from jaxpipe.models.bert import BertConfig
from jaxpipe.models.gpt import GPTConfig
from jaxpipe.models.language_model import LanguageModel
from jaxpipe.models.llama import LlamaConfig

ModelConfig = GPTConfig | BertConfig | LlamaConfig

__all__ = ["BertConfig", "GPTConfig", "LanguageModel", "LlamaConfig", "ModelConfig"]
