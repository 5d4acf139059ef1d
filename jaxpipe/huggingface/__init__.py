"""Import and export of Hugging Face transformers models: names and layouts of tensors, configs, safetensors files.

Each class of transformers is one table (`gpt2`, `llama`, `megatron_bert`); one engine runs every table both ways.
`stream` hands out the tensors of a run that goes on. Left to others: checkpoints and the command (`jaxpipe.convert`).
"""

from jaxpipe.huggingface.streaming import Bucket, stream

__all__ = ["Bucket", "stream"]
