"""Sums and gathers over mesh axes are those of NumPy, and TensorAxis' two are each other's transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jaxpipe import mesh
from jaxpipe.mesh import AXES, TensorAxis, make_mesh
from jaxpipe.mesh.collectives import gather_over, scatter_sum_over, sum_over

SHAPE = tuple({"data": 2, "pipe": 2, "tensor": 2}.get(axis, 1) for axis in AXES)
EVERY_DEVICE = P(*AXES)
# One array of 8 x 4 for each device; whole numbers, so that every order of adding gives the same.
TERMS = np.random.default_rng(0).integers(-100, 100, (*SHAPE, 8, 4)).astype(np.float32)
SUBSETS = [("data",), ("pipe",), ("tensor",), ("data", "pipe"), ("data", "tensor"), AXES]


def on_devices(function, terms, *, devices=None):
    """`function` of each device's array, for every device of a 2 x 2 x 2 mesh."""

    def own(x):
        return function(x.reshape(x.shape[len(AXES) :]))[(None,) * len(AXES)]

    mesh = make_mesh(data=2, pipe=2, tensor=2, devices=devices)
    mapped = jax.shard_map(own, mesh=mesh, in_specs=EVERY_DEVICE, out_specs=EVERY_DEVICE, check_vma=False)
    return np.asarray(jax.jit(mapped)(terms))


def numbers_of(axes):
    return tuple(map(AXES.index, axes))


def parts_along(axes, whole, dim):
    """For every device, its part of `whole`, counted along `axes` with the last one fastest."""
    sizes = [SHAPE[axis] for axis in numbers_of(axes)]
    for device in np.ndindex(SHAPE):
        index = np.ravel_multi_index([device[axis] for axis in numbers_of(axes)], sizes)
        yield device, np.split(whole(device), np.prod(sizes), axis=dim)[index]


def total(axes):
    return np.broadcast_to(TERMS.sum(numbers_of(axes), keepdims=True), TERMS.shape)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("axes", SUBSETS, ids="-".join)
def test_sum_over(axes, deterministic):
    found = on_devices(lambda x: sum_over(x, axes, deterministic=deterministic), TERMS)
    np.testing.assert_array_equal(found, total(axes))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("axes", SUBSETS, ids="-".join)
def test_scatter_sum_over(axes, deterministic):
    found = on_devices(lambda x: scatter_sum_over(x, axes, 0, deterministic=deterministic), TERMS)
    for device, part in parts_along(axes, total(axes).__getitem__, 0):
        np.testing.assert_array_equal(found[device], part)


@pytest.mark.parametrize("axes", SUBSETS, ids="-".join)
def test_gather_over_puts_together_what_scatter_sum_over_has_split(axes):
    found = on_devices(lambda x: gather_over(scatter_sum_over(x, axes, 0), axes, 0), TERMS)
    np.testing.assert_array_equal(found, total(axes))


def operands_of_shard_map(jaxpr):
    """The shapes of the arguments of every shard_map in a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            yield from (variable.aval.shape for variable in equation.invars)
        for inner in jaxprs_in_params(equation.params):
            yield from operands_of_shard_map(inner)


def test_arrays_without_elements_are_made_on_the_devices_and_not_passed_to_them():
    """Passed, they crash the compiler of jax 0.11.2."""
    empty = {"split": np.zeros((2, 0), np.int32), "whole": np.zeros((0, 3), np.float32)}

    def own(x, empty, nothing):
        shapes = jnp.array([*empty["split"].shape, *empty["whole"].shape])
        return x + empty["whole"].sum(), {"shapes": shapes, "types": [empty["split"], empty["whole"]]}, nothing

    mapped = mesh.on_devices(
        own,
        mesh=make_mesh(pipe=2),
        in_specs=(P("pipe"), {"split": P("pipe"), "whole": P()}, P()),
        out_specs=(P("pipe"), P(), P()),
    )
    x = np.arange(4.0, dtype=np.float32)
    assert set(operands_of_shard_map(jax.make_jaxpr(mapped)(x, empty, None).jaxpr)) == {x.shape}
    found, told, nothing = jax.jit(mapped)(x, empty, None)
    np.testing.assert_array_equal(found, x)
    assert (told["shapes"].tolist(), nothing) == ([1, 0, 0, 3], None)
    assert [leaf.dtype for leaf in told["types"]] == [np.int32, np.float32]


def test_no_axes_sum_nothing():
    x = jnp.ones(3)
    assert sum_over(x, ()) is x


def test_deterministic_sums_have_the_same_digits_however_devices_are_wired():
    terms = np.random.default_rng(1).normal(size=TERMS.shape).astype(np.float32) * 10.0 ** np.arange(4)
    devices = jax.devices()[:8]
    for function in (
        lambda x: sum_over(x, AXES, deterministic=True),
        lambda x: scatter_sum_over(x, AXES, 0, deterministic=True),
    ):
        found, other = (on_devices(function, terms, devices=order) for order in (devices, devices[::-1]))
        np.testing.assert_array_equal(found, other)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_axis_gathers_and_sums_and_each_is_the_transpose_of_the_other(dim, deterministic):
    tensor = TensorAxis(2, deterministic)

    def pull_back(function, cotangent):
        return lambda x: jax.vjp(function, x)[1](cotangent(x))[0]

    def gather(x):
        return tensor.gather(x, dim)

    def scatter_sum(x):
        return tensor.scatter_sum(x, dim)

    np.testing.assert_array_equal(
        on_devices(gather, TERMS), on_devices(lambda x: gather_over(x, ("tensor",), dim), TERMS)
    )
    np.testing.assert_array_equal(
        on_devices(scatter_sum, TERMS), on_devices(lambda x: scatter_sum_over(x, ("tensor",), dim), TERMS)
    )
    of_gather = on_devices(pull_back(gather, lambda x: jnp.concatenate([x, 2 * x], dim)), TERMS)
    np.testing.assert_array_equal(of_gather, on_devices(lambda x: scatter_sum(jnp.concatenate([x, 2 * x], dim)), TERMS))
    of_sum = on_devices(pull_back(scatter_sum, lambda x: lax.slice_in_dim(x, 0, x.shape[dim] // 2, axis=dim)), TERMS)
    half = on_devices(lambda x: gather(lax.slice_in_dim(x, 0, x.shape[dim] // 2, axis=dim)), TERMS)
    np.testing.assert_array_equal(of_sum, half)


def test_a_tensor_axis_sums_and_finds_the_largest():
    tensor = TensorAxis(2)
    np.testing.assert_array_equal(on_devices(tensor.sum, TERMS), total(("tensor",)))
    largest = np.broadcast_to(TERMS.max(AXES.index("tensor"), keepdims=True), TERMS.shape)
    np.testing.assert_array_equal(on_devices(tensor.max, TERMS), largest)
    index = on_devices(lambda x: jnp.float32(tensor.index()) + 0 * x, TERMS)
    np.testing.assert_array_equal(index[..., 0, 0], np.broadcast_to([0, 1], SHAPE))


def test_a_tensor_axis_of_one_device_needs_no_mesh():
    tensor, x = TensorAxis(), jnp.ones((2, 2))
    assert tensor.index() == 0
    assert all(y is x for y in (tensor.gather(x, 0), tensor.scatter_sum(x, 0), tensor.sum(x), tensor.max(x)))
