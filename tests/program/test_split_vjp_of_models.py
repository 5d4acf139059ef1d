"""I and W of our models' backward: exact, each product once, and no more bytes than the zero-bubble paper counts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import num_products, num_runs
from split_functions import ONCE, SplitFunctions, split_functions
from tiers import tiers
from tiny_models import MICROBATCH_SIZE, SEQ_LEN, config_of, random_batch, random_params

from jaxpipe.mesh import Randomness, TensorAxis, make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.program.vjp import LayerVjp, trace_vjp

FORMS = [("none", "xla"), ("none", "chunked"), ("attention", "xla"), ("full", "xla"), ("full", "chunked")]
CASES = [(family, *form) for family in ("gpt", "llama", "bert") for form in FORMS]
QUICK = [("gpt", "none", "xla")]
MORE = [("llama", "full", "chunked")]
NUM_KERNELS = {"gpt": 4, "llama": 5, "bert": 4}
HIDDEN, FEED_FORWARD = 16, 24  # the latter of a LLaMA; four times the former of the others
RANDOM = Randomness(jnp.array([3, 7], jnp.uint32), jnp.int32(0))

REST = [case for case in CASES if case not in (*QUICK, *MORE)]

some_models = pytest.mark.parametrize("case", tiers(QUICK, ci=MORE, slow=REST), ids="-".join)
compiled_models = pytest.mark.parametrize("case", tiers([], ci=[*QUICK, *MORE], slow=REST), ids="-".join)


class Layer:
    """A layer of a model over `num_devices` of `tensor`, with numbers for its arguments."""

    def __init__(self, case: tuple[str, str, str], *, dtype: str = "float32", num_devices: int = 1):
        family, recompute, attention = case
        dropout = 0.0 if family == "llama" else 0.3
        config = config_of(family, num_layers=1, dropout=dropout, recompute=recompute, attention=attention)
        self.model, self.num_devices = LanguageModel(config, TensorAxis(num_devices)), num_devices
        self.params = jax.tree.map(lambda leaf: jnp.asarray(leaf[0], dtype), random_params(config)["layers"])
        x_and_dy = np.random.default_rng(1).standard_normal((2, MICROBATCH_SIZE, SEQ_LEN, HIDDEN))
        self.x, self.dy = jnp.asarray(x_and_dy, dtype)
        microbatch = jax.tree.map(lambda leaf: leaf[0], random_batch(1, seed=0, family=family))
        self.given = microbatch, RANDOM if dropout else None

    def vjp(self, params: Any, x: Any) -> LayerVjp:
        """Of arguments on one device."""
        return trace_vjp(self.model.layer, params, x, *self.given)

    def on_devices(self, function: Callable, out_specs: Any) -> Callable:
        """`function(params, x, dy)`, each device with its part of the parameters and of the sequence."""
        pieces = P(None, "tensor")
        return jax.shard_map(
            function,
            mesh=make_mesh(tensor=self.num_devices),
            in_specs=(self.model.specs["layers"], pieces, pieces),
            out_specs=out_specs,
            check_vma=False,
        )


@functools.cache
def layer_and_split(case: tuple[str, str, str], dtype: str = "float32") -> tuple[Layer, list[Any], SplitFunctions]:
    """A layer on one device, its residuals, and its I and W; shapes alone."""
    layer = Layer(case, dtype=dtype)
    vjp = layer.vjp(layer.params, layer.x)
    return layer, list(vjp.residuals), split_functions(vjp)


def read_by_weights(kept: Sequence[Any], parts: SplitFunctions) -> list[Any]:
    """All that W is given: residuals, and what I has deferred."""
    return [*(kept[i] for i in parts.split.shared_with_w), *parts.split.deferred]


def num_numbers(family: str, num_devices: int = 1) -> int:
    """Of the inputs of the products with kernels, and of the gradients of their outputs, on one device.

    Inputs: of queries, keys and values, of attention's output, of the first products of the feed forward (`hidden`
    each), and of its last. Gradients: of queries, keys and values, of attention's output, of the first products, and
    of the last. For GPT and BERT 7 + 9 times batch x sequence x hidden: 32 bytes of them in 16 bits, as in the paper.

    Source: M_W of Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.2.
    """
    if family == "llama":
        inputs, gradients = 3 * HIDDEN + FEED_FORWARD, 2 * HIDDEN + HIDDEN + 2 * FEED_FORWARD + HIDDEN
    else:
        inputs, gradients = 7 * HIDDEN, 9 * HIDDEN
    return MICROBATCH_SIZE * SEQ_LEN * (inputs + gradients) // num_devices


def num_products_of(family: str, recompute: str, attention: str) -> int:
    """Matrix products of a layer's whole backward.

    Two for each of forward's: with the kernels, of queries with keys, and of probabilities with values. Recomputed are
    the scores; with the whole layer also all of forward but the last product, whose output nothing needs.
    """
    forward = NUM_KERNELS[family] + 2
    recomputed = (recompute == "attention" or attention == "chunked") + (recompute == "full") * (forward - 1)
    return 2 * forward + recomputed


@some_models
def test_each_product_is_computed_once_and_nothing_drawn_anew(case):
    layer, kept, parts = layer_and_split(case)
    whole = num_runs(parts.whole, layer.params, kept, layer.dy, *layer.given)
    now = num_runs(parts.input_gradient, layer.params, kept, layer.dy, *layer.given)
    later = num_runs(parts.weight_gradient, layer.params, kept, list(parts.split.deferred), *layer.given)
    assert num_products(later) == NUM_KERNELS[case[0]]
    assert num_products(whole) == num_products(now) + num_products(later) == num_products_of(*case)
    assert not ONCE & set(later)


@some_models
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_w_is_given_inputs_and_gradients_of_products(case, dtype):
    layer, kept, parts = layer_and_split(case, dtype)
    given = read_by_weights(kept, parts)
    assert {like.dtype for like in given} == {layer.x.dtype}
    assert sum(like.size for like in given) <= num_numbers(case[0])


@some_models
def test_gradients_of_kernels_alone_are_deferred(case):
    layer, _, parts = layer_and_split(case)
    is_kernel = [path[-1].key == "kernel" for path, _ in jax.tree_util.tree_leaves_with_path(layer.params)]
    assert parts.is_early == [not is_late for is_late in is_kernel]


@compiled_models
def test_gradients_are_those_of_the_whole_backward(case):
    layer, _, parts = layer_and_split(case)
    _, kept = jax.jit(layer.vjp(layer.params, layer.x).forward)(layer.params, layer.x, *layer.given)
    arguments = layer.params, kept, layer.dy, *layer.given
    whole, both = (jax.jit(f)(*arguments) for f in (parts.whole, parts.both))
    jax.tree.map(np.testing.assert_array_equal, both, whole)


@compiled_models
def test_over_tensor_they_are_so_and_keep_no_more_than_their_part(case):
    layer = Layer(case, num_devices=2)
    of_weights, runs = [], []

    def gradients(params: Any, x: jax.Array, dy: jax.Array, *, is_split: bool) -> Any:
        vjp = layer.vjp(params, x)
        _, kept = vjp.forward(params, x, *layer.given)
        parts = split_functions(vjp)
        of_weights[:] = read_by_weights(kept, parts)
        return (parts.both if is_split else parts.whole)(params, kept, dy, *layer.given)

    found = []
    for is_split in (True, False):
        out_specs = jax.tree.map(lambda _: P("tensor"), layer.params), P("tensor")
        function = layer.on_devices(functools.partial(gradients, is_split=is_split), out_specs)
        arguments = layer.params, layer.x, layer.dy
        runs.append(num_runs(function, *arguments))
        found.append(jax.jit(function)(*arguments))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert sum(like.size for like in of_weights) <= num_numbers(case[0], num_devices=2)
    is_split, whole = runs
    assert num_products(is_split) == num_products(whole)
    for collective in ("reduce_scatter", "psum", "psum_invariant"):
        assert is_split[collective] == whole[collective]
    assert whole["reduce_scatter"] > 0
    # I and W both gather the gradients of the two products back to the stream: what is deferred is a device's piece.
    assert is_split["all_gather"] == whole["all_gather"] + 2
