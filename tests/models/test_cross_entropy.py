"""The loss by chunks of tokens, on one device and with the vocabulary split, against the whole log-softmax."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import textbook
from absent_gpu import printed
from jax.sharding import PartitionSpec as P
from small_models import BATCH, HIDDEN, SEQ, VOCAB_SIZE, assert_near, in_tiers, normal, stream, tokens_and_targets

from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import cross_entropy
from jaxpipe.models.cross_entropy import (
    KernelSums,
    Vocabulary,
    chunks_of,
    cross_entropy_backward,
    cross_entropy_sum,
)

NUM_TOKENS = BATCH * SEQ
WEIGHT = 0.3  # of the loss, in what is differentiated
ONE_DEVICE = TensorAxis()


def summed(x, kernel, targets, tensor=ONE_DEVICE, **options):
    return cross_entropy_sum(x, targets, Vocabulary(kernel, tensor, **options))


@pytest.fixture(params=[None, cross_entropy._in_one_pass], ids=["cpu", "gpu"])
def statistics(request, monkeypatch):
    """The statistics of logits as CPUs and as GPUs compute them."""
    if request.param:
        monkeypatch.setattr(cross_entropy, "_in_two_passes", request.param)


def _kernel() -> np.ndarray:
    return normal(VOCAB_SIZE, HIDDEN, seed=4)


def _value_and_gradients(function, x, kernel, targets):
    return jax.jit(jax.value_and_grad(lambda x, kernel: WEIGHT * function(x, kernel, targets), (0, 1)))(x, kernel)


def _split(function, num_devices: int, x, kernel, targets):
    """As `_value_and_gradients`, with the vocabulary over devices and the gradient for `x` summed over them."""

    def on_device(x, kernel):
        loss, (dx, d_kernel) = _value_and_gradients(function, x, kernel, targets)
        return loss[None], jax.lax.psum(dx, "tensor"), d_kernel

    losses, dx, d_kernel = jax.jit(
        jax.shard_map(
            on_device,
            mesh=make_mesh(tensor=num_devices),
            in_specs=(P(), P("tensor")),
            out_specs=(P("tensor"), P(), P("tensor")),
            check_vma=False,
        )
    )(x, kernel)
    return losses, (dx, d_kernel)


@pytest.mark.parametrize("num_chunks", in_tiers([1, 6, NUM_TOKENS], default=[6]))
def test_values_and_gradients_are_those_of_log_softmax(monkeypatch, statistics, num_chunks):
    monkeypatch.setattr(cross_entropy, "MOST_TOKENS", -(-NUM_TOKENS // num_chunks))
    assert chunks_of(NUM_TOKENS, VOCAB_SIZE)[0] == num_chunks
    x, kernel, targets = stream(), _kernel(), tokens_and_targets()["targets"]
    assert 0 < (targets < 0).sum() < targets.size
    ours = summed
    expected = _value_and_gradients(textbook.cross_entropy_sum, x, kernel, targets)
    assert_near(_value_and_gradients(ours, x, kernel, targets), expected)
    # What a device computes without gradients is a function of its own.
    assert_near(WEIGHT * jax.jit(ours)(x, kernel, targets), expected[0])


@pytest.mark.parametrize(("num_devices", "num_chunks"), in_tiers([(2, 1), (4, 5)], default=[(4, 5)]))
def test_a_split_vocabulary_changes_nothing(monkeypatch, statistics, num_devices, num_chunks):
    monkeypatch.setattr(cross_entropy, "MOST_TOKENS", -(-NUM_TOKENS // num_chunks))
    x, kernel, targets = stream(), _kernel(), tokens_and_targets()["targets"]
    ours = partial(summed, tensor=TensorAxis(num_devices))
    losses, gradients = _split(ours, num_devices, x, kernel, targets)
    np.testing.assert_array_equal(losses, losses[0])
    assert_near((losses[0], gradients), _value_and_gradients(textbook.cross_entropy_sum, x, kernel, targets))


@pytest.mark.parametrize(("num_devices", "num_chunks"), in_tiers([(1, 1), (1, 6), (4, 2)], default=[(4, 2)]))
def test_a_bias_and_rows_that_are_no_words(monkeypatch, statistics, num_devices, num_chunks):
    """Of 19 words in 32 rows the devices hold 8, 8, 3 and none."""
    vocab_size = 19
    monkeypatch.setattr(cross_entropy, "MOST_TOKENS", -(-NUM_TOKENS // num_chunks))
    x, kernel, bias = stream(), _kernel(), normal(VOCAB_SIZE, seed=6)
    targets = np.minimum(tokens_and_targets()["targets"], vocab_size - 1)

    def ours(x, both, targets):
        options = {"bias": both["bias"], "size": vocab_size}
        return summed(x, both["kernel"], targets, TensorAxis(num_devices), **options)

    def plain(x, both, targets):
        return textbook.loss_of_logits((x @ both["kernel"].T + both["bias"])[..., :vocab_size], targets)

    both = {"kernel": kernel, "bias": bias}
    losses, gradients = _split(ours, num_devices, x, both, targets)
    np.testing.assert_array_equal(losses, losses[0])
    assert_near((losses[0], gradients), _value_and_gradients(plain, x, both, targets))


def test_targets_that_are_not_valid_count_nothing_at_all():
    none = np.full((BATCH, SEQ), -1, np.int32)
    loss, gradients = _value_and_gradients(summed, stream(), _kernel(), none)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_three_words_by_hand():
    # Two tokens whose logits are (0, 1, 2) and (3, 0, 0); their words 2 and 0.
    x, kernel = jnp.array([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]]), jnp.eye(3)
    expected = -math.log(math.e**2 / (1 + math.e + math.e**2)) - math.log(math.e**3 / (math.e**3 + 2))
    loss: Any = summed(x, kernel, jnp.array([[2, 0]]))
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_beyond_the_range_of_exp_stay_finite(statistics, offset):
    x = np.concatenate([stream(), np.ones((BATCH, SEQ, 1), np.float32)], axis=-1)
    kernel = np.concatenate([_kernel(), np.full((VOCAB_SIZE, 1), offset, np.float32)], axis=-1)
    targets = tokens_and_targets()["targets"]
    loss, gradients = _value_and_gradients(summed, x, kernel, targets)
    # The same constant on all logits changes nothing; float32 keeps three digits after the point of 1e4.
    np.testing.assert_allclose(loss, WEIGHT * textbook.cross_entropy_sum(stream(), _kernel(), targets), rtol=1e-3)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_low_precision_is_near_and_gradients_keep_their_dtypes(statistics):
    x, kernel = (jnp.asarray(array, jnp.bfloat16) for array in (stream(), _kernel()))
    targets = tokens_and_targets()["targets"]
    loss, gradients = _value_and_gradients(summed, x, kernel, targets)
    assert loss.dtype == jnp.float32
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.bfloat16]
    exact = _value_and_gradients(textbook.cross_entropy_sum, x.astype(jnp.float32), kernel.astype(jnp.float32), targets)
    assert_near(loss, exact[0], tolerance=1e-5)  # logits and loss are float32
    assert_near(gradients, exact[1], tolerance=2**-7)  # bfloat16 has 8 bits


def test_logits_are_those_of_one_chunk(monkeypatch):
    largest = {}
    for num_chunks in (1, 6):
        monkeypatch.setattr(cross_entropy, "MOST_TOKENS", -(-NUM_TOKENS // num_chunks))
        ours = jax.jit(jax.value_and_grad(lambda x, k, t: summed(x, k, t), (0, 1)))
        text = ours.lower(stream(), _kernel(), tokens_and_targets()["targets"]).compile().as_text() or ""
        shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
        # The vocabulary's size is no other dim of these arrays; without its dim, what is left are tokens.
        largest[num_chunks] = max(
            math.prod(shape) // VOCAB_SIZE for shape in shapes if VOCAB_SIZE in shape and HIDDEN not in shape
        )
    assert largest == {1: NUM_TOKENS, 6: NUM_TOKENS // 6}


@pytest.mark.parametrize(("num_tokens", "most", "expected"), [(12, 12, (1, 12)), (12, 5, (3, 4)), (7, 3, (3, 3))])
def test_chunks_are_as_few_as_allowed_and_of_one_size(monkeypatch, num_tokens, most, expected):
    monkeypatch.setattr(cross_entropy, "MOST_TOKENS", most)
    assert chunks_of(num_tokens, 10) == expected


@pytest.mark.parametrize(("num_rows", "tokens"), [(100, 8), (101, 7), (150, 5), (1000, 4)])
def test_a_large_vocabulary_has_smaller_chunks(monkeypatch, num_rows, tokens):
    for name, value in {"MOST_TOKENS": 8, "FEWER_TOKENS": 4, "MOST_LOGITS": 800}.items():
        monkeypatch.setattr(cross_entropy, name, value)
    assert chunks_of(840, num_rows) == (840 // tokens, tokens)


@pytest.mark.parametrize("num_chunks", in_tiers([1, 4], default=[4]))
def test_gradients_are_scaled_and_added_to_running_sums(monkeypatch, num_chunks):
    monkeypatch.setattr(cross_entropy, "MOST_TOKENS", -(-NUM_TOKENS // num_chunks))
    assert num_chunks == 1 or chunks_of(NUM_TOKENS, VOCAB_SIZE) == (
        num_chunks,
        NUM_TOKENS // num_chunks + 1,
    )  # the last is padded
    x, kernel, bias, targets = stream(), _kernel(), normal(VOCAB_SIZE, seed=6), tokens_and_targets()["targets"]
    before = KernelSums(normal(*kernel.shape, seed=7), normal(VOCAB_SIZE, seed=8))
    vocabulary = Vocabulary(kernel, ONE_DEVICE, bias)
    found = jax.jit(cross_entropy_backward)(x, targets, vocabulary, scale=WEIGHT, sums=before)

    def plain(x, kernel, bias):
        return textbook.loss_of_logits(x @ kernel.T + bias, targets)

    loss, gradients = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(x, kernel, bias)
    dx, d_kernel, d_bias = (WEIGHT * gradient for gradient in gradients)
    assert_near(found, (loss, dx, KernelSums(before.kernel + d_kernel, before.bias + d_bias)))


def test_statistics_in_one_pass_are_as_exact_as_in_two():
    """Of 5,000 logits that rise, so that the largest changes with each one, beside those in float64."""
    logits = np.sort(normal(8, 5000, seed=9) * 30, axis=1).astype(np.float32)
    chosen = np.where(np.arange(5000) == 17, logits, 0)
    exact = (
        logits.astype(np.float64).max(axis=1),
        np.exp(logits - logits.max(axis=1).astype(np.float64)[:, None]).sum(1),
    )
    for ours in (cross_entropy._in_one_pass, cross_entropy._in_two_passes):
        largest, total, of_target, _ = jax.jit(ours)(logits, chosen)
        np.testing.assert_array_equal(largest, exact[0])
        np.testing.assert_allclose(total, exact[1], rtol=1e-6)
        np.testing.assert_array_equal(of_target, logits[:, 17])


_KERNELS = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import absent_gpus
from jaxpipe.compile.hlo import computations
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.cross_entropy import KernelSums, Vocabulary, cross_entropy_backward

mesh = Mesh(np.array(absent_gpus(parse_topology("h100-80g:1x1"))), ("x",))
like = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
head = lambda sums, x, kernel, targets: cross_entropy_backward(
    x, targets, Vocabulary(kernel, TensorAxis()), scale=1.0, sums=KernelSums(sums, None)
)
on_device = jax.shard_map(head, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
words, hidden, tokens = 32000, 512, 1024
arrays = [((words, hidden), "float32"), ((1, tokens, hidden), "bfloat16"), ((words, hidden), "bfloat16")]
arguments = [like(*array) for array in arrays] + [like((1, tokens), "int32")]
text = jax.jit(on_device, donate_argnums=0).lower(*arguments).compile().as_text()
of_name, _ = computations(text)
kernels = {}
for computation in of_name.values():
    shapes = {i.name: i.shape for i in computation.instructions}
    for i in computation.instructions:
        if i.opcode == "fusion" and "dynamic_slice" not in i.name:
            read = [shapes.get(name, "") for name in re.findall(r"%([\\w.-]+)", i.rest)]
            kernels[i.name] = [shape for shape in (i.shape, *read) if f"[{tokens},{words}]" in shape]
# Of the calls of cuBLAS that write the kernel's gradient, and of what else writes it: (opcode, whether it adds).
written = [
    (i.opcode, '"beta":1' in i.rest)
    for computation in of_name.values()
    for i in computation.instructions
    if f"f32[{words},{hidden}]" in i.shape
    and i.opcode not in ("parameter", "tuple", "get-tuple-element", "bitcast", "while")
]
print(json.dumps({"logits": [shapes for shapes in kernels.values() if shapes], "sums": written}))
"""


@pytest.fixture(scope="module")
def on_a_gpu():
    return printed(_KERNELS)


@pytest.mark.ci
def test_gpus_read_logits_twice(on_a_gpu):
    """For the statistics of all, and for the gradients of each."""
    statistics, gradients = sorted(on_a_gpu["logits"], key=len)
    assert statistics == ["f32[1024,32000]"]
    assert gradients == ["bf16[1024,32000]", "f32[1024,32000]"]


@pytest.mark.ci
def test_gpus_add_the_kernels_gradient_within_its_product(on_a_gpu):
    assert on_a_gpu["sums"] == [["custom-call", True]]
