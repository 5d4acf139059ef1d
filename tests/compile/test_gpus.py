"""XLA's compiler takes the target of every GPU but those that the checks refuse."""

import os
import subprocess
import sys

import pytest
from compiling import AS_A_USER, ROOT

pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.gpus import absent_gpus

mesh = Mesh(np.array(absent_gpus(parse_topology(sys.argv[1] + ":1x1"))), ("all",))
array = jax.ShapeDtypeStruct((256, 256), jnp.dtype(sys.argv[2]), sharding=NamedSharding(mesh, PartitionSpec()))
compiled = jax.jit(lambda left, right: jnp.tanh(left @ right)).lower(array, array).compile()
print(compiled.memory_analysis().argument_size_in_bytes)
"""


def compile_a_matmul(name: str, dtype: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name, dtype],
        cwd=ROOT,
        env={**os.environ, **AS_A_USER},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h800", "h20", "b200", "gb200", "l40s", "rtx4090"])
def test_a_matmul_is_compiled(name):
    result = compile_a_matmul(name, "bfloat16")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == 2 * 2 * 256 * 256


@pytest.mark.slow
def test_the_gpu_that_is_refused_cannot_be_compiled_for():
    result = compile_a_matmul("v100", "float32")
    assert result.returncode != 0
    assert "ptxas too old" in result.stderr


SUMS = """
import re, sys
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.gpus import absent_gpus
from jaxpipe.compile.step import compile_step
from jaxpipe.config import base_config, check

devices = absent_gpus(parse_topology("h100-80g:1x2"), deterministic=False)
for family in ("gpt", "mixtral"):
    config = base_config(family)
    config.model.update(num_layers=2, hidden=256, num_heads=4, vocab_size=1024, dtype="bfloat16", attention="chunked")
    if family == "mixtral":
        config.model.update(num_kv_heads=4, feed_forward=512)
    config.data.update(seq_len=256, batch_size=4)
    config.pipeline.num_microbatches, config.mesh.pipe, config.mesh.platform = 2, 2, "gpu"
    check(config)
    text = compile_step(config, devices, gpus_per_node=2).compiled.as_text()
    print(family, len(re.findall(r"= bf16\\[[\\d,]+\\]\\S* reduce\\(", text)))
"""


@pytest.mark.slow
def test_no_gradient_is_a_sum_in_bfloat16():
    """From Hopper on XLA adds bfloat16 numbers as such, where older GPUs and CPUs add them in float32."""
    command, environment = [sys.executable, "-c", SUMS], {**os.environ, **AS_A_USER}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "gpt 0\nmixtral 0\n", result.stderr


IN_PLACE = """
import jax.numpy as jnp
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.gpus import absent_gpus
from jaxpipe.compile.hlo import whole_writes
from jaxpipe.compile.step import compile_step
from jaxpipe.config import base_config, check
from jaxpipe.measure.step_pair import pool_shapes

devices = absent_gpus(parse_topology("h100-80g:1x2"), deterministic=False)
for family, expert in (("llama", {}), ("mixtral", {"dispatch": "dropless"})):
    config = base_config(family)
    config.model.update(num_layers=4, hidden=256, num_heads=4, num_kv_heads=4, feed_forward=512, vocab_size=1024)
    config.model.update(dtype="float32", attention="chunked", **expert)
    config.data.update(seq_len=256, batch_size=6)
    config.pipeline.update(schedule="zb_v", num_microbatches=6)
    config.mesh.update(pipe=2, platform="gpu")
    check(config)
    step = compile_step(config, devices, gpus_per_node=2)
    storage = step.pipeline.shapes(step.state.params, step.batch).storage
    print(family, whole_writes(step.compiled.as_text(), pool_shapes(storage)))
"""


@pytest.mark.slow
def test_the_barrier_of_an_input_gradient_leaves_pools_in_place():
    """By one number of each result in place of it XLA copied pools of stages of one layer, and of experts, on CPUs."""
    command, environment = [sys.executable, "-c", IN_PLACE], {**os.environ, **AS_A_USER}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "llama []\nmixtral []\n", result.stderr
