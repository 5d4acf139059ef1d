"""Train states on disk in canonical layer order: any mesh and schedule takes them up again."""

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
