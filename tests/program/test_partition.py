"""Which dims of a parameter are split over which axes, what does not fit, and how much of the state a device holds."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_params
from tiny_training import ADAMW

from jaxpipe.errors import CompileError
from jaxpipe.mesh import key_of, make_mesh
from jaxpipe.program.partition import Part, partition
from jaxpipe.schedules import build
from jaxpipe.sharding import Shard
from jaxpipe.training.step import init_state

MESH: Any = {"data": 2, "pipe": 2, "tensor": 2}
DEVICE_CHUNK_LAYER = (2, 1, 3)


def part_of(shape: tuple[int, ...], spec: P, *, stacked: bool, shard: Shard = Shard.OPTIMIZER, **mesh: Any) -> Part:
    """The Part of one parameter of this shape, beside one of the other kind that nothing splits."""
    leaf = jax.ShapeDtypeStruct((*DEVICE_CHUNK_LAYER, *shape) if stacked else shape, np.float32)
    other = jax.ShapeDtypeStruct(() if stacked else DEVICE_CHUNK_LAYER, np.float32)
    one, two = ("layers", "shared") if stacked else ("shared", "layers")
    params, specs = {one: {"leaf": leaf}, two: {"other": other}}, {one: {"leaf": spec}, two: {"other": P()}}
    return partition(params, specs, make_mesh(**(mesh or MESH)), shard=shard)[one]["leaf"]


# One layer's shape, its spec over tensor; on 2 x 2 x 2 devices: the staged master's spec, the compute copy's shape.
LAYERS = {
    "both in one dim": ((8, 6), P("tensor"), P("pipe", None, None, ("tensor", "data"), None), (4, 6)),
    "each in its own": ((8, 6), P(None, "tensor"), P("pipe", None, None, "data", "tensor"), (8, 3)),
    "a bias in both": ((12,), P("tensor"), P("pipe", None, None, ("tensor", "data")), (6,)),
    "not over tensor": ((8, 6), P(), P("pipe", None, None, "data", None), (8, 6)),
    "the first that divides": ((3, 6), P(), P("pipe", None, None, None, "data"), (3, 6)),
    "what tensor leaves does not divide": ((6, 3), P("tensor"), P("pipe", None, None, "tensor", None), (3, 3)),
    "nothing divides": ((3, 5), P(), P("pipe", None, None, None, None), (3, 5)),
    "a number": ((), P(), P("pipe", None, None), ()),
}
SHARED = {
    "both in one dim": ((8, 6), P("tensor"), P(("tensor", "data", "pipe"), None), (4, 6)),
    "each in its own": ((8, 6), P(None, "tensor"), P(("data", "pipe"), "tensor"), (8, 3)),
    "only data would divide": ((6, 6), P(), P(None, None), (6, 6)),
    "a number": ((), P(), P(), ()),
}


@pytest.mark.parametrize(
    ("stacked", "case"),
    [(True, case) for case in LAYERS.values()] + [(False, case) for case in SHARED.values()],
    ids=[f"layer: {what}" for what in LAYERS] + [f"shared: {what}" for what in SHARED],
)
def test_masters_are_split_along_the_first_dim_that_divides(stacked, case):
    shape, spec, master, compute_shape = case
    part = part_of(shape, spec, stacked=stacked)
    assert part.spec() == master
    assert part.compute_shape == compute_shape
    over_tensor = "tensor" in tuple(spec)
    # Every device adds terms to what it shares with others: along data, along pipe if shared, along tensor if whole.
    assert part.copy_axes == (("data",) if stacked else ("data", "pipe"))
    assert part.partial_axes == (() if over_tensor else ("tensor",))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("spec", [P(), P("tensor"), P(None, "tensor")])
def test_compute_copies_and_whole_masters_are_split_over_tensor_alone(stacked, spec):
    first = ("pipe", None, None) if stacked else ()
    expected = P(*first, *spec, *(None,) * (2 - len(spec)))
    part = part_of((8, 8), spec, stacked=stacked)
    whole = part_of((8, 8), spec, stacked=stacked, shard=Shard.NONE)
    assert part.spec(master=False) == whole.spec() == whole.spec(master=False) == expected
    assert whole.master_dim is None
    assert (whole.copy_axes, whole.partial_axes) == (part.copy_axes, part.partial_axes)


def test_split_axes_are_those_whose_devices_hold_other_parts():
    assert part_of((8, 8), P("tensor"), stacked=True).split_axes == ("pipe", "tensor", "data")
    assert part_of((8, 8), P(), stacked=True, shard=Shard.NONE).split_axes == ("pipe",)
    assert part_of((8, 8), P("tensor"), stacked=False).split_axes == ("tensor", "data", "pipe")
    assert part_of((3, 3), P(), stacked=False).split_axes == ()


def test_experts_are_copied_along_data_alone():
    mesh = {"data": 2, "pipe": 1, "expert": 2, "tensor": 2}
    experts = part_of((4, 6, 8), P("expert", None, "tensor"), stacked=True, **mesh)
    assert (experts.compute_shape, experts.copy_axes, experts.partial_axes) == ((2, 6, 4), ("data",), ())
    assert experts.spec() == P("pipe", None, None, ("expert", "data"), None, "tensor")
    dense = part_of((4, 6), P(), stacked=True, **mesh)
    assert (dense.compute_shape, dense.copy_axes, dense.partial_axes) == ((4, 6), ("data", "expert"), ("tensor",))
    with pytest.raises(CompileError, match=r"(?s)\n  rule expert-divides: .*\n      3 = 2 x 1 \+ 1\n  repair: "):
        part_of((3, 6), P("expert"), stacked=True, **mesh)


def test_axes_of_one_device_split_and_sum_nothing():
    part = part_of((8, 8), P("tensor"), stacked=True, data=1, pipe=2, tensor=1)
    assert (part.split_dims, part.master_dim, part.copy_axes, part.partial_axes) == ((), None, (), ())
    assert not part.is_summed
    assert part.spec() == P("pipe", None, None, None, None)
    assert part_of((8, 8), P(), stacked=False, pipe=2).copy_axes == ("pipe",)
    assert part_of((8, 8), P(), stacked=True, tensor=2).is_summed
    assert not part_of((8, 8), P("tensor"), stacked=True, tensor=2).is_summed


def test_without_specs_nothing_is_split_over_tensor():
    params = {"shared": {}, "layers": {"leaf": jax.ShapeDtypeStruct((*DEVICE_CHUNK_LAYER, 8), np.float32)}}
    parts = partition(params, None, make_mesh(data=2, pipe=2), shard=Shard.OPTIMIZER)
    assert parts["layers"]["leaf"].spec() == P("pipe", None, None, "data")


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((8, 8), P("data")), ((8, 8), P("tensor", "tensor")), ((8, 8), P(("tensor", "data"))), ((8,), P(None, "tensor"))],
    ids=["another axis", "two dims", "two axes in a dim", "more dims than there are"],
)
@pytest.mark.parametrize("stacked", [True, False])
def test_specs_of_another_form_are_refused(shape, spec, stacked):
    with pytest.raises(CompileError, match=r"(?s)params\['\w+'\]\['leaf'\] .*\n  rule split-spec: .*\n  repair: "):
        part_of(shape, spec, stacked=stacked)


def test_a_dim_that_does_not_divide_over_tensor_is_refused():
    with pytest.raises(CompileError, match=r"(?s)\n  rule tensor-divides: .*\n      7 = 2 x 3 \+ 1\n  repair: "):
        part_of((8, 7), P(None, "tensor"), stacked=True)


@pytest.mark.parametrize(
    "specs",
    [
        {"shared": {}, "layers": {}},
        {"shared": {}, "layers": {"other": P()}},
        {"shared": {"leaf": P()}, "layers": {"leaf": P()}},
    ],
    ids=["fewer", "another name", "more"],
)
def test_specs_of_other_parameters_are_refused(specs):
    params = {"shared": {}, "layers": {"leaf": jax.ShapeDtypeStruct((*DEVICE_CHUNK_LAYER, 8), np.float32)}}
    with pytest.raises(CompileError, match=r"(?s)\n  rule specs: .*\n  repair: "):
        partition(params, specs, make_mesh(**MESH), shard=Shard.OPTIMIZER)


@pytest.mark.parametrize("family", tiers(["gpt"], ci=["llama"]))
@pytest.mark.parametrize("shard", ["optimizer", "none"])
def test_devices_hold_their_part_of_parameters_and_moments(family, shard):
    config = config_of(family, num_layers=4)
    schedule = build("1f1b", num_devices=2, num_microbatches=2)
    pipeline = pipeline_of(schedule, config, data=2, tensor=2, shard=shard)
    model: Any = SimpleNamespace(init=lambda _: random_params(config))
    state = init_state(model, pipeline, ADAMW, seed=0)
    for tree in (state.params, state.optimizer[0].mu, state.optimizer[0].nu):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path)
            num_parts = 2 if splits_over_tensor(name) else 1
            if name.startswith("['layers']"):
                num_parts *= 2  # pipe
                num_parts *= 2 if shard == "optimizer" else 1  # data
            else:
                num_parts *= 4 if shard == "optimizer" else 1  # data x pipe
            assert {shard.data.size * num_parts for shard in leaf.addressable_shards} == {leaf.size}, name
            assert len({str(shard.index) for shard in leaf.addressable_shards}) == num_parts, name


@pytest.mark.ci
def test_the_first_values_do_not_depend_on_the_default_kind_of_keys():
    config, kinds = config_of("gpt", num_layers=4), []

    def init(key):
        kinds.append(jax.random.key_impl(key))
        return random_params(config)

    pipeline = pipeline_of(build("1f1b", num_devices=2, num_microbatches=2), config)
    for kind in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(kind):
            init_state(cast(Any, SimpleNamespace(init=init)), pipeline, ADAMW, seed=0)
    assert set(kinds) == {jax.random.key_impl(key_of(0))}


def splits_over_tensor(name: str) -> bool:
    """Columns of the products from the stream, rows of those back to it, words; Shoeybi et al. 2019, figure 3."""
    columns = any(word in name for word in ("query_key_value", "'up'", "gate"))
    rows = "kernel" in name and ("output" in name or "down" in name)
    words = "token" in name or "['head']['kernel']" in name
    return columns or rows or words
