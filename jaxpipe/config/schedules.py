"""The schedule that a config asks for: of a method by its name or file, or one in a file by its path."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ml_collections import ConfigDict

from jaxpipe.errors import ConfigError, closest
from jaxpipe.schedules import REGISTRY, Schedule, build, read_schedule
from jaxpipe.schedules.files import ENDINGS, is_file_name
from jaxpipe.schedules.methods.option import parse_options
from jaxpipe.schedules.methods.registry import find_method, is_method_file


def build_schedule(config: ConfigDict) -> Schedule:
    """The schedule that `pipeline` and `mesh.pipe` ask for.

    Raises:
        ConfigError: a file's schedule is of another size than the config, or is given options.
        ScheduleError: it cannot be built or read, or breaks a rule.
    """
    pipeline = config.pipeline
    if is_file_name(pipeline.schedule) and pipeline.options:
        raise ConfigError(
            f"pipeline.options={pipeline.options!r} with pipeline.schedule={pipeline.schedule!r}\n"
            "  rule file-options: options are a generator's; on a schedule in a file they have no effect\n"
            "  repair: set pipeline.options='', or pipeline.schedule to a registered schedule"
        )
    schedule = named_schedule(pipeline.schedule, config.mesh.pipe, pipeline.num_microbatches, pipeline.options)
    _check_sizes(config, schedule)
    return schedule


def named_schedule(name: str, num_devices: int, num_microbatches: int, options: str) -> Schedule:
    """The schedule of a name, of these sizes; or of a file, of its own.

    Args:
        name: registered, or a path.
        options: as `pipeline.options` writes them.

    Raises:
        ScheduleError: it cannot be built or read, or breaks a rule.
    """
    return _read(name) if is_file_name(name) else _build(name, num_devices, num_microbatches, options)


def check_schedule_name(config: ConfigDict) -> None:
    """Raises an error unless `pipeline.schedule` is a registered name, a file with a method, or a schedule's file."""
    name = config.pipeline.schedule
    if is_method_file(name):
        find_method(name)
    elif name not in REGISTRY and not is_file_name(name):
        raise ConfigError(
            f"pipeline.schedule={name!r} is not known.{closest(name, list(REGISTRY))}\n"
            f"  rule field-choice: pipeline.schedule is one of {', '.join(sorted(REGISTRY))}, or the path of a file "
            f"whose name ends in {' or '.join(ENDINGS)}, or of a method's, which ends in .py\n"
            "  repair: set pipeline.schedule to one of these"
        )


@cache
def _build(name: str, num_devices: int, num_microbatches: int, options: str) -> Schedule:
    """Built once for all who ask: some schedules are searched for."""
    return build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options_of(options))


@cache
def _read(path: str) -> Schedule:
    """Read once for all who ask, so that they have the same one, even if the file changes meanwhile."""
    if not Path(path).is_file():
        raise ConfigError(
            f"pipeline.schedule={path!r} is no file\n"
            "  rule schedule-file: a schedule whose name ends as a file's is read from there\n"
            f"      looked from {Path.cwd()}\n"
            "  repair: give the path of a file; a run keeps a copy of its own, schedule.json in its folder"
        )
    return read_schedule(path)


def options_of(written: str) -> dict[str, object]:
    """What `pipeline.options` writes, as "num_chunks=3,eager_sync=false"."""
    return parse_options(option for option in written.split(",") if option)


def _check_sizes(config: ConfigDict, schedule: Schedule) -> None:
    path, mesh, pipeline = config.pipeline.schedule, config.mesh, config.pipeline
    sizes = (
        ("mesh.pipe", mesh.pipe, schedule.num_devices),
        ("pipeline.num_microbatches", pipeline.num_microbatches, schedule.num_microbatches),
    )
    if differ := [(name, ours, theirs) for name, ours, theirs in sizes if ours != theirs]:
        raise ConfigError(
            f"{', '.join(f'{name}={ours}' for name, ours, _ in differ)} with pipeline.schedule={path!r}\n"
            "  rule file-sizes: a schedule in a file is for its own numbers of devices and microbatches\n"
            f"      in the file: num_devices={schedule.num_devices}, num_microbatches={schedule.num_microbatches}\n"
            f"  repair: set {' and '.join(f'{name}={theirs}' for name, _, theirs in differ)}, or make a schedule of "
            "these sizes with jaxpipe.optimize"
        )
