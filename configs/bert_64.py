"""BERT-64 of 5 billion parameters, the deep and narrow model that BitPipe was measured on, for one node.

It runs 1F1B; with --config.pipeline.schedule=bitpipe it runs BitPipe, four layers a stage.

Data:     Wikipedia as wikiextractor's --json leaves it, wiki/AA/wiki_00 and so on: an object with a text on each line
          python -m jaxpipe.prepare --input='wiki/**/wiki_*' --format=jsonl --tokenizer=bpe:30522 --masked
              --output=data/wiki
Command:  python -m jaxpipe.train --config=configs/bert_64.py --workdir=runs/bert_64
              --config.data.files=indexed:data/wiki --config.data.tokenizer=data/wiki.tokenizer.json
Hardware: 8 GPUs of 80 GB (pipe 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Wu et al., BitPipe, 2024 (arXiv 2410.19367), table 3: four sequences a microbatch; learning rate of BERT-base
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import bert


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = bert()
    config.model.num_layers = 64
    config.model.hidden = 2560
    config.model.num_heads = 64
    config.data.batch_size = 32
    config.pipeline.num_microbatches = 8
    config.mesh.pipe = 8
    config.optimizer.learning_rate = 1e-4
    return config
