"""The planner against every candidate there is: no faster one is missed, and no bound is broken."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from ml_collections import ConfigDict
from small_space import TOPOLOGY, small_config
from tiers import tiers

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import base_config
from jaxpipe.config.command_line import read_config_file
from jaxpipe.config.recompute import Recomputed
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Roofline, estimate, fits, memory, setting_of
from jaxpipe.estimate.costs import costs_of
from jaxpipe.estimate.plan import frontier as of_frontier
from jaxpipe.estimate.plan import ranking as of_search
from jaxpipe.estimate.plan import recomputed
from jaxpipe.estimate.plan.bounds import (
    least_by_few_s,
    least_bytes,
    least_s,
    pages_before_weaving,
    pages_by_method,
    pages_in_rows,
    pages_of_one_microbatch,
)
from jaxpipe.estimate.plan.config_file import config_of
from jaxpipe.estimate.plan.frontier import settings_of
from jaxpipe.estimate.plan.least_work import least_of_any_s
from jaxpipe.estimate.plan.ranking import (
    MEMORY_MARGIN,
    Plan,
    search,
    search_with_fewer,
)
from jaxpipe.estimate.plan.recomputed import counted_recomputations, least_recomputed_s
from jaxpipe.estimate.plan.sharing import MOST_EXPOSED, keeping, may_gain_by_sharing, sharing_more
from jaxpipe.estimate.plan.space import Variant, legal_placement, legal_variants, space_of, with_fewer
from jaxpipe.estimate.recompute import recomputations
from jaxpipe.estimate.step_collectives import action_times, step_collectives
from jaxpipe.schedules import REGISTRY, Schedule, build, split_backward
from jaxpipe.schedules.methods.registry import DELAYED
from jaxpipe.sharding import Shard

SOURCE = Roofline(TOPOLOGY.hardware)
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module")
def space():
    return space_of(small_config(), TOPOLOGY)


@pytest.fixture(scope="module")
def every_setting(space):
    """(group, times, variant, setting) of all candidates, in every partition and order of the mesh."""
    return [
        (group, times, variant, setting)
        for group in space.groups
        for times in (SOURCE.times(group),)
        for variant in legal_variants(group)
        for setting in settings_of(group, variant, times)
    ]


def may_gain(setting):
    times = action_times(setting, SOURCE)
    collectives = step_collectives(setting, SOURCE, times)
    return may_gain_by_sharing(setting, collectives, least_s(setting, times, collectives) * (1 - 1e-9))


@pytest.fixture(scope="module")
def best_steps(every_setting):
    """[candidate] the shortest steps of those that fit, in order, each with the least sharing that fits."""
    steps = {}
    for group, _, variant, setting in every_setting:
        if (
            not fits(setting, margin=MEMORY_MARGIN)
            and least_recomputed_s(setting, SOURCE, margin=MEMORY_MARGIN) < math.inf
        ):
            for each in counted_recomputations(setting, SOURCE, margin=MEMORY_MARGIN):
                steps[group, variant] = min(estimate(each, SOURCE).step_s, steps.get((group, variant), math.inf))
        shared = [each for each in (setting, *sharing_more(setting)) if fits(each, margin=MEMORY_MARGIN)]
        shared = shared if may_gain(setting) else shared[:1]
        kept = (kept for each in shared for kept in keeping(each, memory(each), margin=MEMORY_MARGIN))
        for each in (*shared, *kept):
            step_s = estimate(replace(each, costs=costs_of(action_times(each, SOURCE))), SOURCE).step_s
            steps[group, variant] = min(step_s, steps.get((group, variant), math.inf))
    return sorted(steps.values())


@pytest.mark.slow
def test_no_plan_is_slower_for_trying_the_split_head(space, monkeypatch):
    rows = search(space, SOURCE, top=20).rows
    monkeypatch.setattr(of_frontier, "can_split_head", lambda group, variant: False)
    without = search(space, SOURCE, top=20).rows
    assert any(row.setting.vocab_over_pipe for row in rows)
    steps, steps_without = ([row.step_s for row in each] for each in (rows, without))
    assert all(ours <= theirs for ours, theirs in zip(steps, steps_without, strict=True))
    assert sum(steps) < sum(steps_without)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_schedules_without_flush_are_planned_for_the_sizes_and_models_that_they_take(monkeypatch, tied):
    for name, method in DELAYED.items():
        monkeypatch.setitem(REGISTRY, name, method)
    config = small_config()
    config.model.tie_embeddings = tied
    space = space_of(config, TOPOLOGY)
    found = {
        (variant.name, group.num_microbatches / group.pipe)
        for group in space.groups
        for variant in legal_variants(group)
        if variant.name in DELAYED
    }
    assert {ratio for name, ratio in found if name == "wpipe"} == (set() if tied else {1.0})
    assert min(ratio for name, ratio in found if name == "pipedream_2bw") == 1.0
    best = search(space, SOURCE, top=len(space.groups) * 50)
    assert {name for name, _ in found} == {row.setting.schedule_name for row in best.rows} & set(DELAYED)


@pytest.mark.ci
def test_error_feedback_is_of_schedules_without_flush_alone(monkeypatch):
    monkeypatch.setitem(REGISTRY, "pipedream_2bw", DELAYED["pipedream_2bw"])
    config = small_config()
    config.optimizer.error_feedback = True
    for row in search(space_of(config, TOPOLOGY), SOURCE, top=2000).rows:
        has_feedback = row.setting.schedule_name in DELAYED
        planned = config_of(config, row.setting)
        assert row.setting.error_feedback == planned.optimizer.error_feedback == has_feedback
        assert memory(setting_of(planned, TOPOLOGY)).optimizer == row.held.optimizer


@pytest.mark.ci
@pytest.mark.parametrize("top", [1, 5, 40])
def test_the_rows_are_the_fastest_of_all_that_fit(space, best_steps, top):
    plan = search(space, SOURCE, top=top)
    steps = [row.step_s for row in plan.rows for _ in (row.setting, *row.equal)]
    assert steps == pytest.approx(best_steps[: len(steps)])
    assert len(plan.rows) == min(top, len({row.digits for row in plan.rows}))
    for row in plan.rows:
        assert 1.05 * row.held.total + RESERVE_BYTES <= TOPOLOGY.hardware.memory_bytes


@pytest.mark.parametrize(
    ("topology", "sizes", "batch_size", "shard"),
    [
        # Without flush, of which the fill is no part; and a head that is split, whose update is, too.
        (
            "a100-80g:3x1",
            {"num_layers": 3, "hidden": 2048, "vocab_size": 2048, "tie_embeddings": False},
            8,
            "optimizer",
        ),
        pytest.param(
            "a100-80g:2x1",
            {"num_layers": 4, "hidden": 2048, "vocab_size": 50257},
            4,
            "none",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_row_is_the_fastest_of_all_and_others_follow(monkeypatch, topology, sizes, batch_size, shard):
    for name, method in DELAYED.items():
        monkeypatch.setitem(REGISTRY, name, method)
    config, topology = base_config(), parse_topology(topology)
    config.model.update(num_heads=8, attention="chunked", dtype="bfloat16", **sizes)
    config.data.update(batch_size=batch_size, seq_len=512)
    config.mesh.shard = shard
    space, source = space_of(config, topology), Roofline(topology.hardware)
    steps = sorted(
        estimate(setting, source).step_s
        for group in space.groups
        for times in (source.times(group),)
        for variant in legal_variants(group)
        for setting in settings_of(group, variant, times)
    )
    found = [row.step_s for row in search(space, source, top=1).rows]
    assert found == pytest.approx(steps[:1])
    several = [row.step_s for row in search(space, source, top=30).rows]
    assert several[:1] == pytest.approx(found)
    assert several == sorted(several)


@pytest.mark.slow
def test_more_shared_is_hardly_faster_where_only_what_does_not_fit_shares_more(every_setting):
    faster = {True: 0.0, False: 0.0}  # whether all are tried -> the largest fraction that any gains
    for _, _, _, setting in every_setting[::3]:
        less, *more = (estimate(each, SOURCE).step_s for each in (setting, *sharing_more(setting)))
        tries_all = may_gain(setting)
        faster[tries_all] = max([faster[tries_all], *(1 - step_s / less for step_s in more)])
    assert faster[False] <= MOST_EXPOSED < faster[True]


@pytest.mark.parametrize(
    ("shard", "changes", "stronger"),
    [
        ("none", {}, ["optimizer", "gradients", "weights"]),
        ("optimizer", {}, ["gradients", "weights"]),
        ("weights", {}, []),
        ("none", {"data": 1}, ["optimizer"]),  # embedding and head over the pipeline
        ("optimizer", {"data": 1}, []),
        ("none", {"data": 1, "pipe": 1, "layers_per_stage": (8,)}, []),
        ("none", {"schedule_name": "pipedream_2bw"}, ["optimizer"]),  # without flush
    ],
)
def test_more_is_shared_where_there_is_someone_to_share_with(monkeypatch, space, shard, changes, stronger):
    monkeypatch.setitem(REGISTRY, "pipedream_2bw", DELAYED["pipedream_2bw"])
    setting = next(group for group in space.groups if (group.data, group.pipe) == (2, 2))
    setting = replace(setting, shard=Shard(shard), **changes)
    assert [more.shard for more in sharing_more(setting)] == stronger


def test_what_fits_only_with_shared_weights_is_planned(monkeypatch):
    """Masters and state take 12 bytes a parameter over all GPUs; whole sums and copies 6 more on each of them."""

    def deep(config):
        config.model.update(num_layers=18)

    space = space_of(small_config(deep), parse_topology("a100-80g:1x4"))
    space = replace(space, groups=tuple(group for group in space.groups if (group.pipe, group.tensor) == (1, 1)))
    assert [row.setting.shard for row in search(space, SOURCE, top=1).rows] == ["weights"]
    for module in (of_search, of_frontier):
        monkeypatch.setattr(module, "sharing_more", lambda setting: iter(()))
    assert search(space, SOURCE, top=1).rows == ()


def test_no_step_is_estimated_of_what_stores_too_much(monkeypatch, space):
    monkeypatch.setattr(of_search, "pages_in_rows", lambda setting: 10**9)
    monkeypatch.setattr(of_search, "estimate", lambda *each: pytest.fail("an order was searched for nothing"))
    monkeypatch.setattr(recomputed, "BY_STAGE", ())
    plan = search(space, SOURCE, top=1)
    assert (plan.rows, plan.too_large.total()) == ((), space.num_candidates)


@pytest.mark.ci
def test_where_1f1b_does_not_fit_the_first_stages_alone_compute_again(monkeypatch):
    """With layers by stage that make up for it; and no faster choice of them is missed."""
    monkeypatch.setattr(of_frontier, "legal_variants", lambda group: (Variant("1f1b", ""),))
    config = read_config_file(str(CONFIGS / "gpt3_96b.py"))
    space = space_of(config, parse_topology("a100-80g:4x8"))
    sizes = 1, 8, 4, 32  # of 4 sequences
    groups = tuple(g for g in space.groups if (g.data, g.pipe, g.tensor, g.num_microbatches) == sizes)
    assert {group.model.recompute for group in groups} == {"none", "full"}
    space = replace(space, groups=groups)
    (row,) = search(space, SOURCE, top=1).rows
    assert row.setting.recomputed
    counts = list(row.setting.recomputed.counts)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0 < counts[0]
    assert fits(row.setting, margin=MEMORY_MARGIN)
    assert config_of(config, row.setting).model.recompute == str(row.setting.recomputed)
    most_bytes = int((TOPOLOGY.hardware.memory_bytes - RESERVE_BYTES) / (1 + MEMORY_MARGIN))
    group = next(group for group in groups if group.model.recompute == "none")
    none, *_ = settings_of(group, Variant("1f1b", ""), SOURCE.times(group))
    found = [estimate(s, SOURCE).step_s for s in recomputations(none, "full", most_bytes, SOURCE)]
    assert row.step_s <= min(found)
    monkeypatch.setattr(recomputed, "BY_STAGE", ())
    (whole,) = search(space, SOURCE, top=1).rows
    assert whole.setting.model.recompute == "full"
    assert whole.step_s > 1.1 * row.step_s


@pytest.mark.parametrize(
    ("num_layers", "seq_len"),
    [
        pytest.param(8, 12288, marks=pytest.mark.slow),
        pytest.param(9, 10240, marks=pytest.mark.slow),
        pytest.param(9, 16384, marks=pytest.mark.slow),
        pytest.param(10, 9000, marks=pytest.mark.slow),
    ],
)
def test_no_list_on_any_stages_is_faster(monkeypatch, num_layers, seq_len):
    """Every list of every split of the layers, on each mesh where 1F1B fits with some layers computed again alone."""

    def change(config):
        config.model.update(num_layers=num_layers)
        config.data.update(seq_len=seq_len, batch_size=8)

    monkeypatch.setattr(of_frontier, "legal_variants", lambda group: (Variant("1f1b", ""),))
    space = space_of(small_config(change), parse_topology("a100-80g:1x4"))
    num_with_lists = 0
    for group in space.groups:
        alike = tuple(g for g in space.groups if replace(g, model=group.model) == group)
        rows = search(replace(space, groups=alike), SOURCE, top=1).rows if group.recompute == "none" else ()
        if not rows or not rows[0].setting.recomputed:
            continue
        num_with_lists += 1
        steps = (
            (estimate(setting, SOURCE).step_s, number, setting)
            for number, setting in enumerate(with_every_list(replace(rows[0].setting, recomputed=None)))
        )
        # In turn: bytes take longer to count than a step.
        best_s = next(step_s for step_s, _, setting in sorted(steps) if fits(setting, margin=MEMORY_MARGIN))
        assert rows[0].step_s == pytest.approx(best_s, rel=1e-9)
    assert num_with_lists >= 2


def with_every_list(setting):
    """`setting` with the layers split over stages in every way, and every list of each of them."""
    num_layers, num_stages = sum(setting.layers_per_stage), setting.pipe
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        split = tuple(end - begin for begin, end in pairwise((0, *cuts, num_layers)))
        for counts in product(*(range(num + 1) for num in split)):
            again = Recomputed("full", counts) if any(counts) else None
            yield replace(setting, layers_per_stage=split, recomputed=again)


def candidate_of(setting):
    sizes = setting.num_microbatches, *setting.axes.values()
    return setting.schedule_name, setting.options, setting.model.recompute, *sizes


@pytest.mark.ci
def test_all_that_fit_are_found_where_that_many_are_asked_for(space, best_steps):
    plan = search(space, SOURCE, top=10**6)
    assert sum(1 + len(row.equal) for row in plan.rows) == len(best_steps)
    assert any(row.equal for row in plan.rows)
    assert len({row.digits for row in plan.rows}) == len(plan.rows)
    assert plan.num_evaluated == space.num_candidates == len(best_steps) + plan.num_tight + plan.too_large.total()
    assert plan.too_large
    assert plan.num_tight
    without = search(space, SOURCE, top=10**6, margin=0.0)
    assert (without.num_tight, without.tight) == (0, None)
    assert sum(1 + len(row.equal) for row in without.rows) == len(best_steps) + plan.num_tight
    fitting = {candidate_of(each) for row in plan.rows for each in (row.setting, *row.equal)}
    tight = [row for row in without.rows if candidate_of(row.setting) not in fitting]
    assert plan.tight is not None
    assert plan.tight.step_s == tight[0].step_s


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(SOURCE, id="fast links"),
        pytest.param(replace(SOURCE, nvlink_fraction=1e-5), id="slow links", marks=pytest.mark.ci),
    ],
)
def test_no_step_is_shorter_than_its_bounds(every_setting, source):
    for group, _, _, setting in every_setting:
        step_s = estimate(setting, source).step_s
        bound_s = least_s(setting, source.times(setting), step_collectives(setting, source, source.times(setting)))
        assert least_of_any_s(group, source.times(group)) <= step_s * (1 + 1e-9), setting
        assert bound_s <= step_s * (1 + 1e-9), setting
        # Without collectives it is a bound of all that devices may share.
        for shared in (setting, *sharing_more(setting)):
            times = action_times(shared, source)
            of_shared_s = least_s(shared, times, step_collectives(shared, source, times))
            assert least_s(setting, source.times(setting)) <= of_shared_s * (1 + 1e-9), shared


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "v_min"])
def test_rows_of_few_microbatches_bound_the_step_of_many(name):
    config = small_config(lambda config: config.data.update(batch_size=64))
    groups = space_of(config, TOPOLOGY).groups
    group = next(group for group in groups if (group.pipe, group.num_microbatches) == (4, 64))
    setting = next(settings_of(group, Variant(name, ""), SOURCE.times(group)))
    step_s = estimate(setting, SOURCE).step_s
    assert 0.8 * step_s < least_by_few_s(setting, SOURCE) <= step_s * (1 + 1e-9)
    # All rows of so few are built for the estimate, and those of 1F1B take no search.
    assert least_by_few_s(replace(setting, num_microbatches=8), SOURCE) == 0.0
    assert least_by_few_s(replace(setting, schedule_name="1f1b", layers_per_stage=(2,) * 4), SOURCE) == 0.0


@pytest.mark.parametrize("name", [name for name, method in sorted(REGISTRY.items()) if method.held])
def test_no_row_holds_fewer_pages_than_its_method_says(space, name):
    draw = random.Random(name)
    group = replace(next(group for group in space.groups if group.pipe == 4), num_microbatches=8)
    num_stages = legal_placement(Variant(name, ""), 4).num_stages
    of_equal = replace(group, schedule_name=name, options="", layers_per_stage=(3,) * num_stages)
    assert 0 < pages_by_method(of_equal) == pages_before_weaving(of_equal)
    for _ in range(20):
        setting = replace(of_equal, layers_per_stage=tuple(draw.randint(1, 4) for _ in range(num_stages)))
        assert 0 < pages_by_method(setting) <= pages_before_weaving(setting), setting.layers_per_stage


@pytest.mark.parametrize("step", tiers([], ci=[3], slow=[1]))
def test_nothing_takes_fewer_bytes_than_its_bounds(every_setting, step):
    """Of every third setting by default."""
    for group, _, variant, setting in every_setting[::step]:
        placement, held = legal_placement(variant, group.pipe), memory(setting)
        for pages in (pages_of_one_microbatch(setting), pages_before_weaving(setting), pages_in_rows(setting)):
            found, needed = (dict(vars(each)) for each in (least_bytes(setting, placement, pages=pages), held))
            # Those of a schedule with both kinds of backwards are more than those of either kind, together.
            for kinds in (found, needed):
                kinds["at work"] = sum(kinds.pop(name) for name in ("weight_slots", "logits", "workspace"))
            for kind, size in found.items():
                assert size <= needed[kind], (kind, setting)


def test_a_mesh_takes_all_gpus_or_the_most_that_divide():
    def odd(config):
        config.data.batch_size = 5
        config.model.num_layers = 2

    assert space_of(small_config(), TOPOLOGY).num_gpus == 4
    # Of 7 GPUs in a node none divides 56 heads, 7 pipelines do not divide 5 sequences, 7 stages are more than 2 layers.
    assert space_of(small_config(odd), parse_topology("a100-80g:1x7")).num_gpus == 5


def test_without_a_pipeline_masters_may_lie_in_every_node():
    space = space_of(small_config(lambda config: config.data.update(batch_size=8)), parse_topology("a100-80g:2x4"))
    assert {(each.replicate, each.data, each.tensor) for each in space.groups if each.pipe == 1} == {
        (1, 8, 1),
        (2, 4, 1),
        (1, 4, 2),
        (2, 2, 2),
        (1, 2, 4),
    }
    assert {each.replicate for each in space.groups if each.pipe > 1} == {1}


def test_a_tensor_that_does_not_divide_is_left_out():
    space = space_of(small_config(), parse_topology("a100-80g:1x6"))
    assert {group.tensor for group in space.groups} == {1, 2}
    assert space.illegal["because mesh.tensor does not divide the model"] == 2


def mixture(num_experts: int) -> ConfigDict:
    """One whose experts are too narrow to share out: over `tensor` their products take as long for their kernels."""
    config = base_config("mixtral")
    config.model.update(num_layers=4, hidden=4096, num_heads=32, num_kv_heads=8, feed_forward=2048, vocab_size=32000)
    config.model.update(num_experts=num_experts, dtype="bfloat16", attention="chunked")
    config.data.update(batch_size=8, seq_len=4096)
    return config


def test_experts_are_planned_over_as_many_devices_as_divide_them():
    space = space_of(mixture(6), parse_topology("a100-80g:1x4"))
    assert {group.expert for group in space.groups} == {1, 2}
    assert {group.expert for group in space_of(mixture(5), TOPOLOGY).groups} == {1}


@pytest.mark.slow
def test_experts_are_shared_where_that_is_faster():
    whole = space_of(mixture(16), TOPOLOGY)
    # Layers that are split over `tensor` have fewer kernels to read, too.
    space = replace(whole, groups=tuple(group for group in whole.groups if group.tensor == 1))
    (best,) = search(space, SOURCE, top=1).rows
    alone = replace(space, groups=tuple(group for group in space.groups if group.expert == 1))
    assert best.setting.expert == 2
    assert best.step_s < search(alone, SOURCE, top=1).rows[0].step_s
    assert config_of(mixture(16), best.setting).mesh.expert == 2


# ---- Fewer GPUs


def thin_config() -> ConfigDict:
    """A model of a few layers, so that GPUs whose number is odd can share neither layers nor batch well."""
    config = base_config()
    config.model.update(num_layers=7, hidden=2048, num_heads=16, vocab_size=8192, dtype="bfloat16")
    config.model.attention = "chunked"
    config.data.update(batch_size=4, seq_len=1024)
    return config


def plan_of(config: ConfigDict, nodes: int, gpus: int, *, hardware: str = "a100-80g") -> Plan:
    topology = parse_topology(f"{hardware}:{nodes}x{gpus}")
    return search_with_fewer(space_of(config, topology), Roofline.of(topology.hardware), top=1)


def check_never_worse(config: ConfigDict, shapes: Iterable[tuple[int, int]], *, hardware: str) -> int:
    """Checks that no plan is slower than one of fewer nodes or fewer GPUs a node; returns how many leave GPUs idle."""
    steps, num_idle = {}, 0
    for nodes, gpus in sorted(shapes, key=lambda shape: (math.prod(shape), shape)):
        plan = plan_of(config, nodes, gpus, hardware=hardware)
        smaller = [steps[a, b] for a, b in steps if a <= nodes and b <= gpus]
        assert plan.step_s <= min(smaller, default=math.inf) * (1 + 1e-9), (nodes, gpus)
        steps[nodes, gpus] = plan.step_s
        num_idle += plan.step_s < plan.of_all_s
        for row in plan.rows:
            assert fits(row.setting, margin=MEMORY_MARGIN)
            assert row.setting.num_gpus <= row.setting.topology.num_gpus <= nodes * gpus
    return num_idle


@pytest.mark.slow
def test_fewer_gpus_are_taken_where_all_are_slower():
    """Seven share 7 layers, with a bubble, and not 4 sequences; four share both better."""
    plan = plan_of(thin_config(), 1, 7)
    (row,) = plan.rows
    part = row.setting.topology
    assert row.setting.num_gpus < 7
    assert row.step_s < plan.of_all_s < math.inf
    assert search(space_of(thin_config(), part), SOURCE, top=1).rows[0].step_s == row.step_s  # as with no more GPUs
    assert setting_of(config_of(thin_config(), row.setting), part) == row.setting


@pytest.mark.ci
def test_no_plan_is_worse_on_more_gpus():
    assert check_never_worse(thin_config(), [(1, gpus) for gpus in (1, 4, 5, 7)], hardware="a100-80g") >= 2


@pytest.mark.slow
def test_nor_in_odd_nodes():
    shapes = [(nodes, gpus) for gpus in (1, 3, 5) for nodes in range(1, 13 // gpus + 1)]
    assert check_never_worse(thin_config(), shapes, hardware="a100-80g") >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch_size", "hardware"),
    [("gpt3_125m", 256, "a100-80g"), ("llama3_8b", 128, "h100-80g"), ("qwen3_30b_a3b", 96, "h100-80g")],
)
def test_nor_on_any_of_forty_gpus(name, batch_size, hardware):
    """1 to 40 GPUs in one node, and in nodes of 1, 3, 5 and 7."""
    config = read_config_file(str(CONFIGS / f"{name}.py"))
    config.data.batch_size = batch_size
    shapes = {(1, gpus) for gpus in range(1, 41)}
    shapes |= {(nodes, gpus) for gpus in (1, 3, 5, 7) for nodes in range(1, 40 // gpus + 1)}
    assert check_never_worse(config, shapes, hardware=hardware) >= 10


def test_fewer_gpus_are_all_that_smaller_topologies_have():
    space = space_of(thin_config(), parse_topology("a100-80g:3x5"))
    of_fewer = {group for part in with_fewer(space) for group in part.groups} | set(space.groups)
    for shape in ((1, 4), (2, 3), (2, 5), (3, 4), (1, 1)):
        smaller = space_of(thin_config(), parse_topology("a100-80g:{}x{}".format(*shape)))
        assert set(smaller.groups) <= of_fewer, shape


def plan_of_four_thousand_gpus(*, batch_size: int, num_layers: int, top: int):
    def large(config):
        config.data.batch_size = batch_size
        config.model.num_layers = num_layers

    topology = parse_topology("h100-80g:512x8")
    return search(space_of(small_config(large), topology), Roofline(topology.hardware), top=top)


@pytest.mark.ci
def test_four_thousand_gpus_are_no_trouble():
    plan = plan_of_four_thousand_gpus(batch_size=1024, num_layers=4, top=3)
    assert [row.setting.num_gpus for row in plan.rows] == [4096] * 3


@pytest.mark.slow
def test_nor_are_pipelines_of_many_stages():
    plan = plan_of_four_thousand_gpus(batch_size=2048, num_layers=64, top=10)
    assert [row.setting.num_gpus for row in plan.rows] == [4096] * 10


def test_a_model_that_cannot_run_is_refused():
    def broken(config):
        config.model.num_heads = 3

    with pytest.raises(ConfigError, match="hidden-per-head"):
        space_of(small_config(broken), TOPOLOGY)


def test_of_pipeline_and_mesh_nothing_is_taken():
    def other(config):
        config.pipeline.update(schedule="gpipe", num_microbatches=4, head_layers=2.0, vocab_over_pipe="true")
        config.mesh.update(pipe=3, data=2, order="contiguous")
        config.model.recompute = "full"

    assert space_of(small_config(other), TOPOLOGY).groups == space_of(small_config(), TOPOLOGY).groups


def test_the_bounds_hold_for_a_method_of_ones_own_with_split_backwards(monkeypatch):
    """It takes no times, as `zb_h1` does, and has I and W all the same: its last action may be a W."""

    def split_1f1b(*, num_devices: int, num_microbatches: int) -> Schedule:
        """Returns 1F1B with split backwards."""
        return split_backward(build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches))

    own = replace(REGISTRY["1f1b"], name="split_1f1b", generator=split_1f1b)
    monkeypatch.setitem(REGISTRY, "split_1f1b", own)
    variant, found = Variant("split_1f1b", ""), 0
    for group in space_of(small_config(), TOPOLOGY).groups:
        if group.pipe > 1 and variant in legal_variants(group):
            times = SOURCE.times(group)
            for setting in settings_of(group, variant, times):
                bound_s = least_s(setting, times, step_collectives(setting, SOURCE, times))
                assert bound_s <= estimate(setting, SOURCE).step_s * (1 + 1e-9), setting
                found += 1
    assert found
