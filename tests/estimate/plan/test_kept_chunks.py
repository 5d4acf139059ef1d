"""What plans keep of shared weights and gradients: as many chunks as have room, if a step is shorter with them."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config.base import RunConfig
from jaxpipe.config.command_line import read_config_file
from jaxpipe.estimate import Roofline, estimate, memory, setting_of
from jaxpipe.estimate.costs import costs_of
from jaxpipe.estimate.memory import fits
from jaxpipe.estimate.parameters import num_kept_of, num_kept_sums_of
from jaxpipe.estimate.plan.bounds import least_s
from jaxpipe.estimate.plan.config_file import config_of
from jaxpipe.estimate.plan.ranking import MEMORY_MARGIN, search
from jaxpipe.estimate.plan.sharing import keeping, keeping_fewer
from jaxpipe.estimate.plan.space import space_of
from jaxpipe.estimate.step_collectives import action_times, step_collectives
from jaxpipe.sharding import Shard

TOPOLOGY = parse_topology("h100-80g:4x1")  # slow links, so that gathers and sums of every microbatch do not hide
SOURCE = Roofline.of(TOPOLOGY.hardware)


@pytest.fixture(scope="module")
def config():
    """LLaMA-3 8B with more layers: whole copies and sums of a device do not fit, some do."""
    config = read_config_file(str(Path(__file__).parents[3] / "configs" / "llama3_8b.py"))
    config.model.num_layers = 44
    config.data.update(batch_size=32, seq_len=4096)
    return RunConfig.of(config)


@pytest.fixture(scope="module")
def best(config):
    """The fastest row of pipelines of two devices."""
    space = space_of(config, TOPOLOGY)
    sizes = 2, 16, "none"
    groups = tuple(g for g in space.groups if (g.pipe, g.num_microbatches, g.model.recompute) == sizes)
    return search(replace(space, groups=groups), SOURCE, top=1).rows[0]


def with_costs(setting):
    return replace(setting, costs=costs_of(action_times(setting, SOURCE)))


@pytest.mark.ci
def test_a_plan_keeps_chunks_where_there_is_room(config, best):
    kept = best.setting
    assert (num_kept_of(kept), num_kept_sums_of(kept)) == (3, 1)
    # The room is that of a few layers that are computed again; with less kept, or without these, a step is longer.
    assert sum(kept.recomputed.counts) == 3
    assert not fits(replace(kept, recomputed=None), margin=MEMORY_MARGIN)
    nothing = with_costs(replace(kept, keep_bytes=0, keep_sums_bytes=0))
    assert best.step_s < 0.99 * estimate(nothing, SOURCE).step_s
    # One chunk more of either has no room, and its config is of the same step.
    for field in ("keep_bytes", "keep_sums_bytes"):
        more = with_costs(replace(kept, **{field: 2 * getattr(kept, field)}))
        assert not fits(more, margin=MEMORY_MARGIN)
    assert setting_of(config_of(config, kept), TOPOLOGY) == kept


@pytest.mark.ci
def test_bounds_of_kept_chunks_hold_and_fewer_are_tried_where_many_do_not_fit(best):
    plain = replace(best.setting, keep_bytes=0, keep_sums_bytes=0)
    roomy = replace(plain, topology=parse_topology("b200:4x1"))
    held = memory(roomy)
    choices = list(keeping(roomy, held, margin=MEMORY_MARGIN))
    assert choices
    for choice in choices:
        times = action_times(choice, SOURCE)
        bound_s = least_s(choice, times, step_collectives(choice, SOURCE, times, reads_rows=False))
        assert bound_s <= estimate(with_costs(choice), SOURCE).step_s * (1 + 1e-9)
        unshared = replace(plain, shard=Shard.NONE)
        assert least_s(unshared, action_times(unshared, SOURCE)) <= bound_s
    numbers = {(num_kept_of(choice), num_kept_sums_of(choice)) for choice in choices}
    assert len(numbers) == len(choices)
    most = replace(choices[0], topology=TOPOLOGY)
    for fewer in keeping_fewer(most, memory(most), margin=MEMORY_MARGIN):
        assert fits(fewer, margin=MEMORY_MARGIN)
        assert (num_kept_of(fewer) < num_kept_of(most)) != (num_kept_sums_of(fewer) < num_kept_sums_of(most))


@pytest.mark.slow
def test_what_a_plan_keeps_takes_the_bytes_that_it_says(config, best):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")
    from jaxpipe.compile import absent_gpus, compile_step  # here, since it fixes XLA's flags

    step = compile_step(config_of(config, best.setting), absent_gpus(TOPOLOGY), gpus_per_node=1)
    memory = step.compiled.memory_analysis()  # alone: to read what overlaps takes longer than to compile
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes
    assert best.held.total == pytest.approx(sum(sizes) - memory.alias_size_in_bytes, rel=0.05)
