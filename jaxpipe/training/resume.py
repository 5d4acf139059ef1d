"""Checks whether a run can be resumed: allowed changes of the config, and an equal schedule."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.config import build_schedule, expected_costs
from jaxpipe.config.base import AUTO, RunConfig
from jaxpipe.config.costs import are_decided, written_costs
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.errors import CheckpointError, ConfigError, first_of
from jaxpipe.files import local_path, write_whole
from jaxpipe.python_file import is_python_file
from jaxpipe.schedules import Costs, Schedule, to_json
from jaxpipe.schedules.spec import ScheduleSpec
from jaxpipe.training.run_folder import CONFIG, FAMILY, FLAGS, METRICS, SCHEDULE, config_from, kept_family, load
from jaxpipe.training.same_data import DATA

# Fields of the model that its parameters do not depend on.
FREE_OF_MODEL = ("dtype", "attention", "recompute", "embedding_dropout", "attention_dropout", "hidden_dropout")
FREE_OF_DATA = ("files", "tokenizer")  # may change once the run has a fingerprint of its tokens
_HEAD = "pipeline.vocab_over_pipe"
# Paths, which may differ from machine to machine, and what is decided with them; what they lead to is compared by its
# contents.
OF_A_MACHINE = {"data.files", "data.tokenizer", "pipeline.schedule", "pipeline.options", "pipeline.costs", _HEAD}
DECIDED = ("mesh.platform",)  # "auto" in one config, the decided platform in the other
DECIDES_SCHEDULE = {
    "mesh.pipe",
    "pipeline.schedule",
    "pipeline.options",
    "pipeline.num_microbatches",
    _HEAD,
}


# ---- The config


def with_kept_costs(path: Path, config: RunConfig) -> RunConfig:
    """`config` with the costs of the run in `path`.

    A resumed run keeps the schedule it began with, even if other costs would be measured now. A config with times of
    its own, or with other fields that decide the schedule, stays as it is. A run from before costs were decided had
    orders for I and W as long as F.
    """
    # Costs that a user names win over those of the run; a changed schedule is then told as a change.
    pipeline = config.pipeline
    has_times = ScheduleSpec(pipeline.schedule, config.mesh.pipe, pipeline.options).has_times
    if are_decided(pipeline.costs) or has_times:
        return config
    before = _before(path, config)
    if not _decide_the_same(before, config):
        return config
    costs = before.pipeline.costs
    if not are_decided(costs):
        costs = written_costs(Costs(backward=expected_costs(before).backward))
    return config.replaced({_HEAD: before.pipeline.vocab_over_pipe, "pipeline.costs": costs})


def with_kept_schedule(path: Path, config: RunConfig) -> RunConfig:
    """`config` with the schedule.json of the run in `path`, whose file or method may be changed, or gone.

    It stays as it is if another field that decides the schedule differs from the run's.
    """
    before = _before(path, config) if (path / SCHEDULE).is_file() else None
    if before is None or not _decide_the_same(before, config):
        return config
    costs = (config if are_decided(config.pipeline.costs) else before).pipeline.costs
    # A schedule from a file takes no options: the file already has what they decided.
    kept = {"pipeline.schedule": str(path / SCHEDULE), "pipeline.options": "", "pipeline.costs": costs}
    return config.replaced(kept | {_HEAD: before.pipeline.vocab_over_pipe})


def _decide_the_same(before: RunConfig, config: RunConfig) -> bool:
    """Whether the fields that decide the schedule are those of `before`; one that is "auto" was decided there."""
    then = before.by_path
    now = config.by_path
    return all(now[name] == then[name] or (name == _HEAD and now[name] == AUTO) for name in DECIDES_SCHEDULE)


def named_as_before(path: Path, config: RunConfig) -> RunConfig:
    """`config` with the schedule that the run in `path` was told, if `with_kept_schedule` has replaced it."""
    # Otherwise config.json would name schedule.json itself, and what the user named would be lost.
    if config.pipeline.schedule != str(path / SCHEDULE) or not (path / CONFIG).is_file():
        return config
    before = _before(path, config).pipeline
    return config.replaced({"pipeline.schedule": before.schedule, "pipeline.options": before.options})


def _before(path: Path, config: RunConfig) -> RunConfig:
    """The config of the run in `path` as it was told; no Python file is run that `config` does not name itself.

    Raises:
        ConfigError: its family is another Python file, whose fields are not known then.
    """
    saved = load(str(path))
    now = config.model.family
    family = saved["model"]["family"]
    # A config.json is data and may come from others: a Python file runs only if the command names it, too.
    if not is_python_file(family) or now == family:
        return RunConfig.of(config_from(str(path), saved, family=family))
    # The run's own copy of the file counts as the file.
    if now != kept_family(path, family):
        raise _refused(path, [_change("model.family", family, now)])
    return RunConfig.of(config_from(str(path), saved, family=now))


def _is_other_family(path: Path, family: str) -> bool:
    """Whether the run in `path` keeps another file of its family; False for an old run that keeps none."""
    kept = path / FAMILY
    # A family is FILE:NAME; only the file is compared.
    return kept.is_file() and kept.read_bytes() != local_path(family.partition(":")[0]).read_bytes()


def config_changes(path: Path, config: RunConfig) -> list[str]:
    """The fields in which `config` differs from that of the run in `path`, as "pipeline.schedule: 1f1b -> bpipe".

    A schedule whose actions changed under the same fields counts too, for example after a change of its file.

    Raises:
        ConfigError: a changed field decides the model or the order of the data.
    """
    config = RunConfig.of(config)
    before = _before(path, config)
    kept = config.pipeline.schedule == str(path / SCHEDULE)
    config = named_as_before(path, config)
    # First, since another family has other fields, which could not be compared below.
    if before.model.family != config.model.family:
        raise _refused(path, [_change("model.family", before.model.family, config.model.family)])
    then = before.by_path
    now = config.by_path
    differ = {name: _change(name, value, now[name]) for name, value in then.items() if value != now[name]}
    # With a fingerprint of the tokens, files may move: their contents are compared instead of their paths.
    refused = [words for name, words in differ.items() if _is_fixed(name, knows_data=(path / DATA).is_file())]
    if refused:
        raise _refused(path, refused)
    changes = [words for name, words in differ.items() if name not in DECIDED]
    if kept:
        return [*changes, f"pipeline.schedule: {before.pipeline.schedule} is not there, {path / SCHEDULE} is"]
    if is_python_file(config.model.family) and _is_other_family(path, config.model.family):
        changes.append(f"model.family: {config.model.family} is not as it was before")
    if not differ.keys() & DECIDES_SCHEDULE and has_other_schedule(path, build_schedule(config)):
        changes.append(f"pipeline.schedule: {config.pipeline.schedule} has other actions than before")
    return changes


def write_flags(path: Path, flags: list[str]) -> None:
    """Writes the XLA flags that a run is compiled with into its folder, whole."""
    write_whole(path / FLAGS, "".join(f"{flag}\n" for flag in flags))


def flags_change(path: Path, flags: list[str]) -> list[str]:
    """The XLA flags in which `flags` differ from those of the run in `path`, as "XLA flags: a=1 -> a=2"; none if equal.

    Other flags may sum in another order and take other memory. A run from before flags were written has none to tell.
    """
    file = path / FLAGS
    if not file.is_file():
        return []
    before = file.read_text(errors="replace").splitlines()
    # In the order of each, so that a flag given twice, of which the last counts, stays so.
    gone, new = ([flag for flag in ours if flag not in theirs] for ours, theirs in ((before, flags), (flags, before)))
    return [_change("XLA flags", *(" ".join(listed) or "none" for listed in (gone, new)))] if gone or new else []


def check_no_checkpoint_lost(path: Path) -> None:
    """Raises CheckpointError for a run without checkpoints that must have written one.

    A run writes the row of a step before the step's checkpoint, and starts its second checkpoint only when the first is
    complete; one that could write none, and said so, is refused too.
    """
    # Read raw: this check must not run a family's Python file.
    every = load(str(path))["checkpoint"]["save_every"]
    rows = path / METRICS
    num_rows = sum(1 for _ in rows.open("rb")) if rows.is_file() else 0
    # Twice: the second checkpoint starts only when the first is complete, so with more rows one must be there.
    if every and num_rows > 2 * every:
        raise CheckpointError(
            f"--workdir={path} holds a run of {num_rows} steps, and none of its checkpoints",
            rule="checkpoints-there: a run is resumed from a checkpoint; from step 0 only if it has written none",
            picture=f"checkpoint.save_every={every}; {path / CHECKPOINTS} has no complete one",
            repair="put the checkpoints back (is the disk mounted?), or name another --workdir for a new run",
        )


def _is_fixed(name: str, *, knows_data: bool) -> bool:
    if name in ("optimizer.name", "optimizer.error_feedback"):  # the state of one is none of another
        return True
    section, field = name.split(".")
    free = {"model": FREE_OF_MODEL, "data": FREE_OF_DATA if knows_data else ()}
    return section in free and field not in free[section]


def _change(name: str, before: object, now: object) -> str:
    return f"{name}: {before} -> {now}"


def _refused(path: Path, refused: list[str]) -> ConfigError:
    return ConfigError(
        f"--workdir={path} holds a run of another model or on other data",
        rule=(
            "same-run: a resumed run keeps its model, which shapes its parameters, and its data, whose batches its"
            " position counts"
        ),
        picture="\n".join(refused),
        repair=(
            "name another --workdir, or leave these fields as they were; checkpoint.init_from starts a new run from"
            " the parameters"
        ),
    )


# ---- The schedule


def write_run_schedule(path: Path, schedule: Schedule) -> None:
    """Writes the schedule into the run's folder, whole, so that a changed schedule file is noticed later."""
    write_whole(path / SCHEDULE, to_json(schedule))


