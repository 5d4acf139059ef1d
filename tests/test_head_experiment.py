"""Experiment 024: kernels are counted as by hand, the head keeps its bars, and its gradient is added in its product."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from experiment_modules import EXPERIMENTS, modules_of

from experiments.pages import put_between
from jaxpipe.cluster.hardware import HARDWARE

FOLDER = EXPERIMENTS / "024_head"
# A loop of three rounds: a slice is copied out of a stack, a product is added to it, and the sum is added to the stack.
LOOP = """HloModule by_hand

%fused_slice (stack: f32[4,8,16], index: s32[]) -> f32[8,16] {
  %stack = f32[4,8,16]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8,16]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %out = f32[8,16]{1,0} bitcast(%slice)
}

%fused_update (stack: f32[4,8,16], added: f32[8,16], index: s32[]) -> f32[4,8,16] {
  %stack = f32[4,8,16]{2,1,0} parameter(0)
  %added = f32[8,16]{1,0} parameter(1)
  %index = s32[] parameter(2)
  %zero = s32[] constant(0)
  %old = f32[1,8,16]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), dynamic_slice_sizes={1,8,16}
  %row = f32[1,8,16]{2,1,0} bitcast(%added)
  %sum = f32[1,8,16]{2,1,0} add(%old, %row)
  ROOT %new = f32[4,8,16]{2,1,0} dynamic-update-slice(%stack, %sum, %index, %zero, %zero)
}

%body (state: (s32[], f32[4,8,16], bf16[32,8], bf16[32,16])) -> (s32[], f32[4,8,16], bf16[32,8], bf16[32,16]) {
  %state = (s32[], f32[4,8,16]{2,1,0}, bf16[32,8]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %all = f32[4,8,16]{2,1,0} get-tuple-element(%state), index=1
  %x = bf16[32,8]{1,0} get-tuple-element(%state), index=2
  %dy = bf16[32,16]{1,0} get-tuple-element(%state), index=3
  %taken = f32[8,16]{1,0} fusion(%all, %i), kind=kLoop, calls=%fused_slice
  %product = (f32[8,16]{1,0}, s8[4096]{0}) custom-call(%x, %dy, %taken), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"beta":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}
  %first = f32[8,16]{1,0} get-tuple-element(%product), index=0
  %put = f32[4,8,16]{2,1,0} fusion(%all, %first, %i), kind=kLoop, calls=%fused_update
  ROOT %next = (s32[], f32[4,8,16]{2,1,0}, bf16[32,8]{1,0}, bf16[32,16]{1,0}) tuple(%i, %put, %x, %dy)
}

%condition (state: (s32[], f32[4,8,16], bf16[32,8], bf16[32,16])) -> pred[] {
  ROOT %less = pred[] constant(true)
}

