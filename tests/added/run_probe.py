"""PROBE of docs/add_an_action.md: values, gradients, pictures, files, bytes and times; run in a patched copy."""

import sys
from pathlib import Path

import conftest  # noqa: F401  eight devices
import jax
import numpy as np
import programs
from jaxpipe.schedules.passes.probe import probed
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors

import jaxpipe
from jaxpipe.drawing import svg
from jaxpipe.drawing.text_grid import text
from jaxpipe.lowering import lower, replay
from jaxpipe.models import LanguageModel
from jaxpipe.program.held_bytes import link_bytes
from jaxpipe.schedules import Costs, Kind, build, from_csv, simulate, to_csv
from jaxpipe.training.step import mean_factors


def plain_sum(config, params, batch, num_microbatches):
    """The outputs of all layers of all microbatches, added up on one device."""
    model = LanguageModel(config)

    @jax.jit
    def outputs(microbatch):
        xs = [model.embed(params["shared"], microbatch, None)]
        for number in range(config.num_layers):
            of_layer = jax.tree.map(lambda leaf, at=number: leaf[at], params["layers"])
            xs.append(model.layer(of_layer, xs[-1], microbatch, None))
        return xs[1:]

    of_microbatches = [jax.tree.map(lambda leaf, at=number: leaf[at], batch) for number in range(num_microbatches)]
    return sum(float(np.asarray(x, np.float64).sum()) for each in of_microbatches for x in outputs(each))


def check_numbers(name, num_devices, num_microbatches, num_layers, **axes):
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    config = config_of("gpt", num_layers=num_layers)
    params, batch = random_params(config), random_batch(num_microbatches, seed=0, family="gpt")
    scale = mean_factors(LanguageModel(config).num_losses(batch))
    results = []
    for each in (schedule, probed(schedule)):
        pipeline = pipeline_of(each, config, **axes)
        results.append(pipeline.loss_and_grads(programs.staged(pipeline, params), batch, scale))
    (loss, grads), (with_probe, its_grads) = results
    assert loss == with_probe["words"]
    # XLA fuses what W computes again into kernels of its own choice, whose last bits differ.
    assert max(relative_errors(its_grads, grads).values()) <= (1e-6 if schedule.has_split_backward else 0)
    wanted = plain_sum(config, params, batch, num_microbatches)
    np.testing.assert_allclose(with_probe["measured_probe"], wanted, rtol=1e-4)
    table = pipeline.table
    shapes = pipeline.shapes(programs.staged(pipeline, params), batch, random=False)
    asked, _ = link_bytes(shapes)
    messages = table.asked("messages") * shapes.message.size * shapes.message.dtype.itemsize
    assert (asked == messages + 4 * table.asked("probe")).all()
    assert table.asked("probe").sum() == (schedule.num_stages - 1) * num_microbatches


assert Path(jaxpipe.__file__).is_relative_to(Path.cwd())  # the patched copy
num_devices, num_microbatches, axes = {"1f1b": (4, 6, {}), "zb_h1": (2, 4, {"data": 2})}[sys.argv[1]]
check_numbers(sys.argv[1], num_devices, num_microbatches, 4, **axes)
small = probed(build("1f1b", num_devices=3, num_microbatches=4))
timeline = simulate(small, Costs(probe=1.0))
assert "1PROBE0" in text(timeline)
assert "sum of activations" in svg(timeline)
assert from_csv(to_csv(small), name=small.name).rows == small.rows
table = lower(small)
assert table.buffers["probe"] > 0
assert replay(table, Costs(probe=1.0)).makespan > replay(table, Costs(probe=0.0)).makespan + 3
assert any(Kind.PROBE in kinds for kinds in table.kinds)