def has_other_schedule(path: Path, schedule: Schedule) -> bool:
    """Whether the run in `path` used another schedule; False for an old run that did not record it."""
    saved = path / SCHEDULE
    return saved.is_file() and saved.read_bytes() != to_json(schedule).encode()


def check_same_config(processes: ProcessGroup, config: RunConfig) -> None:
    """Checks that this process has the config of process 0, but for paths of files.

    Raises:
        ConfigError: a field differs, so that stages would train in different ways, or wait for each other forever.
    """
    # As JSON text, so that 1 and 1.0, or True and 1, count as different.
    here = {name: json.dumps(value) for name, value in RunConfig.of(config).by_path.items() if name not in OF_A_MACHINE}
    first = json.loads(processes.agree("config", json.dumps(here)))
    differ = [
        f"{name}: {first.get(name)} in process 0, {here.get(name)} here"
        for name in sorted(first.keys() | here.keys())
        if first.get(name) != here.get(name)
    ]
    if differ:
        raise ConfigError(
            f"process {processes.index} has another config than process 0",
            rule="same-config: all processes of a run have one config",
            picture=first_of(differ),
            repair="start every process with the same command and the same config file",
        )


def check_same_schedule(processes: ProcessGroup, schedule: Schedule, costs: str) -> None:
    """Raises ConfigError unless process 0 has the same schedule and `pipeline.costs`; other programs would deadlock."""
    # A digest, since a schedule may have megabytes and every process sends it.
    digest = hashlib.sha256(f"{costs}\n{to_json(schedule)}".encode()).hexdigest()
    if digest != processes.agree("schedule", digest):
        raise ConfigError(
            f"process {processes.index} has another schedule than process 0",
            rule="same-schedule: all processes of a run execute one schedule",
            picture=(
                f"here: {schedule.name}, num_devices={schedule.num_devices},"
                f" num_microbatches={schedule.num_microbatches}, made for costs {costs!r}"
            ),
            repair=(
                "start every process with the same command on the same kind of GPU and, where pipeline.schedule"
                " or pipeline.costs is a file, with the same file"
            ),
        )
