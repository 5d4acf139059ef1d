"""Times that were measured, read back: exact sizes, sizes between, and what is refused."""

import json
from dataclasses import replace

import pytest

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import base_config
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Link, Times, estimate, setting_of
from jaxpipe.estimate.measured import Measurement, read_costs, subject_of
from jaxpipe.sharding import Shard

LINK = Link(latency_s=1e-4, bytes_per_s=1e9)


def setting(**fields):
    config = base_config()
    config.pipeline.num_microbatches, config.data.batch_size, config.mesh.pipe = 4, 8, 2
    return replace(setting_of(config, parse_topology("h200:1x8")), **fields)


def times(size: int) -> Times:
    """Times on lines through the size, each with a slope of its own."""
    return Times(*(1e-3 * (1 + k * size) for k in range(7)), update_s=0.5)


def measurement(*, sizes=(1, 4), link: Link | None = LINK, **subject) -> Measurement:
    return Measurement(
        identity={"device_kind": "test"},
        subject=subject_of(setting()) | subject,
        times={size: times(size) for size in sizes},
        spread_ratio=dict.fromkeys(sizes, 0.01),
        num_layer_parameters=100,
        num_shared_parameters=50,
        num_update_parameters=1000,
        link=link,
    )


def written(path, measurement):
    path.write_text(json.dumps(measurement.to_json()))
    return path


def test_what_is_written_is_read(tmp_path):
    file = written(tmp_path / "costs.json", measurement())
    assert read_costs(file).measurements == (measurement(),)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_times_lie_on_a_line_between_sizes(tmp_path, size):
    found = read_costs(written(tmp_path / "costs.json", measurement())).times(setting(batch_size=4 * size))
    assert replace(found, update_s=0.5).seconds == pytest.approx(times(size).seconds)


def test_s_and_t_are_those_of_as_many_devices_with_their_collectives(tmp_path):
    timed = {size: replace(times(size), statistics_s=0.25, gradients_s=0.5) for size in (1, 4)}
    source = read_costs(written(tmp_path / "costs.json", replace(measurement(), times=timed, head_parts=2)))
    split = setting(vocab_over_pipe=True)
    # Of two devices each sends half of what it gathers. S waits for two sums of the stream of a microbatch, each
    # scattered and gathered; T for two, and for three numbers of each token and device.
    tokens = 2 * split.seq_len
    sum_s = 2 * (LINK.latency_s + tokens * split.anatomy.hidden * 4 / 2 / LINK.bytes_per_s)
    told_s = LINK.latency_s + tokens * 3 * 2 * 4 / 2 / LINK.bytes_per_s
    found = source.times(split)
    assert found.statistics_s == pytest.approx(0.25 + 2 * sum_s)
    assert found.gradients_s == pytest.approx(0.5 + 2 * sum_s + told_s)
    assert estimate(split, source).step_s > 4 * 0.75
    for other in (setting(), replace(split, pipe=4, layers_per_stage=(2,) * 4)):
        assert source.times(other).statistics_s is source.times(other).gradients_s is None
    with pytest.raises(ConfigError, match="rule estimated-head"):
        estimate(split, read_costs(written(tmp_path / "whole.json", measurement())))


def test_an_update_goes_with_what_a_device_holds(tmp_path):
    source = read_costs(written(tmp_path / "costs.json", measurement()))
    # 4 of 8 layers and both ends, of 1000 parameters that take half a second.
    assert source.times(setting(shard=Shard.NONE)).update_s == pytest.approx(0.5 * (4 * 100 + 50) / 1000)
    # Of two copies of the pipeline each has half; of both ends each of four devices a quarter.
    split = setting(shard=Shard.OPTIMIZER, data=2, batch_size=16)
    assert source.times(split).update_s == pytest.approx(0.5 * (4 * 100 / 2 + 50 / 4) / 1000)


def test_layers_may_be_more_or_fewer_and_a_step_follows(tmp_path):
    source = read_costs(written(tmp_path / "costs.json", measurement()))
    few = setting()
    many = setting(model=replace(few.model, num_layers=16), layers_per_stage=(8, 8))
    # BitPipe (arXiv 2410.19367), Table 2: 1F1B takes N + D - 1 times F and B, here of four layers more on each stage.
    found = times(2)
    more_s = (4 + 2 - 1) * 4 * (found.layer_forward_s + found.layer_backward_s)
    assert estimate(many, source).pipeline_s - estimate(few, source).pipeline_s == pytest.approx(more_s)


def test_the_file_of_the_model_is_found(tmp_path):
    files = [
        written(tmp_path / f"{recompute}.json", measurement(recompute=recompute, sizes=sizes))
        for recompute, sizes in (("full", (1, 4)), ("none", (2,)))
    ]
    assert read_costs(*files).times(setting()).layer_backward_s == times(2).layer_backward_s


@pytest.mark.parametrize("size", [1, 8])
def test_sizes_outside_are_refused(tmp_path, size):
    source = read_costs(written(tmp_path / "costs.json", measurement(sizes=(2, 4))))
    all_sizes = ",".join(map(str, sorted((2, 4, size))))
    with pytest.raises(ConfigError, match=rf"rule measured-sizes(.|\n)*repair: .*={all_sizes}"):
        source.times(setting(batch_size=4 * size))


@pytest.mark.parametrize("other", [{"hidden": 64}, {"recompute": "full"}, {"seq_len": 7}, {"tensor": 2}])
def test_another_model_is_refused(tmp_path, other):
    (name,) = other
    with pytest.raises(ConfigError, match=rf"rule measured-model(.|\n)*nearest: {name}="):
        read_costs(written(tmp_path / "costs.json", measurement(**other))).times(setting())


def test_a_link_that_nothing_has_timed_is_refused_or_another_sources(tmp_path):
    alone = written(tmp_path / "alone.json", measurement(link=None))
    both = read_costs(alone, written(tmp_path / "costs.json", measurement(recompute="full")))
    assert both.link(in_node=True) == LINK
    for source, in_node in ((read_costs(alone), True), (both, False)):
        with pytest.raises(ConfigError, match="rule measured-links"):
            source.link(in_node=in_node)
    assert read_costs(alone, otherwise=both).link(in_node=True) == LINK


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', None])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="rule costs-file"):
        read_costs(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"times": []}, ""),
        ({"times": {}}, "there are no times"),
        ({"spread_ratio": []}, ""),
        ({"subject": None}, ""),
        ({"layer_forward_s": 0.0}, "microbatch size [0-9]+: layer_forward_s=0"),
        ({"layer_weight_gradient_s": -1.0}, "layer_weight_gradient_s=-1"),
        ({"update_s": float("nan")}, "update_s=nan"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, said):
    path = written(tmp_path / "costs.json", measurement())
    found = json.loads(path.read_text())
    ((field, value),) = change.items()
    if field in found:
        found[field] = value
    else:
        for times in found["times"].values():
            times[field] = value
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=f"{said}[\\s\\S]*rule costs-file"):
        read_costs(path)
