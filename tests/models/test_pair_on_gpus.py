"""A pair compiled for GPUs that are not there: collectives of one half behind products of the other, pools in place."""

import absent_gpu
import pytest

SCRIPT = r"""
import json, re, sys
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import hlo
from jaxpipe.compile.gpus import absent_gpus

devices = absent_gpus(parse_topology("h100-80g:1x4"))
import jax, numpy as np
from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel, LlamaConfig
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build
from jaxpipe.schedules.passes.overlap import overlap

schedule = overlap(build("interleaved_1f1b", num_devices=2, num_microbatches=6, extra_warm_up=True))
sizes = {"hidden": 2048, "num_heads": 16, "num_kv_heads": 16, "feed_forward": 8192, "vocab_size": 1024}
model = LanguageModel(
    LlamaConfig(num_layers=8, **sizes, attention="chunked"),
    TensorAxis.of(data=1, expert=1, tensor=2, deterministic=False),
)
mesh = make_mesh(data=1, pipe=2, tensor=2, devices=devices)
pipeline = Pipeline(schedule, mesh, StageFunctions.of(model), num_layers=8, dtype="bfloat16")
params = jax.eval_shape(pipeline.to_stages, jax.eval_shape(model.init, jax.random.key(0)))
batch = {name: jax.ShapeDtypeStruct((6, 1, 2048), "int32") for name in ("tokens", "targets")}
text = pipeline.loss_and_grads.lower(params, batch).compile().as_text()
stacks = set(re.findall(r"(?:bf16|f32)\[[\d,]+\]", text))
large = [s for s in stacks if np.prod([int(n) for n in s[s.index("[") + 1 : -1].split(",")]) >= 2 * 2 * 2 * 2048 * 2048]
writes = [(i.opcode, i.shape) for i in hlo.whole_writes(text, large)]
print(json.dumps({"pairs": hlo.overlapped_in_pairs(text), "large": large, "writes": writes}))
"""


@pytest.mark.slow
def test_collectives_of_one_half_hide_behind_products_of_the_other():
    """All but the first gather of a layer, of ten collectives of as many bytes."""
    found = absent_gpu.printed(SCRIPT)
    assert found["large"]
    assert found["writes"] == []
    gathered, hidden = found["pairs"]["all-gather"]
    summed, hidden_sums = found["pairs"]["reduce-scatter"]
    assert gathered * 2 == summed * 3
    assert hidden * 6 == gathered * 5
    assert hidden_sums == summed
