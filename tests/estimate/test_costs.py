"""The times that a run is expected to take: who decides them, and the orders that are made for them."""

import json
from dataclasses import fields, replace

import jax
import pytest
from published_bubbles import PUBLISHED, Published

from jaxpipe.cluster.topology import Topology, parse_topology
from jaxpipe.compile import compile_step
from jaxpipe.config import base_config, build_schedule, check, expected_costs
from jaxpipe.config.costs import in_steps, options_with_times
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Roofline, Times, decide_costs, estimate, setting_of
from jaxpipe.estimate.measured import Measurement, subject_of
from jaxpipe.schedules import Costs, build, simulate, to_json
from jaxpipe.schedules.passes.vocabulary import vocabulary

TOPOLOGY = parse_topology("a100-80g:1x8")
LITTLE = 0.0001  # digits of the publication
NAMES = ("backward", "input_gradient", "weight_gradient")
NAMES_OF_TIMES = [field.name for field in fields(Times)]


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
    every = Times(**{**dict.fromkeys(NAMES_OF_TIMES, 0.0), "layer_backward_s": 2e-3, **times})
    found = Measurement({}, subject_of(setting), {1: every}, {1: 0.0}, 1, 1, 1, None)
    path.write_text(json.dumps(found.to_json()))
    return str(path)


def test_the_configs_own_times_come_first():
    config = config_with(schedule="zb_h1", costs="input_gradient=1.1,weight_gradient=0.7")
    found = decide_costs(config, TOPOLOGY)
    assert (found.costs, found.source) == ("input_gradient=1.1,weight_gradient=0.7", "pipeline.costs")
    assert expected_costs(config).input_gradient == 1.1
    assert build_schedule(config).rows == build_zb_h1(input_gradient=1.0, weight_gradient=0.8)  # in fifths, 0.7 is 0.8


def build_zb_h1(num_devices=2, num_microbatches=4, **times):
    return build("zb_h1", num_devices=num_devices, num_microbatches=num_microbatches, **times).rows


def test_times_in_options_are_kept():
    config = config_with(schedule="zb_h1", options="weight_gradient=0.4")
    assert decide_costs(config, TOPOLOGY).costs == "auto"
    assert options_with_times("zb_h1", "weight_gradient=0.4", "weight_gradient=2.0") == "weight_gradient=0.4"


def test_a_file_comes_next(tmp_path):
    config = config_with(schedule="zb_h1")
    times = {"layer_forward_s": 1e-3, "layer_input_gradient_s": 1.4e-3, "layer_weight_gradient_s": 0.59e-3}
    config.pipeline.costs = written_file(tmp_path / "costs.json", config, **times)
    check(config)
    for topology in (TOPOLOGY, None):
        found = decide_costs(config, topology)
        assert found.costs == "backward=2.0,input_gradient=1.4,weight_gradient=0.6"
        assert found.source == f"measured, {config.pipeline.costs}"
    assert setting_of(config, TOPOLOGY).built_options == "input_gradient=1.4,weight_gradient=0.6"


@pytest.mark.parametrize("costs", ["absent.json", "weight_gradient=0", "forward"])
def test_costs_that_cannot_be_used_are_refused(costs):
    with pytest.raises(ConfigError, match="rule expected-costs"):
        config_with(costs=costs)


def test_a_known_gpu_comes_before_recomputation():
    config = large()
    times = Roofline(TOPOLOGY.hardware).times(setting_of(config, TOPOLOGY))
    ratios = [in_steps(getattr(times, f"layer_{name}_s") / times.layer_forward_s) for name in NAMES]
    found = decide_costs(config, TOPOLOGY)
    assert found.costs == ",".join(f"{name}={ratio}" for name, ratio in zip(NAMES, ratios, strict=True))
    assert found.source == "estimated for a100-80g"
    config.model.recompute = "full"
    without = decide_costs(config, None)
    assert without.costs == "backward=3.0,input_gradient=2.0,weight_gradient=1.0"
    assert without.source == "by model.recompute='full', since the GPU is not known"


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
    assert step.costs.source.startswith("measured")
    assert bubble_of(step.pipeline.schedule, row) <= row.bubbles["zb_h1"] + LITTLE


def test_dualpipe_keeps_its_papers_order_unless_options_have_times():
    times = "input_gradient=1.2,weight_gradient=0.6"
    assert options_with_times("dualpipe", "", times) == ""
    assert options_with_times("dualpipe", times, "weight_gradient=1.0") == times


def test_equal_settings_have_equal_costs():
    config = large()
    setting = setting_of(config, TOPOLOGY)
    assert replace(setting, costs="auto").built_options == ""
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
    decide_costs(config, topology).settle(config)
    assert build_schedule(config).rows == found.schedule.rows
    assert build_schedule(config).has_head_actions
    # With as few words as these every device would wait for collectives, for nothing.
    config = llama()
    config.model.vocab_size = 64
    assert not setting_of(config, topology).vocab_over_pipe


def test_a_file_with_the_head_on_all_devices_is_split(tmp_path):
    path = tmp_path / "woven.json"
    path.write_text(to_json(vocabulary(build("1f1b", num_devices=8, num_microbatches=32))))
    config = llama(schedule=str(path))
    assert decide_costs(config, None).vocab_over_pipe == "true"
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
    assert decide_costs(config, topology and parse_topology(topology)).vocab_over_pipe == "false"
    config = llama()
    config.model.update(vocab_size=32769, vocab_multiple=1)
    assert decide_costs(config, parse_topology("a100-80g:1x8")).vocab_over_pipe == "false"
