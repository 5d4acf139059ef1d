"""`python -m jaxpipe.optimize`: what it prints and writes, and its errors; the search has tests of its own."""

import re
from pathlib import Path

import pytest

from jaxpipe import optimize as command
from jaxpipe.lowering import spmd_makespan
from jaxpipe.optimize import main, placements_of
from jaxpipe.schedules import (
    Costs,
    MemoryBound,
    Placement,
    Problem,
    build,
    costs_of_stages,
    linear,
    looped,
    peak_activations,
    read_schedule,
    simulate,
    to_csv,
    write_schedule,
    zig_zag,
)
from jaxpipe.schedules.ordering.problem import usual_placements
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.placement import PLACEMENTS, placement_name

ROOT = Path(__file__).parents[2]
SMALL = ["--num_devices=2", "--num_microbatches=4", "--memory_bound=2", "--num_trials=20"]
WHOLE = ["--input_gradient=3", "--weight_gradient=3"]  # so that halves are of no use


def printed(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def figures(text: str) -> dict[str, list[str]]:
    """The columns of each line, by its name."""
    cut = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    return {name: columns for name, *columns in cut}


def refused(capsys, *arguments: str) -> str:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    for part in ("Error: ", "\n  rule ", "\n  repair: "):
        assert part in message
    return message


@pytest.fixture
def asked(monkeypatch):
    """What the search would be asked, in place of a search."""
    calls = []

    def record(problem, **question):
        calls.append((problem, question))
        raise command.ScheduleError("asked")

    monkeypatch.setattr(command, "search", record)
    return calls


# 1F1B takes (N + D - 1) (forward + backward), a bubble ratio of (D - 1) / (N + D - 1), and stores D microbatches:
# Narayanan et al., SC 2021, section 2.2.1. Under a bound of D no schedule of one stage a device is shorter.
def test_the_figures_are_those_of_the_closed_form(capsys):
    text = printed(capsys, *SMALL, *WHOLE, "--placement=linear")
    assert "num_devices=2, num_microbatches=4, at most 2 Ma on a device" in text
    found = {name: columns[0] for name, columns in figures(text).items() if columns}
    assert found["schedule"] == "1f1b"
    assert found["placement"] == "linear"
    assert float(found["makespan"]) == float(found["SPMD clock"]) == (4 + 2 - 1) * (1 + 2)
    assert float(found["bubble ratio"]) == float(found["by device span"]) == 1 / 5
    assert found["peak activations"] == "2 Ma"
    assert "peak memory" not in found
    assert "written" not in found


@pytest.mark.parametrize("placement", ["linear", "v", "looped_3", "w"])
def test_costs_are_of_a_devices_share_whatever_the_placement(capsys, placement):
    one = ["--num_devices=1", "--num_microbatches=3", "--memory_bound=1", "--num_trials=5"]
    lines = figures(printed(capsys, *one, f"--placement={placement}"))
    assert float(lines["makespan"][0]) == 3 * (1 + 2)
    assert float(lines["bubble ratio"][0]) == 0


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_the_file_holds_what_was_found(capsys, tmp_path, ending):
    path = tmp_path / f"mine.{ending}"
    costs = Costs(input_gradient=1.2, weight_gradient=0.8)
    text = printed(capsys, *SMALL, "--input_gradient=1.2", "--weight_gradient=0.8", f"--output={path}")
    schedule = read_schedule(path)
    assert (schedule.num_devices, schedule.num_microbatches) == (2, 4)
    assert peak_activations(schedule).max() <= 2
    makespan = simulate(schedule, costs_of_stages(costs, schedule.placement)).makespan
    assert f"{makespan:g}" == figures(text)["makespan"][0]
    assert f"--config.pipeline.schedule={path} " in text
    assert "--config.pipeline.costs=forward=1,backward=2,input_gradient=1.2,weight_gradient=0.8 " in text
    assert "--config.mesh.pipe=2 --config.pipeline.num_microbatches=4" in text


def test_the_best_registered_schedule_stands_beside(capsys):
    arguments = ["--num_devices=4", "--num_microbatches=8", "--memory_bound=2.5", "--input_gradient=1.2"]
    lines = figures(printed(capsys, *arguments, "--weight_gradient=0.8", "--num_trials=150"))
    assert lines["found"] == ["best registered"]
    assert lines["schedule"][0] == "optimized"
    found, registered = map(float, lines["makespan"])
    assert found < registered
    name, placement = lines["schedule"][1], lines["placement"][1]
    known = build(name, num_devices=4, num_microbatches=8, input_gradient=1.2, weight_gradient=0.8)
    assert placement_name(known.placement) == placement
    costs = costs_of_stages(Costs(input_gradient=1.2, weight_gradient=0.8), known.placement)
    assert registered == pytest.approx(simulate(known, costs).makespan, rel=1e-5)
    assert f"{peak_activations(known).max():g} Ma" == lines["peak activations"][1]


def test_none_registered_fits(capsys):
    text = printed(capsys, *SMALL[:2], "--memory_bound=1", "--num_trials=5", "--placement=looped_3", *WHOLE)
    assert figures(text)["schedule"] == ["optimized", "none keeps the bound"]


def test_flags_say_the_question(capsys, asked):
    sizes = ["--activation_bytes=10", "--weight_gradient_bytes=4", "--replica_bytes=7", "--memory_bound=99"]
    times = ["--forward=1.5", "--backward=2.5", "--input_gradient=1.25", "--weight_gradient=0.75", "--transfer=0.1"]
    ratios = ["--slot_messages=20", "--gradient_messages=30"]
    more = ["--placement=v", "--placement=linear", "--clock=spmd", "--num_trials=9"]
    main([*SMALL[:2], *sizes, *times, *ratios, *more])
    ((problem, question),) = asked
    assert problem == Problem(2, 4, (zig_zag(2, 2), linear(2)))
    assert question == {
        "costs": Costs(1.5, 2.5, 1.25, 0.75, transfer=0.1, slot_messages=20, gradient_messages=30),
        "memory_bound": MemoryBound(99, activations=10, weight_gradient=4, replica=7),
        "clock": spmd_makespan,
        "num_trials": 9,
    }


def test_what_is_left_out_has_its_default(capsys, asked):
    main(SMALL[:3])
    ((problem, question),) = asked
    assert problem == Problem(2, 4)
    assert question == {"costs": Costs(), "memory_bound": MemoryBound(2), "clock": spmd_makespan, "num_trials": 1200}


# On the asynchronous clock the search wins here, on the program's v_half does.
SLOWER_IN_ROUNDS = ["--num_devices=4", "--num_microbatches=12", "--memory_bound=3.5"]
SLOWER_IN_ROUNDS += ["--input_gradient=1.3", "--weight_gradient=0.9", "--transfer=0.1"]


@pytest.mark.ci
def test_nothing_is_recommended_that_is_slower_in_the_program(capsys):
    judged = figures(printed(capsys, *SLOWER_IN_ROUNDS))
    assert judged["schedule"] == ["v_half"]
    lines = figures(printed(capsys, *SLOWER_IN_ROUNDS, "--clock=asynchronous"))
    assert lines["schedule"] == ["optimized", "v_half"]
    assert lines["weights"] == ["twice", "once"]
    found, registered = map(float, lines["SPMD clock"])
    assert found > registered == float(judged["SPMD clock"][0])


@pytest.mark.ci
def test_the_page_says_what_its_command_prints(capsys):
    page = " ".join((ROOT / "docs/schedules.md").read_text().split())
    said = re.search(r"finds a step of (\S+) forwards where V-Min, .*?, takes (\S+)\.", page)
    arguments = ["--num_devices=4", "--num_microbatches=16", "--memory_bound=2.5", "--placement=v"]
    lines = figures(printed(capsys, *arguments, "--input_gradient=1.2", "--weight_gradient=0.8"))
    assert said
    assert lines["SPMD clock"] == list(said.groups())
    assert lines["schedule"] == ["optimized", "v_min"]


# Every stage holds at least one layer.
def test_no_more_stages_than_layers(capsys):
    arguments = ["--num_devices=2", "--num_microbatches=4", "--memory_bound=3", "--num_trials=8"]
    assert int(figures(printed(capsys, *arguments, "--placement=w"))["stages"][0]) == 8
    text = printed(capsys, *arguments, "--num_layers=4")
    assert "searched: linear, v, looped, bidirectional, bidirectional_v\n" in text
    assert all(int(stages) <= 4 for stages in figures(text)["stages"])


def test_a_csv_is_offered_no_more_stages_than_layers(asked, tmp_path):
    main([*SMALL, "--num_layers=4", f"--output={tmp_path}/mine.csv"])
    ((problem, _),) = asked
    assert problem.placements == (linear(2), zig_zag(2, 2), looped(2, 2))


def test_a_bound_in_bytes_is_one_in_ma_times_their_size(capsys):
    in_bytes = ["--memory_bound=5e9", "--activation_bytes=2e9", "--replica_bytes=1e9"]
    text = printed(capsys, *SMALL[:2], *in_bytes, *WHOLE, "--placement=linear", "--num_trials=5")
    lines = figures(text)
    assert lines["schedule"] == ["1f1b"]
    assert lines["peak memory"] == [f"{5e9 / 2**30:.2f} GiB"]  # two microbatches and one replica
    assert "at most 4.66 GiB" in text


@pytest.mark.parametrize("start", ["name", "file"])
def test_it_starts_from_a_schedule_on_its_placement(capsys, asked, tmp_path, start):
    schedule = build("interleaved_1f1b", num_devices=2, num_microbatches=4, num_chunks=3)
    arguments = ["--schedule=interleaved_1f1b", *SMALL[:2], "--option=num_chunks=3"]
    if start == "file":
        (tmp_path / "interleaved_1f1b.csv").write_text(to_csv(schedule))
        arguments = [f"--schedule={tmp_path}/interleaved_1f1b.csv"]
    main([*arguments, "--memory_bound=3"])
    ((problem, _),) = asked
    assert problem == schedule
    assert "placements        looped_3, of interleaved_1f1b\n" in capsys.readouterr().out


def test_a_csv_is_offered_one_replica_and_says_so(capsys, asked, tmp_path):
    main([*SMALL, f"--output={tmp_path}/mine.csv"])
    ((problem, _),) = asked
    assert {placement.num_replicas for placement in problem.placements} == {1}
    assert len(problem.placements) == len([each for each in usual_placements(2) if each.num_replicas == 1])
    assert "one replica, since the output is a CSV" in capsys.readouterr().out


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_usual_placements_have_names(num_devices):
    names = [placement_name(placement) for placement in usual_placements(num_devices)]
    assert set(names) <= set(PLACEMENTS)
    assert placements_of(names, num_devices) == usual_placements(num_devices)
    assert placement_name(Placement(2, ((0, 1, 1, 0, 0, 1), (1, 0, 0, 1, 1, 0)))) == (
        "stages on devices 0 1 1 0 0 1, and mirrored"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SMALL[2:], "--num_devices is missing"),
        ([SMALL[0], SMALL[2]], "--num_microbatches is missing"),
        (SMALL[:2], "--memory_bound is missing"),
        ([*SMALL, "--num_device=2"], "Did you mean '--num_devices'?"),
        ([*SMALL, "--num_devices=0"], "--num_devices=0: 0 is not a positive integer"),
        ([*SMALL, "--memory_bound=0"], "'0' is not a size"),
        ([*SMALL, "--forward=0"], "'0' is not a size"),
        ([*SMALL, "--transfer=-1"], "'-1' is not a time"),
        ([*SMALL, "--num_trials=0"], "--num_trials=0: 0 is not a positive integer"),
        ([*SMALL, "--placement=u"], "--placement=u: value should be one of <linear|"),
        ([*SMALL, "--clock=wall"], "--clock=wall: value should be one of <asynchronous|spmd>"),
        ([*SMALL, "--option=num_chunks=2"], "--option=num_chunks=2 has no effect: it needs --schedule"),
        ([*SMALL, "--replica_bytes=1"], "--replica_bytes=1.0 has no effect: it needs --activation_bytes"),
        ([*SMALL, "--slot_messages=3"], "--slot_messages=3.0 has no effect: messages take no time without --transfer"),
        ([*SMALL, "--schedule=1f1"], "unknown schedule '1f1'. Did you mean '1f1b'?"),
        ([*SMALL, "--schedule=1f1b", "--placement=v"], "--placement=v has no effect: --schedule has its own placement"),
        (
            [*SMALL, "--schedule=mine.csv"],
            "has no effect: --schedule=mine.csv gives the whole schedule",
        ),
        (["--memory_bound=2", "--schedule=no/mine.csv"], "cannot read 'no/mine.csv'"),
    ],
)
def test_mistakes_are_told_in_plain_text(capsys, asked, arguments, message):
    assert message in refused(capsys, *arguments)
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output=mine.txt"], ["rule output-file", ".csv or .json", "another ending"]),
        (["--output=no/such/mine.csv"], ["rule output-file", "make the folder"]),
        (["--output=mine.csv", "--placement=v", "--placement=bidirectional_v"], ["rule output-form", "mine.json"]),
        (["--output=mine.csv", "--schedule=chimera"], ["'chimera' has num_replicas=2", "write it as JSON"]),
        (["--num_devices=3", "--placement=bidirectional"], ["rule even-devices", "num_devices=2 or 4"]),
        (["--num_layers=1"], ["num_layers=1 for 2 stages", "set num_layers=2 or more"]),
        (["--num_layers=3", "--placement=v"], ["num_layers=3 for 4 stages", "rule layer-per-stage"]),
        (["--num_layers=3", "--schedule=v_half"], ["num_layers=3 for 4 stages", "rule layer-per-stage"]),
    ],
)
def test_what_cannot_be_is_an_error_in_five_parts_before_the_search(capsys, asked, arguments, words):
    message = refused(capsys, *SMALL, *arguments)
    assert message.startswith("ScheduleError: ")
    for word in [*words, "  rule ", "  repair: "]:
        assert word in message
    assert not asked


