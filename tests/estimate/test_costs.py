"""The times that a run is expected to take: who decides them, and the orders that are made for them."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from published_bubbles import PUBLISHED, Published

from jaxpipe.cluster.topology import Topology, parse_topology
from jaxpipe.compile import compile_step
from jaxpipe.config import base_config, build_schedule, check, expected_costs
from jaxpipe.config.base import RunConfig
from jaxpipe.config.costs import written_costs
from jaxpipe.config.recompute import Recomputed
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Roofline, Times, estimate, memory, resolve, setting_of
from jaxpipe.estimate.measured import Measurement, subject_of
from jaxpipe.estimate.times import SECONDS
from jaxpipe.schedules import Costs, build, simulate, to_json
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.spec import ScheduleSpec, in_steps

TOPOLOGY = parse_topology("a100-80g:1x8")
LITTLE = 0.0001  # digits of the publication
NAMES = ("backward", "input_gradient", "weight_gradient")


def config_with(pipe=2, num_microbatches=4, **pipeline):
    config = base_config("gpt")
    config.model.update(num_layers=pipe, hidden=16)
    config.data.update(seq_len=8, batch_size=num_microbatches)
    config.mesh.pipe = pipe
    config.pipeline.update(num_microbatches=num_microbatches, **pipeline)
    check(config)
    return config


def large():
    """The GPT of 1.5 B of the zero-bubble paper with 24 layers."""
    config = config_with(8, 64, schedule="zb_h1")
    config.model.update(num_layers=24, hidden=2304, num_heads=24, vocab_size=32000, dtype="bfloat16")
    config.data.update(seq_len=1024, batch_size=384)
    check(config)
    return config


def written_file(path, config, **times):
    """A costs file of `config` whose layer takes `times`."""
    setting = setting_of(config, TOPOLOGY)
    every = Times(**{**dict.fromkeys(SECONDS, 0.0), "layer_backward_s": 2e-3, **times})
    found = Measurement({}, subject_of(setting), {1: every}, {1: 0.0}, 1, 1, 1, None)
    path.write_text(json.dumps(found.to_json()))
    return str(path)


def test_stated_times_have_the_pairs_of_estimated_ones():
    """As the config of a planned row states them: a run predicts for its pairs what `plan` has."""
    config = config_with(2, 8)
    config.model.update(num_layers=4, hidden=1024, num_heads=8, dtype="bfloat16")
    config.mesh.tensor = 2
    config.pipeline.update(schedule="interleaved_1f1b", options="extra_warm_up=true", overlap=True)
    estimated = resolve(config, TOPOLOGY).costs
    assert estimated.pair < 1.0
    config.pipeline.costs = written_costs(estimated)
    assert resolve(config, TOPOLOGY).costs == estimated == setting_of(config, TOPOLOGY).costs
    assert resolve(config).costs.pair == 1.0
    config.pipeline.overlap = False
    assert resolve(config, TOPOLOGY).costs == replace(estimated, pair=1.0)


def test_the_configs_own_times_come_first():
    config = config_with(schedule="zb_h1", costs="input_gradient=1.1,weight_gradient=0.7")
    found = resolve(config, TOPOLOGY)
    assert (found.config.pipeline.costs, found.costs_source) == (config.pipeline.costs, "pipeline.costs")
    assert found.costs == expected_costs(config) == Costs(1.0, 2.0, 1.1, 0.7)
    assert found.schedule.rows == build_schedule(config).rows
    assert build_schedule(config).rows == build_zb_h1(input_gradient=1.0, weight_gradient=0.8)  # in fifths, 0.7 is 0.8


def build_zb_h1(num_devices=2, num_microbatches=4, **times):
    return build("zb_h1", num_devices=num_devices, num_microbatches=num_microbatches, **times).rows


@pytest.mark.parametrize(("keep", "num_kept"), [("none", 0), ("11MiB", 1), ("12MiB", 2), ("1GiB", 2)])
def test_a_device_keeps_as_many_gathered_chunks_as_fit(keep, num_kept):
    config = config_with()
    # A layer has 12 x 256 x 256 weights of 4 bytes in matrices, 3 MiB; a chunk has two.
    config.update_from_flattened_dict({"mesh.data": 2, "mesh.shard": "weights", "mesh.keep_gathered": keep})
    config.pipeline.update(schedule="interleaved_1f1b", options="num_chunks=2")
    config.update_from_flattened_dict({"model.num_layers": 8, "model.hidden": 256, "model.dtype": "float32"})
    assert resolve(config, TOPOLOGY).kept == (num_kept, 0)
    config.mesh.keep_sums = "7MiB"
    assert resolve(config, TOPOLOGY).kept == (num_kept, 1)
    config.mesh.keep_gathered = "5MiB"
    with pytest.raises(ConfigError, match=r"(?s)keep-fits.*take 6.00 MiB.*repair: .*'6MiB' or more"):
        resolve(config, TOPOLOGY)


def test_times_in_options_are_kept():
    config = config_with(schedule="zb_h1", options="weight_gradient=0.4")
    found = resolve(config, TOPOLOGY)
    assert (found.config.pipeline.costs, found.costs.weight_gradient) == ("auto", 0.4)
    assert found.schedule_spec == ScheduleSpec("zb_h1", 2, "weight_gradient=0.4")
    assert found.schedule_spec.for_costs(Costs(weight_gradient=2.0)) == found.schedule_spec


def test_what_costs_leave_open_is_as_long_as_what_they_tell():
    """The forward that is told is the unit of the times that are not; the order is made for these, too."""
    config = config_with(schedule="zb_h1", costs="forward=2.0")
    assert resolve(config).costs == Costs(2.0, 4.0, 2.0, 2.0)
    config.model.recompute = "full"
    assert resolve(config).costs == Costs(2.0, 6.0, 4.0, 2.0)
    assert resolve(config).schedule.rows == build_zb_h1(input_gradient=2.0)


def test_a_file_comes_next(tmp_path):
    config = config_with(schedule="zb_h1")
    times = {"layer_forward_s": 1e-3, "layer_input_gradient_s": 1.4e-3, "layer_weight_gradient_s": 0.59e-3}
    config.pipeline.costs = written_file(tmp_path / "costs.json", config, **times)
    check(config)
    for topology in (TOPOLOGY, None):
        found = resolve(config, topology)
        assert found.config.pipeline.costs == "backward=2.0,input_gradient=1.4,weight_gradient=0.6"
        assert found.costs == Costs(1.0, 2.0, 1.4, 0.6)
        assert found.costs_source == f"measured, {config.pipeline.costs}"
        assert config.pipeline.costs.endswith("costs.json")  # the config of the user stays as it is
    options = {"input_gradient": 1.4, "weight_gradient": 0.6}
    assert setting_of(config, TOPOLOGY).schedule_spec.build_options == options


@pytest.mark.parametrize("costs", ["absent.json", "weight_gradient=0", "forward"])
def test_costs_that_cannot_be_used_are_refused(costs):
    with pytest.raises(ConfigError, match="rule expected-costs"):
        config_with(costs=costs)


def test_a_known_gpu_comes_before_recomputation():
    config = large()
    times = Roofline(TOPOLOGY.hardware).times(setting_of(config, TOPOLOGY))
    ratios = [in_steps(getattr(times, f"layer_{name}_s") / times.layer_forward_s) for name in NAMES]
    found = resolve(config, TOPOLOGY)
    written = ",".join(f"{name}={ratio}" for name, ratio in zip(NAMES, ratios, strict=True))
    assert found.config.pipeline.costs == written
    assert found.costs == Costs(1.0, *ratios)
    assert found.costs_source == "estimated for a100-80g"
    # What config.json records is resolved to the same again.
    again = resolve(found.config)
    assert (again.schedule_spec, again.costs) == (found.schedule_spec, found.costs)
    config.model.recompute = "full"
    without = resolve(config)
    assert without.config.pipeline.costs == "backward=3.0,input_gradient=2.0,weight_gradient=1.0"
    assert without.costs_source == "by model.recompute='full', since the GPU is not known"


def test_the_default_order_of_a_large_gpt_has_less_bubble_than_1f1b():
    config, source = large(), Roofline(TOPOLOGY.hardware)
    zb_h1 = estimate(setting_of(config, TOPOLOGY), source).bubble_ratio
    config.pipeline.schedule = "1f1b"
    assert zb_h1 <= 0.045 < 0.07 < estimate(setting_of(config, TOPOLOGY), source).bubble_ratio


# ---- The published bubbles, by default


def bubble_of(schedule, row: Published) -> float:
    """Bubble of a device's span at the published times, messages included."""
    costs = Costs(
        row.forward, row.input_gradient + row.weight_gradient, row.input_gradient, row.weight_gradient, row.transfer
    )
    return simulate(schedule, costs).bubble_ratio_per_device_span


