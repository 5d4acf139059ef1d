"""GPT-96 of 11 billion parameters, the deep and narrow model that BitPipe was measured on, for one node.

It runs 1F1B; with --config.pipeline.schedule=bitpipe it runs BitPipe, six layers a stage.

Data:     OpenWebText as JSON lines with a text in each; of its text files, one a page, --input='openwebtext/**/*.txt'
          python -m jaxpipe.prepare --input='openwebtext/**/*.jsonl' --tokenizer=bpe:50257 --output=data/openwebtext
Command:  python -m jaxpipe.train --config=configs/gpt_96.py --workdir=runs/gpt_96
              --config.data.files=indexed:data/openwebtext --config.data.tokenizer=data/openwebtext.tokenizer.json
Hardware: 8 GPUs of 80 GB (pipe 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Wu et al., BitPipe, 2024 (arXiv 2410.19367), table 3: one sequence a microbatch; learning rate of GPT-3 13B
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import gpt3


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = gpt3()
    config.model.num_layers = 96
    config.model.hidden = 3072
    config.model.num_heads = 32
    config.data.batch_size = 32
    config.data.seq_len = 1024
    config.pipeline.num_microbatches = 32
    config.mesh.pipe = 8
    config.optimizer.learning_rate = 1e-4
    return config
