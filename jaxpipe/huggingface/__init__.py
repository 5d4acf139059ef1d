"""Import and export of Hugging Face transformers models: names and layouts of tensors, configs, safetensors files.

Each class of transformers is one table (`gpt2`, `llama`, `megatron_bert`); one engine runs every table both ways. Left
to others: checkpoints and the command (`jaxpipe.convert`).
"""
