"""Norms of docs/add_an_action.md under a schedule: values, and the order of collectives; run in a patched copy."""

import sys

import conftest  # noqa: F401  eight devices
import jax
import numpy as np
import programs
from collectives_of_programs import unordered_collectives
from tiny_models import config_of, pipeline_of, random_batch, random_params

from jaxpipe.models import LanguageModel
from jaxpipe.schedules import build
from jaxpipe.training.step import mean_factors

num_layers = 4
num_microbatches, axes = {"1f1b": (3, {"data": 2, "tensor": 2}), "zb_v": (4, {"data": 2})}[sys.argv[1]]
config = config_of("gpt", num_layers=num_layers)
pipeline = pipeline_of(build(sys.argv[1], num_devices=2, num_microbatches=num_microbatches), config, **axes)
params, batch = random_params(config), random_batch(num_microbatches, seed=0, family="gpt")
model = LanguageModel(config)
arguments = programs.staged(pipeline, params), batch, mean_factors(model.num_losses(batch))


@jax.jit
def outputs(microbatch):
    xs = [model.embed(params["shared"], microbatch, None)]
    for number in range(num_layers):
        of_layer = jax.tree.map(lambda leaf, at=number: leaf[at], params["layers"])
        xs.append(model.layer(of_layer, xs[-1], microbatch, None))
    return xs[1:]


step = pipeline.loss_and_grads.lower(*arguments).compile()
assert unordered_collectives(step.as_text()) == []
wanted = np.zeros(num_layers)
for number in range(num_microbatches):
    microbatch = jax.tree.map(lambda leaf, at=number: leaf[at], batch)
    wanted += [np.square(np.asarray(x, np.float64)).sum() for x in outputs(microbatch)]
losses, _ = step(*arguments)
np.testing.assert_allclose(losses["measured_layer_norms"], wanted, rtol=1e-5)
