"""A stream of a model whose layers are of two kinds: every tensor by the layer that has it."""

import jax
import numpy as np
import pytest

from jaxpipe.config import base_config, model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.huggingface import configs
from jaxpipe.huggingface.streaming import stream
from jaxpipe.huggingface.tensors import TensorMap
from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build

SIZES = {"num_layers": 5, "hidden": 32, "num_heads": 2, "num_dense": 2, "dense_width": 48, "feed_forward": 16}
SIZES |= {"mtp_factor": 0.3}  # a layer of the head's own, whose experts are split too


@pytest.mark.ci
def test_tensors_of_both_kinds_are_those_of_the_file_export():
    config = base_config("deepseek_v3")
    config.model.update(SIZES)
    config.mesh.pipe = config.mesh.expert = 2
    told = RunConfig.of(config)
    model = LanguageModel(model_config(told), TensorAxis.of(expert=2))
    params = model.init(jax.random.key(0))
    schedule = build("interleaved_1f1b", num_devices=2, num_microbatches=4)
    pipeline = Pipeline(schedule, make_mesh(pipe=2, expert=2), StageFunctions.of(model), num_layers=5)
    shardings = pipeline.shardings(jax.eval_shape(pipeline.to_stages, params))
    staged = jax.jit(pipeline.to_stages, out_shardings=shardings)(params)
    theirs = configs.architecture_of(configs.new_config(told, dtype="float32"), where="config.json")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    by_path = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
    wanted = dict(TensorMap(theirs, model.config).tensors(by_path.__getitem__))
    found = {}
    for bucket in stream(staged, pipeline, config, bucket_bytes=4096, to="host"):
        found |= {name: np.array(array) for name, array in bucket.tensors}
    assert found.keys() == wanted.keys()
    assert "model.layers.5.shared_head.head.weight" in found
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name])
