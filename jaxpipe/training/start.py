"""The train state that a run begins with: initial parameters, or those of another working folder."""

from __future__ import annotations

import optax
from ml_collections import ConfigDict

from jaxpipe.checkpoints import restore_params
from jaxpipe.distributed.log import say
from jaxpipe.training.setup import Setup
from jaxpipe.training.step import TrainState, init_state, state_of
from jaxpipe.training.workdir import path_of


def first_state(config: ConfigDict, setup: Setup, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step of the run of a checked config.

    Raises:
        ConfigError: `checkpoint.init_from` has no checkpoint, or one of another model.
    """
    model, pipeline = setup.model, setup.pipeline
    if not config.checkpoint.init_from:
        return init_state(model, pipeline, optimizer, seed=config.train.seed)
    _, params = restore_params(path_of(config.checkpoint.init_from), model=model, pipeline=pipeline, say=say)
    return state_of(model, pipeline, optimizer, params)
