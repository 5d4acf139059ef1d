"""`python -m jaxpipe.plan`: what it prints and writes, and its errors; the search has tests of its own."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_space import TOPOLOGY, small_config

from jaxpipe.cluster.hardware import HARDWARE, RESERVE_BYTES
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import check
from jaxpipe.config.recompute import Recomputed
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Link, Roofline, Times, estimate, fits, memory, setting_of
from jaxpipe.estimate.measured import Measured, Measurement, subject_of
from jaxpipe.estimate.plan.breakdown import baselines, best_against_second, breakdown_of
from jaxpipe.estimate.plan.config_file import check_writable, config_of, config_text
from jaxpipe.estimate.plan.exposure import exposed_fraction, remedies
from jaxpipe.estimate.plan.ranking import search, search_with_fewer
from jaxpipe.estimate.plan.report import to_json, to_text
from jaxpipe.estimate.plan.space import space_of
from jaxpipe.plan import main
from jaxpipe.sharding import Shard

SOURCE = Roofline(TOPOLOGY.hardware)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def plan():
    return search(space_of(small_config(), TOPOLOGY), SOURCE, top=4)


@pytest.fixture(scope="module")
def told(plan):
    return [breakdown_of(row.estimate, SOURCE) for row in plan.rows], baselines(plan.rows[0], SOURCE)


def get_config(text: str):
    names = {}
    exec(compile(text, "planned.py", "exec"), names)
    return names["get_config"]()


def test_a_written_config_is_the_row(plan):
    for row in plan.rows:
        config = get_config(config_text("planned.py", small_config(), row, command='plan --x="\\n"'))
        check(config)
        assert setting_of(config, TOPOLOGY) == row.setting
        planned = config_of(small_config(), row.setting)
        assert config.to_dict() == planned.to_dict()


def test_what_copies_share_is_written_and_told(plan, told):
    weights = replace(plan.rows[0].setting, shard=Shard.WEIGHTS)
    row = replace(plan.rows[0], estimate=estimate(weights, SOURCE))
    assert get_config(config_text("planned.py", small_config(), row, command="")).mesh.shard == "weights"
    shared = replace(plan, rows=(row, *plan.rows[1:]))
    assert to_json(shared, *told)["rows"][0]["shard"] == "weights"
    table = [line for line in to_text(shared, *told).splitlines() if "  order  " in line or re.match(r"\d  ", line)]
    assert [re.findall(r" (shard|weights|optimizer)  +[\ds]", line) for line in table[:2]] == [["shard"], ["weights"]]
    alone = replace(plan, rows=plan.rows[:1])  # which shares masters alone
    assert not re.search(r" shard  +step s", to_text(alone, told[0][:1], []))


@pytest.mark.parametrize("shard", [Shard.GRADIENTS, Shard.WEIGHTS])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_what_no_layer_hides_is_a_part_of_its_own(plan, name, shard):
    """On slow links: messages, bubble and computing are those of a step that shares masters alone."""
    slow = replace(SOURCE, nvlink_fraction=0.02, network_fraction=0.02)
    masters = replace(
        plan.rows[0].setting, schedule_name=name, options="", data=2, pipe=2, tensor=1, layers_per_stage=(4, 4)
    )
    masters = replace(masters, num_microbatches=2, order="contiguous", shard=Shard.OPTIMIZER)
    before, found = (
        breakdown_of(estimate(setting, slow), slow) for setting in (masters, replace(masters, shard=shard))
    )
    shared = estimate(replace(masters, shard=shard), slow)
    assert sum(vars(found).values()) == pytest.approx(shared.step_s)
    assert found.reduction_s > shared.copies_s + shared.reduce_s
    for part in ("compute_s", "bubble_s", "transfers_s", "collectives_s"):
        assert getattr(found, part) == pytest.approx(getattr(before, part), abs=1e-9)


def test_a_baseline_shares_as_little_as_fits(plan):
    """Whatever the best row shares: of 8 layers masters alone; of 16 layers weights too, but where pages are small."""
    for num_layers, names in ((8, set()), (16, {"gpipe", "interleaved_1f1b"})):
        setting = replace(plan.rows[0].setting, data=2, pipe=2, num_microbatches=2, shard=Shard.WEIGHTS)
        model = replace(setting.model, num_layers=num_layers)
        setting = replace(setting, model=model, layers_per_stage=(num_layers // 2,) * 2)
        shared = [
            baseline
            for baseline in baselines(replace(plan.rows[0], estimate=estimate(setting, SOURCE)), SOURCE)
            if "shard weights" in baseline.name
        ]
        assert {re.split("[ ,]", baseline.name)[0] for baseline in shared} == names
        assert all(baseline.slower_s is not None and "none" in baseline.name for baseline in shared)


def test_baselines_leave_the_list_of_the_best_row_which_is_of_its_stages(plan):
    setting = replace(plan.rows[0].setting, schedule_name="1f1b", options="", data=2, pipe=2, tensor=1)
    setting = replace(setting, layers_per_stage=(4, 4), recomputed=Recomputed("full", (2, 0)))
    found = baselines(replace(plan.rows[0], estimate=estimate(setting, SOURCE)), SOURCE)
    assert {re.split("[ ,]", baseline.name)[0] for baseline in found} == {"1f1b", "gpipe", "interleaved_1f1b"}
    # 1F1B with no list is another way than the best row, and takes less time, since it computes nothing again.
    assert [f.slower_s < 0 for f in found if f.name == "1f1b, recompute none"] == [True]


def test_what_is_exposed_is_told_with_what_hides_more(plan, told):
    best = plan.rows[0]
    before = exposed_fraction(best.estimate, SOURCE)
    found = remedies(best, SOURCE, margin=0.05)
    assert before > 0.02
    assert any(remedy.estimate.setting.batch_size == 8 for remedy in found)
    assert any(remedy.estimate.setting.data < best.setting.data for remedy in found)
    for remedy in found:
        assert exposed_fraction(estimate(remedy.estimate.setting, SOURCE), SOURCE) == remedy.exposed_fraction < before
        assert fits(remedy.estimate.setting, margin=0.05)
    text = to_text(plan, *told, found)
    assert all(remedy.sentence in text for remedy in found)
    assert f"{before:.1%} of its step" in text
    assert [each["exposed_fraction"] for each in to_json(plan, *told, found)["remedies"]] == [
        remedy.exposed_fraction for remedy in found
    ]
    # On fast links there is nothing to mend.
    fast = replace(SOURCE, nvlink_fraction=1e3, network_fraction=1e3)
    assert remedies(replace(best, estimate=estimate(best.setting, fast)), fast, margin=0.05) == []


def test_another_shard_hides_more_of_two_replicas():
    """Their gathers stand before the first action, their sums after the last, unless every microbatch has its own."""
    slow = replace(SOURCE, nvlink_fraction=0.2, network_fraction=0.2)
    (row,) = search(space_of(small_config(), TOPOLOGY), slow, top=1).rows
    setting = replace(row.setting, schedule_name="bitpipe", options="num_chunks=1", data=2, pipe=2, tensor=1)
    setting = replace(setting, topology=parse_topology("a100-80g:1x4"))
    setting = replace(setting, num_microbatches=2, layers_per_stage=(4, 4), order="contiguous", shard=Shard.OPTIMIZER)
    found = remedies(replace(row, estimate=estimate(setting, slow)), slow, margin=0.0)
    changes = [remedy.change for remedy in found]
    assert {"mesh.shard='gradients'", "mesh.shard='weights'"} <= {*changes}


def test_whether_a_pipeline_is_needed_is_told(plan, told):
    assert "row 1 needs none" in to_text(plan, *told)
    slow = replace(SOURCE, nvlink_fraction=0.05, network_fraction=0.05)
    space = space_of(small_config(), TOPOLOGY)
    with_pipeline = search_with_fewer(space, slow, top=1)
    assert with_pipeline.rows[0].setting.pipe > 1
    assert with_pipeline.alone is not None
    (alone,) = with_pipeline.alone.rows
    groups = tuple(group for group in space.groups if group.pipe == 1)
    assert alone.step_s == search(replace(space, groups=groups), slow, top=1).step_s > with_pipeline.step_s
    parts = [breakdown_of(row.estimate, slow) for row in with_pipeline.rows]
    longer_s = alone.step_s - with_pipeline.step_s
    assert f"no pipeline  {longer_s:.3f} s" in to_text(with_pipeline, parts, [])
    assert to_json(with_pipeline, parts, [])["without_pipeline"]["step_s"] == alone.step_s
    # None that fits is told with the one that comes nearest: without a margin, or without more memory.
    none = search(replace(space, groups=groups), slow, top=1, margin=1e3)
    assert none.tight is not None
    for alone, held in (
        (none, none.tight.held),
        (replace(none, tight=None, smallest=((none.tight.setting, none.tight.held),)), memory(none.tight.setting)),
    ):
        text = to_text(replace(with_pipeline, alone=alone), parts, [])
        assert f"none fits; the nearest takes {held.total / 2**30:.1f} GiB" in text


def test_uneven_stages_are_written_too(plan):
    row = plan.rows[0]
    setting = replace(
        row.setting, schedule_name="1f1b", options="", data=1, pipe=4, tensor=1, layers_per_stage=(3, 2, 2, 1)
    )
    setting = replace(setting, num_microbatches=4, order="pair_adjacent")
    config = get_config(
        config_text("planned.py", small_config(), replace(row, estimate=estimate(setting, SOURCE)), command="")
    )
    assert setting_of(config, TOPOLOGY) == setting


def test_a_planned_config_has_no_costs_of_ends_left(plan):
    config = small_config(lambda config: config.pipeline.update(head_layers=1.5, schedule="gpipe"))
    assert config_of(config, plan.rows[0].setting).pipeline.head_layers == 0.0


def test_shares_are_the_step(plan, told):
    for row, shares in zip(plan.rows, told[0], strict=True):
        assert sum(vars(shares).values()) == pytest.approx(row.step_s)
        assert min(vars(shares).values()) >= -1e-9
        assert (shares.collectives_s > 0) == (row.setting.tensor > 1)
        assert (shares.reduction_s > 0) == (row.setting.data * row.setting.pipe > 1)


def test_the_json_has_units_and_all_bytes(plan, told):
    found = json.loads(json.dumps(to_json(plan, *told)))
    assert found["hardware_bytes"] == HARDWARE["a100-80g"].memory_bytes
    assert found["topology"] == "a100-80g:2x2"
    assert found["num_gpus"] == 4
    for row, ours in zip(found["rows"], plan.rows, strict=True):
        assert row["data"] * row["pipe"] * row["tensor"] == 4
        assert row["data"] * row["num_microbatches"] * row["microbatch_size"] == 4
        assert sum(row["layers_per_stage"]) == 8
        assert row["total_bytes"] == sum(row["bytes"].values()) == memory(ours.setting).total
        assert row["samples_per_s"] == pytest.approx(4 / row["step_s"])
        assert row["tokens_per_s"] == pytest.approx(4 * 8192 / row["step_s"])
        assert sum(row["parts_s"].values()) == pytest.approx(row["step_s"])
        assert row["bytes"][row["largest_kind"]] == max(row["bytes"].values())
    assert [row["step_s"] for row in found["rows"]] == sorted(row["step_s"] for row in found["rows"])


def test_baselines_are_compared_by_how_much(plan, told):
    for baseline in told[1]:
        assert (baseline.slower_s is None) == (baseline.over_bytes > 0)
        assert baseline.slower_s is None or baseline.slower_s > -1e-9  # or it would be the best
    text = to_text(plan, *told)
    assert all(baseline.sentence in text for baseline in told[1])
    difference = plan.rows[1].step_s - plan.rows[0].step_s
    assert f"row 2 takes {difference:.3f} s" in best_against_second(*told[0][:2])


def test_nothing_fits_is_said_with_what_is_nearest():
    def large(config):
        config.model.num_layers = 64

    plan = search(space_of(small_config(large), TOPOLOGY), SOURCE, top=3)
    assert not plan.rows
    assert plan.nearest
    assert plan.nearest[1] == memory(plan.nearest[0])  # not the part of it that was enough to leave it out
    assert plan.nearest[1].total + RESERVE_BYTES > TOPOLOGY.hardware.memory_bytes
    assert to_text(plan, [], []).splitlines()[-1].startswith("collectives")
    assert to_json(plan, [], [])["rows"] == []


NOTHING_FITS = [
    # Masters and moments are divided by more GPUs; no change of the step makes room for them.
    pytest.param(
        ["model.num_layers=64"],
        "mostly masters and optimizer state",
        r"give more GPUs, a100-80g:\d+x2 at least$",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        ["model.num_layers=28"],
        "mostly masters and optimizer state",
        "set optimizer.name='lion'",
        marks=pytest.mark.slow,
    ),
    (["model.num_layers=26"], "leaves a margin of memory", "give --memory_margin=0 for the "),
    # What one sequence needs is the same on any number of GPUs.
    pytest.param(
        ["data.seq_len=1048576", "model.num_layers=2"],
        "mostly (activations|workspace of a layer)",
        r"repair: set data.seq_len=\d+$",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("changes", "largest", "repair"), NOTHING_FITS)
def test_the_repair_names_what_is_large_and_works(changes, largest, repair, tmp_path, capsys):
    """The command ends with 2, prints what it searched, writes no file, and each change that it names is enough."""
    config = tmp_path / "small.py"
    config.write_text("from small_space import small_config\n\ndef get_config():\n    return small_config()\n")
    written = tmp_path / "planned.py"
    flags = [f"--config={config}", f"--topology={TOPOLOGY}", "--top=1", f"--write_config={written}"]
    flags += [f"--config.{change}" for change in changes]
    assert main([*flags, "--format=json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows"] == []
    assert re.search(largest, captured.err.splitlines()[0])
    assert re.search(repair, captured.err, re.MULTILINE), captured.err
    assert not written.exists()
    for change in re.findall(r"set ((?:model|data|optimizer)\.\S+=[\w']+)", captured.err):
        assert main([*flags, f"--config.{change}".replace("'", ""), "--overwrite"]) == 0
        assert written.exists()


def test_fewer_gpus_a_margin_and_equal_rows_are_told(plan, told):
    text = to_text(plan, *told)
    for rank, row in enumerate(plan.rows, 1):
        is_equal = rank > 1 and row.step_s <= 1.03 * plan.rows[0].step_s
        assert bool(re.search(rf"^{rank} ≈", text, re.MULTILINE)) == is_equal
    assert ("within 3% of row 1" in text) == (plan.rows[1].step_s <= 1.03 * plan.rows[0].step_s)
    assert "GPUs" not in text  # all rows take all
    tight = replace(plan.rows[0], held=replace(plan.rows[0].held, slots=10**10))
    assert "tight" not in text
    faster = replace(tight, estimate=replace(tight.estimate, pipeline_s=tight.estimate.pipeline_s / 2))
    assert "--memory_margin=0" in to_text(replace(plan, tight=faster, num_tight=1), *told)
    smaller = replace(plan.rows[0].setting.topology, num_nodes=1)
    part = replace(plan.rows[0].estimate, setting=replace(plan.rows[0].setting, topology=smaller, data=1, pipe=1))
    fewer = replace(plan, rows=(replace(plan.rows[0], estimate=part), *plan.rows[1:]), of_all_s=2.0)
    assert "row 1 takes" in to_text(fewer, *told)


def test_a_step_that_may_need_more_than_predicted_fits_with_a_margin(plan):
    row = plan.rows[0]
    room = TOPOLOGY.hardware.memory_bytes - RESERVE_BYTES
    for total, margin, is_held in ((room, 0.0, True), (room + 1, 0.0, False), (room, 0.05, False)):
        held = replace(row.held, slots=row.held.slots + total - row.held.total)
        assert fits(row.setting, held, margin=margin) == is_held


def test_costs_of_another_model_are_an_error_that_names_what_differs():
    measured = Measurement({}, {"family": "GPTConfig", "hidden": 64}, {}, {}, 1, 1, 1, None)
    with pytest.raises(ConfigError, match=r"no measurement fits this model(.|\n)*hidden=7168, measured 64"):
        search(space_of(small_config(), TOPOLOGY), Measured((measured,)), top=3)


def test_what_is_not_measured_is_left_out():
    class OneTensor:
        """As costs that were measured for one GPU alone."""

        def times(self, setting):
            if setting.tensor > 1:
                raise ConfigError("not measured")
            return SOURCE.times(setting)

        def link(self, *, in_node):
            return SOURCE.link(in_node=in_node)

        def gather_s(self, group, num_bytes):
            return SOURCE.gather_s(group, num_bytes)

    plan = search(space_of(small_config(), TOPOLOGY), OneTensor(), top=3)
    assert plan.not_measured > 0
    assert {row.setting.tensor for row in plan.rows} == {1}


@pytest.mark.slow
def test_equal_rows_are_one_and_one_device_is_no_pipeline():
    """Without more chunks Chimera, MixPipe and BitPipe are one schedule."""
    plan = search(space_of(small_config(), TOPOLOGY), SOURCE, top=10**6)
    parts = [breakdown_of(row.estimate, SOURCE) for row in plan.rows]
    lines = [line for line in to_text(plan, parts, []).splitlines() if line[:1].isdigit()]
    schedules = [re.split("  +", line)[1] for line in lines]
    assert any({"chimera", "mixpipe"} <= set(cell.split(", ")) for cell in schedules), schedules
    for row, cell in zip(plan.rows, schedules, strict=True):
        assert (cell == "no pipeline") == (row.setting.pipe == 1)


def test_a_file_is_not_replaced_silently(tmp_path):
    path = tmp_path / "planned.py"
    check_writable(str(path), overwrite=False)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="plan-overwrite"):
        check_writable(str(path), overwrite=False)
    check_writable(str(path), overwrite=True)
    for wrong in (tmp_path / "planned.txt", tmp_path / "none" / "planned.py", tmp_path):
        with pytest.raises(ConfigError, match="plan-output"):
            check_writable(str(wrong), overwrite=True)


def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "planned.py"
    arguments = ["--config=configs/quickstart.py", "--topology=a100-80g:1x4", "--top=2", "--format=json"]
    assert main([*arguments, f"--write_config={path}"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    config = get_config(path.read_text())
    assert config.pipeline.schedule == row["schedule"]
    assert (config.mesh.data, config.mesh.pipe, config.mesh.tensor) == (row["data"], row["pipe"], row["tensor"])
    assert config.mesh.deterministic  # of the config that was planned for
    assert config.model.hidden == 128


def test_any_row_is_written_and_none_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "planned.py"
    arguments = ["--config=configs/quickstart.py", "--topology=a100-80g:1x4", "--top=3", "--format=json"]
    assert main([*arguments, f"--write_config={path}:3"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][2]
    setting = setting_of(get_config(path.read_text()), parse_topology(row["topology"]))
    assert setting.schedule_name == row["schedule"]
    assert (setting.axes, setting.num_microbatches) == (
        {axis: row[axis] for axis in setting.axes},
        row["num_microbatches"],
    )
    path.unlink()
    for wrong in ("0", "4", "99999999999999999999"):  # before the search
        assert main([*arguments, f"--write_config={path}:{wrong}"]) == 2
        captured = capsys.readouterr()
        assert not captured.out
        assert "rule plan-row" in captured.err
    few = ["--config=configs/quickstart.py", "--topology=a100-80g:1x1", "--top=100", "--config.data.batch_size=1"]
    assert main([*few, f"--write_config={path}:100"]) == 2
    assert re.search(r"asks for row 100, and the plan has rows 1 to \d+", capsys.readouterr().err)
    assert not path.exists()


@pytest.mark.parametrize("link", [None, Link(latency_s=1e-4, bytes_per_s=1e9)])
def test_a_plan_by_measured_times_takes_other_links_from_the_roofline(tmp_path, capsys, monkeypatch, link):
    """Measured were the link between two devices of a node, or none, and two of the three kinds of recomputation."""
    monkeypatch.chdir(ROOT)
    config = get_config((ROOT / "configs" / "quickstart.py").read_text())
    times = {size: Times(*[size * 1e-3] * 7, update_s=1e-3) for size in (1, 8)}
    flags = ["--config=configs/quickstart.py", "--topology=a100-80g:2x2", "--top=2", "--format=json"]
    for recompute, kind in (("none", "NVIDIA A100-SXM4-40GB"), ("attention", "cpu")):
        config.model.recompute = recompute
        subject = subject_of(setting_of(config, parse_topology("a100-80g:1x8")))
        measured = Measurement({"device_kind": kind}, subject, times, dict.fromkeys(times, 0.0), 1, 1, 1, link)
        (tmp_path / recompute).write_text(json.dumps(measured.to_json()))
        flags.append(f"--costs={tmp_path / recompute}")
    assert main(flags) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["rows"]) == 2
    assert captured.err == "costs        measured on cpu, planned for NVIDIA A100-SXM4-80GB\n"
