"""Train states on disk in canonical layer order, which any mesh and schedule can resume from."""

from jaxpipe.checkpoints.checkpoints import Checkpoints
from jaxpipe.checkpoints.files import CHECKPOINTS, Keep
from jaxpipe.checkpoints.params import open_canonical, restore_canonical, restore_params, save_canonical

__all__ = [
    "CHECKPOINTS",
    "Checkpoints",
    "Keep",
    "open_canonical",
    "restore_canonical",
    "restore_params",
    "save_canonical",
]
