"""Training: `fit` runs what a config describes, or a model of one's own, with metrics, checkpoints and resuming."""

from jaxpipe.training.given import Model
from jaxpipe.training.token_losses import dpo, log_probs, pair_batch, policy_gradient, token_batch
from jaxpipe.training.trainer import Run, fit

__all__ = ["Model", "Run", "dpo", "fit", "log_probs", "pair_batch", "policy_gradient", "token_batch"]