def test_too_little_memory_is_an_error_in_five_parts(capsys):
    message = refused(capsys, *SMALL, "--memory_bound=0.5")
    assert "rule memory-bound" in message
    assert message.startswith("ScheduleError: memory_bound=0.5 for num_devices=2, ")
    assert "repair: set memory_bound=1 or more" in message


def test_a_schedule_with_a_shared_head_gives_a_file_for_a_config_with_one(tmp_path, capsys):
    given, written = tmp_path / "given.json", tmp_path / "found.json"
    write_schedule(vocabulary(build("1f1b", num_devices=2, num_microbatches=4)), str(given))
    times = ["--head_statistics=0.5", "--head_gradients=1"]
    small = [f"--schedule={given}", "--memory_bound=4", "--num_trials=20"]
    text = printed(capsys, *small, *times, f"--output={written}")
    assert "--config.pipeline.vocab_over_pipe=true" in text
    found = read_schedule(str(written))
    assert found.has_head_actions
    assert float(figures(text)["makespan"][0]) == pytest.approx(
        simulate(found, Costs(head_statistics=0.5, head_gradients=1.0)).makespan
    )


def test_times_of_a_head_need_one(capsys):
    message = refused(capsys, *SMALL, "--head_statistics=0.5")
    assert "head_statistics" in message
    assert "it needs a --schedule with S and T" in message
