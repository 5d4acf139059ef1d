"""Goes on training a model that is there: one converted from Hugging Face, or one of an earlier run.

The folder's own config, its model among it, and its parameters; learning rate, packing and dtype as fine-tuning needs
them. The text is to be named; everything else can be set on the command line.

Command:  python -m jaxpipe.train --config=configs/finetune.py:runs/llama --workdir=runs/tuned --config.data.files=PATHS
Hardware: as the model needs
Time:     as the model needs
Number:   not yet measured
"""

from ml_collections import ConfigDict

from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.source_model import dtype_of_source
from jaxpipe.training.run_folder import read_config


def get_config(arg: str = "") -> ConfigDict:
    """The config of the working folder `arg`, whose parameters the run starts from."""
    if not arg:
        raise ConfigError(
            "configs/finetune.py is given no working folder\n"
            "  rule finetune-folder: it goes on from the parameters of a run, or of a converted model\n"
            "  repair: name it after a colon, for example --config=configs/finetune.py:runs/llama"
        )
    config = read_config(arg)
    config.checkpoint.init_from = arg
    config.data.files = ""  # nothing is trained on by default
    config.mesh.platform = config.pipeline.costs = "auto"  # of this machine, not of the earlier run's
    if "packing" in config.data:
        config.data.packing = "documents"
    if dtype_of_source(arg) == "bfloat16":
        config.model.dtype = "bfloat16"
    # Small steps: large ones lose what the model knows.
    config.optimizer.update(learning_rate=2e-5, warmup_fraction=0.03, weight_decay=0.0)
    if config.model.get("num_positions") == "auto":  # the table stays as long as it is, for shorter sequences too
        config.model.num_positions = str(config.data.seq_len)
    return config