ENTRY %main (all: f32[4,8,16], x: bf16[32,8], dy: bf16[32,16]) -> f32[4,8,16] {
  %all = f32[4,8,16]{2,1,0} parameter(0)
  %x = bf16[32,8]{1,0} parameter(1)
  %dy = bf16[32,16]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,8,16]{2,1,0}, bf16[32,8]{1,0}, bf16[32,16]{1,0}) tuple(%zero, %all, %x, %dy)
  %loop = (s32[], f32[4,8,16]{2,1,0}, bf16[32,8]{1,0}, bf16[32,16]{1,0}) while(%start), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %sums = f32[4,8,16]{2,1,0} get-tuple-element(%loop), index=1
  ROOT %copied = f32[4,8,16]{2,1,0} copy(%sums)
}
"""


@pytest.fixture(scope="module")
def modules():
    with modules_of("024_head") as found:
        yield found


def test_kernels_are_counted_as_by_hand(modules):
    slice_bytes, index_bytes = 8 * 16 * 4, 4
    found = [(k.name, k.result, k.times, k.flops, k.num_bytes, k.adds) for k in modules["kernels"].kernels(LOOP)]
    assert found == [
        ("taken", "f32[8,16]", 3, 0, 2 * slice_bytes + index_bytes, False),
        # Reads both factors and the slice, writes the slice; its workspace is not counted.
        ("product", "f32[8,16]", 3, 2 * 8 * 16 * 32, 2 * 32 * (8 + 16) + 2 * slice_bytes, True),
        # Reads a slice of the stack and what is added, writes the slice.
        ("put", "f32[4,8,16]", 3, 0, 3 * slice_bytes + index_bytes, False),
        ("copied", "f32[4,8,16]", 1, 0, 2 * 4 * slice_bytes, False),
    ]


def test_a_kernel_takes_what_it_waits_for(modules):
    hardware = HARDWARE["a100-80g"]
    computes = modules["kernels"].Kernel("a", "", times=3, flops=312 * 10**9, num_bytes=2_039_040)
    moves = modules["kernels"].Kernel("b", "", times=2, flops=312, num_bytes=2_039_040_000)
    assert computes.seconds(hardware) == pytest.approx(3e-3)
    assert moves.seconds(hardware) == pytest.approx(2e-3)
    assert (computes.bound_by(hardware), moves.bound_by(hardware)) == ("compute", "memory")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"known_trip_count":{"n":"3"}', "", "how often the loop loop runs"),
        ("bf16[", "f32[", "product: a product in f32"),
        ("__cublas$lt$matmul", "__cudnn$convForward", "product is no product of cuBLAS"),
        (" add(%old, %row)", " dot(%old, %row)", "a fusion with a product"),
        (" copy(%sums)", " conditional(%sums)", "conditional is not counted"),
    ],
)
def test_what_cannot_be_counted_is_an_error(modules, old, new, said):
    with pytest.raises(ValueError, match=said):
        modules["kernels"].kernels(LOOP.replace(old, new))


def test_every_cell_keeps_its_bar(modules):
    run = modules["run"]
    heads = json.loads(run.RESULTS.read_text())["heads"]
    assert [(r["GPU"], r["hidden"], r["words"]) for r in heads] == list(run.CELLS)
    assert len(heads) == 16
    for record in heads:
        assert 1.0 < run.ratio(record, "new") <= run.BARS[record["GPU"]], record
        assert run.ratio(record, "new") < run.ratio(record, "old"), record
        assert record["new"]["temp_bytes"] < record["old"]["temp_bytes"], record


def test_the_kernels_of_a_cell_are_all_of_its_time(modules):
    run = modules["run"]
    records = json.loads(run.RESULTS.read_text())
    (cell,) = (r for r in records["heads"] if (r["GPU"], r["hidden"], r["words"]) == run.CELL)
    assert sum(r["s"] for r in records["kernels"]) == pytest.approx(cell["new"]["kernels_s"])


def test_the_page_holds_what_is_kept(modules):
    run = modules["run"]
    page, records = run.PAGE.read_text(), json.loads(run.RESULTS.read_text())
    assert put_between(run.document(records), page) == page


def test_both_forms_of_the_head_give_the_same(modules):
    tokens, hidden, words = 24, 16, 32
    random = np.random.default_rng(0)
    sums, kernel = random.normal(size=(2, words, hidden)).astype(np.float32)
    x = random.normal(size=(tokens, hidden)).astype(np.float32)
    targets = jnp.asarray(random.integers(-1, words, tokens))
    new, old = (
        head(jnp.asarray(sums), jnp.asarray(x), jnp.asarray(kernel), targets, jnp.float32(0.5))
        for head in modules["head_forms"].HEADS.values()
    )
    for found, wanted in zip(new, old, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


COMPILE = """
import json, sys
from compile_cells import head
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.gpus import absent_gpus

device = absent_gpus(parse_topology("a100-80g:1x1"))[0]
print(json.dumps({form: [vars(kernel) for kernel in head(device, form, 512, 8192)[0]] for form in ("new", "old")}))
"""


@pytest.mark.ci
def test_the_kernels_gradient_is_added_in_its_product():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")
    as_a_user = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    paths = os.pathsep.join([str(FOLDER), str(EXPERIMENTS.parent)])
    environment = {**os.environ, **as_a_user, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    writing = {
        form: [kernel for kernel in found if "[8192,512]" in kernel["result"]]
        for form, found in json.loads(done.stdout.splitlines()[-1]).items()
    }
    (product,) = writing["new"]
    assert product["adds"]
    assert product["result"] == "f32[8192,512]"
    assert product["times"] == 2  # chunks of 4096 tokens
    # The old form makes zeros, adds to them in its products, and adds the whole to the sum.
    assert len(writing["old"]) >= 3
    assert [kernel["adds"] for kernel in writing["old"]].count(True) == 1
