"""BERT-base, 110 million parameters, with the norms where Megatron-LM puts them: for one node.

Command:  python -m jaxpipe.train --config=configs/bert_base.py --workdir=runs/bert_base --config.data.files='*.txt'
Hardware: 8 GPUs of 80 GB (data 2 x pipe 4), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Devlin et al., BERT, NAACL 2019, section 3 and appendix A.2
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import bert


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = bert()
    config.model.num_layers = 12
    config.model.hidden = 768
    config.model.num_heads = 12
    config.data.batch_size = 256
    config.pipeline.num_microbatches = 32
    config.mesh.data = 2
    config.mesh.pipe = 4
    config.optimizer.learning_rate = 1e-4
    return config
