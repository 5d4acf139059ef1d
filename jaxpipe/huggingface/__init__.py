"""Import and export of Hugging Face transformers models: names and layouts of tensors, configs, safetensors files.

Each class of transformers is one table (`gpt2`, `llama`, `megatron_bert`); one engine runs every table both ways. Left
to others: checkpoints and the command (`jaxpipe.convert`).
"""

from jaxpipe.huggingface.configs import ARCHITECTURES
from jaxpipe.huggingface.source_model import check_vocabulary, copied_path, copy_source_model, own_path
from jaxpipe.huggingface.tensor_files import TensorFiles
from jaxpipe.huggingface.tensors import TensorMap

__all__ = [
    "ARCHITECTURES",
    "TensorFiles",
    "TensorMap",
    "check_vocabulary",
    "copied_path",
    "copy_source_model",
    "own_path",
]