def tier(row: Published):
    """Eight devices take little time to search; 32 devices and 256 microbatches half a minute."""
    return {8: (), 16: pytest.mark.ci, 32: pytest.mark.ci if row.num_microbatches < 256 else pytest.mark.slow}[row.pipe]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row.model}-{row.num_microbatches}", marks=tier(row)) for row in PUBLISHED]
)
@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_estimate_has_the_published_bubble(name, row):
    config = config_with(row.pipe, row.num_microbatches, schedule=name, costs=row.costs)
    topology = Topology(TOPOLOGY.hardware, -(-row.pipe // 8), 8)
    assert bubble_of(setting_of(config, topology).schedule, row) <= row.bubbles[name] + LITTLE


@pytest.mark.ci
def test_compile_has_the_published_bubble(tmp_path):
    row = PUBLISHED[0]
    config = config_with(row.pipe, row.num_microbatches, schedule="zb_h1")
    times = {"layer_forward_s": row.forward, "layer_input_gradient_s": row.input_gradient}
    config.pipeline.costs = written_file(
        tmp_path / "costs.json", config, layer_weight_gradient_s=row.weight_gradient, **times
    )
    step = compile_step(config, jax.devices()[: row.pipe])
    assert step.spec.costs_source.startswith("measured")
    assert bubble_of(step.pipeline.schedule, row) <= row.bubbles["zb_h1"] + LITTLE


def test_dualpipe_keeps_its_papers_order_unless_options_have_times():
    times = "input_gradient=1.2,weight_gradient=0.6"
    told = Costs(input_gradient=1.2, weight_gradient=0.6)
    for options in ("", times):
        assert ScheduleSpec("dualpipe", 4, options).for_costs(told) == ScheduleSpec("dualpipe", 4, options)


def within(text: str, **pipeline) -> RunConfig:
    """A GPT of four stages of four layers, whose recomputation is decided."""
    config = config_with(4, 8)
    config.model.update(num_layers=16, hidden=64, recompute=text)
    config.pipeline.update(**pipeline)
    config.data.update(seq_len=256)
    return resolve(config, TOPOLOGY).config


def test_bytes_decide_which_layers_are_computed_again():
    """As few as do: with one layer less of any stage a step takes more; so do those of stages in two chunks."""
    whole, none = (memory(setting_of(within(text), TOPOLOGY)).total for text in ("full", "none"))
    assert within(f"auto:{none / 2**20 + 1:.0f}MiB").model.recompute == "none"
    for options in ({}, {"schedule": "interleaved_1f1b"}, {"schedule": "bpipe"}):
        none = memory(setting_of(within("none", **options), TOPOLOGY)).total
        whole = memory(setting_of(within("full", **options), TOPOLOGY)).total
        most = math.ceil((whole + none) / 2**21)
        setting = setting_of(within(f"auto:{most}MiB", **options), TOPOLOGY)
        assert setting.recomputed
        counts = setting.recomputed.counts
        assert 0 < sum(counts) < 16
        assert memory(setting).total <= most * 2**20
        if not options:
            assert sorted(counts, reverse=True) == list(counts)
            for stage in np.flatnonzero(counts):
                fewer = tuple(count - (each == stage) for each, count in enumerate(counts))
                assert memory(replace(setting, recomputed=Recomputed("full", fewer))).total > most * 2**20


def test_bytes_that_nothing_meets_are_refused():
    with pytest.raises(
        ConfigError, match=r"recompute-bytes(.|\n)*GiB with all layers computed again(.|\n)*'auto:1GiB'"
    ):
        within("auto:1MiB")


def test_equal_settings_have_equal_costs():
    config = large()
    setting = setting_of(config, TOPOLOGY)
    assert replace(setting, costs=None).schedule_spec == ScheduleSpec("zb_h1", 8)
    assert hash(setting.schedule_spec) == hash(setting_of(config, TOPOLOGY).schedule_spec)
    assert setting_of(config, TOPOLOGY) == setting


# ---- pipeline.vocab_over_pipe="auto"


def llama(**pipeline):
    config = base_config("llama")
    config.model.update(num_layers=16, hidden=2048, num_heads=16, num_kv_heads=16, feed_forward=5632, dtype="bfloat16")
    config.model.update(vocab_size=32768, attention="chunked")
    config.data.update(seq_len=2048, batch_size=32)
    config.mesh.pipe = 8
    config.pipeline.update(num_microbatches=32, vocab_over_pipe="auto", **pipeline)
    check(config)
    return config


def test_the_vocabulary_is_split_where_a_step_is_shorter():
    topology = parse_topology("a100-80g:1x8")
    source, config = Roofline(topology.hardware), llama()
    found = setting_of(config, topology)
    without = replace(found, vocab_over_pipe=False)
    assert found.vocab_over_pipe
    assert estimate(found, source).step_s < estimate(without, source).step_s
    spec = resolve(config, topology)
    assert spec.schedule.rows == build_schedule(spec.config).rows == found.schedule.rows
    assert spec.schedule.has_head_actions
    # With as few words as these every device would wait for collectives, for nothing.
    config = llama()
    config.model.vocab_size = 64
    assert not setting_of(config, topology).vocab_over_pipe


def test_a_file_with_the_head_on_all_devices_is_split(tmp_path):
    path = tmp_path / "woven.json"
    path.write_text(to_json(vocabulary(build("1f1b", num_devices=8, num_microbatches=32))))
    config = llama(schedule=str(path))
    assert resolve(config).config.pipeline.vocab_over_pipe == "true"
    config.pipeline.vocab_over_pipe = "false"
    with pytest.raises(ConfigError, match=r"(?s)which has S and T.*repair: set pipeline.vocab_over_pipe=true"):
        check(config)


@pytest.mark.parametrize(
    ("pipeline", "topology"),
    [
        ({}, None),
        ({"schedule": "bpipe"}, "a100-80g:1x8"),
        ({"schedule": "chimera"}, "a100-80g:1x8"),
        ({"head_layers": 2.0}, "a100-80g:1x8"),
    ],
)
def test_it_is_not_split_where_it_cannot_be_or_nothing_is_known(pipeline, topology):
    config = llama(**pipeline)
    assert resolve(config, topology and parse_topology(topology)).config.pipeline.vocab_over_pipe == "false"
    config = llama()
    config.model.update(vocab_size=32769, vocab_multiple=1)
    assert resolve(config, parse_topology("a100-80g:1x8")).config.pipeline.vocab_over_pipe == "false"
