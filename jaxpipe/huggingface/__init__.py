"""Models of Hugging Face's transformers in and out: names and forms of tensors, configs, safetensors files.

A class of transformers is a table of rows (`gpt2`, `llama`, `megatron_bert`); one engine runs every table
both ways. Left to others: checkpoints and the command (`jaxpipe.convert`).
"""

from jaxpipe.huggingface.configs import ARCHITECTURES
from jaxpipe.huggingface.files import TensorFiles
from jaxpipe.huggingface.origin import copied_name, copy_origin
from jaxpipe.huggingface.tensors import TensorMap

__all__ = ["ARCHITECTURES", "TensorFiles", "TensorMap", "copied_name", "copy_origin"]
