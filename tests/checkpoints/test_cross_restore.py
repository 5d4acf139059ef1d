"""A state that was saved under one schedule, mesh and partition is the same state under all others."""

import jax
import numpy as np
import pytest
from tiny_states import FORMS, NUM_LAYERS, assert_equal, like_of, make_pipeline, names_of, numbers, staged

from jaxpipe.checkpoints import Checkpoints, Keep
from jaxpipe.checkpoints.arrays import read_array, shapes
from jaxpipe.checkpoints.state import StateForm
from jaxpipe.program.staged_params import Canonical

STEP = 7


@pytest.mark.parametrize(
    "forms", [["1f1b", "bitpipe, tensor"], pytest.param(list(FORMS), id="all", marks=pytest.mark.slow)], ids=str
)
def test_a_state_goes_from_form_to_form_and_comes_back_bit_for_bit(tmp_path, forms):
    expected = numbers()
    pipelines = [make_pipeline(**FORMS[form]) for form in forms]
    pipelines.append(pipelines[0])
    state = staged(expected, pipelines[0], count=STEP)
    for i, pipeline in enumerate(pipelines):
        folder = tmp_path / str(i)
        with Checkpoints(folder, pipeline=pipeline, keep=Keep()) as saved:
            saved.save(STEP, state, config={})
        assert shapes(folder / str(STEP)).keys() == names_of(state) > expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(read_array(folder / str(STEP), name), array, err_msg=f"form {i}: {name}")
        following = pipelines[(i + 1) % len(pipelines)]
        with Checkpoints(folder, pipeline=following, keep=Keep(), read_only=True) as saved:
            step, state = saved.restore(like_of(following))
        assert step == STEP
        assert_equal(state, staged(expected, following, count=STEP))


@pytest.mark.parametrize("form", FORMS)
def test_no_device_holds_more_of_the_canonical_form_than_of_the_staged(form):
    pipeline = make_pipeline(**FORMS[form])
    like = like_of(pipeline).params
    canonical, num_devices = Canonical(pipeline.layout, pipeline.mesh), pipeline.mesh.shape["pipe"]
    parts = jax.tree.leaves(pipeline.parts(like))
    num_divided = 0
    for leaf, part in zip(jax.tree.leaves(like), parts, strict=True):
        sharding, shape = canonical.sharding(part), canonical.shape(part, leaf.shape)
        held, whole = np.prod(sharding.shard_shape(shape)), np.prod(shape)
        if not part.stacked:
            assert sharding == leaf.sharding
        elif any(size % num_devices == 0 for size in part.master_shape):
            num_divided += 1
            assert held * num_devices == np.prod((NUM_LAYERS, *part.master_shape))
        assert held <= whole
    text = str(jax.make_jaxpr(lambda leaves: canonical.from_stages(leaves, parts))(jax.tree.leaves(like)))
    assert text.count("all_to_all[") == num_divided
    assert text.count("all_gather[") == sum(part.stacked for part in parts) - num_divided
    assert num_divided >= 8  # kernels and biases of attention and feed-forward


def test_leaves_are_copied_in_groups_of_a_bounded_size(monkeypatch):
    pipeline = make_pipeline(**FORMS["bpipe, data"])
    monkeypatch.setattr("jaxpipe.checkpoints.state.GROUP_BYTES", 2048)
    like = like_of(pipeline)
    form = StateForm(like, like.params, pipeline)
    sizes = [[leaf.num_bytes for leaf in group] for group in form.groups]
    assert len(sizes) > 6
    assert all(sum(group) <= 2048 or len(group) == 1 for group in sizes)
    state = staged(numbers(), pipeline, count=1)
    arrays = form.to_arrays(state)
    np.testing.assert_array_equal(
        arrays["params.layers.attention.norm.scale"], numbers()["params.layers.attention.norm.scale"]
    )
    assert_equal(form.to_state(lambda names: {name: arrays[name] for name in names}), state)


def test_a_dim_that_no_device_can_share_is_gathered():
    """hidden=16 on 3 devices: no norm divides, a kernel of 48 columns does."""
    pipeline = make_pipeline(pipe=3)
    state = staged(numbers(), pipeline, count=1)
    form = StateForm(state, state.params, pipeline)
    arrays = form.to_arrays(state)
    for name, array in numbers().items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    assert arrays["params.layers.attention.norm.scale"].sharding.is_fully_replicated
    assert not arrays["params.layers.attention.query_key_value.kernel"].sharding.is_fully_replicated
    assert_equal(form.to_state(lambda names: {name: arrays[name] for name in names}), state)
