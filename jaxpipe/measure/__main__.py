"""Times the parts of a step on the device at hand, for predictions: layer, embedding, head, update and link.

    python -m jaxpipe.measure --config=configs/bench_cpu.py [--output=costs.json [--overwrite]]
        [--microbatch_sizes=1,2,4] [--num_repeats=5] [--num_layers=2] [--num_processes=P] [--config.X=Y ...]
    python -m jaxpipe.measure --config=configs/bench_cpu.py --mock=NODESxGPUS --stage=S [--collectives=local]
        [--output=costs.json [--overwrite]] [--num_repeats=5] [--config.X=Y ...]

The command times the compiled program with three stages of a few layers each on one device (on those that share
kernels), a few of its actions at a time. The command uses the config's model, data, optimizer and the sizes of mesh
that split kernels, not its schedule. With pipeline.vocab_over_pipe=true it also times S and T of a head that is split
over `mesh.pipe` devices. Times are medians of wall time. With --num_processes=P, P processes of one core and one thread
measure at once, as if they computed in one pipeline, and the link is between two of them.

With --mock the command times the config's whole step instead, its own schedule and mesh included, on one device of a
cluster that is not there: the one at index S of pipe, and 0 of every other axis. One GPU is needed, or none.
Messages of others are left out, and so is waiting for them: the time is to be compared with the device's busy time by
the schedule's clock, not with the time of a step.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import jax
from absl import flags
from absl.flags import FlagValues
from ml_collections import config_flags

from jaxpipe.cluster.axes import KERNEL_AXES, written
from jaxpipe.command_line import check_unused, main_of
from jaxpipe.config import check
from jaxpipe.config.base import PipelineSection, RunConfig
from jaxpipe.config.command_line import config_of, define_config_file, run
from jaxpipe.config.model import vocab_pipe
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Times
from jaxpipe.estimate.measured import Measurement
from jaxpipe.files import local_path, write_whole
from jaxpipe.measure import mock, pinned
from jaxpipe.measure.measurement import devices_to_measure, measure


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines the flags of the measurement."""
    define_config_file(values, arguments)
    flags.DEFINE_string("output", None, "File to write the times to, for example costs.json.", values)
    flags.DEFINE_boolean("overwrite", False, "Whether to overwrite an existing file.", values)
    flags.DEFINE_list(
        "microbatch_sizes", None, "Sequences of a microbatch, each size to measure; by default the config's.", values
    )
    flags.DEFINE_integer("num_repeats", 5, "Repeats of each timing.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "num_layers", 2, "Layers of each of the three stages.", lower_bound=1, upper_bound=1000, flag_values=values
    )
    pinned.define_flags(values)
    mock.define_flags(values)


def execute(values: FlagValues) -> None:
    """Runs one measurement and writes its result."""
    if ":" in config_of(values).model.recompute:
        raise ConfigError(
            f"model.recompute={config_of(values).model.recompute!r} is measured",
            rule="measured-recompute: a file has the times of layers that are all alike",
            repair="measure with --config.model.recompute=none, and once more with full; plan takes both files",
        )
    if values.output is None:
        check_unused(values, ["overwrite"], "it needs --output")
    if values.mock is not None:
        if values.output is not None:
            check_output(values.output, overwrite=values.overwrite)
        content = mock.execute(values)
        if values.output is not None:
            write(content, values.output)
        return
    # A flag without effect is an error in every command.
    check_unused(values, mock.FLAGS, "it needs --mock")
    # Before the check: a config for 64 devices is measured on one, where its pipeline would not be legal.
    config = _without_pipeline(config_of(values))
    check(config, name=config_flags.get_config_filename(values["config"]))
    sizes = sizes_of(values.microbatch_sizes, config)
    # A launched process has the same command line as its launcher, and only tells its result.
    if pinned.is_launched(values):
        pinned.join(values)
        pinned.tell(_measure(values, config, sizes).to_json())
        return
    if values.output is not None:
        check_output(values.output, overwrite=values.overwrite)
    if values.num_processes > 1:
        # Before processes are started: each would report the same error.
        if config.mesh.num_kernel_parts > 1:
            raise ConfigError(
                f"--num_processes={values.num_processes} with {written(config.mesh.axes, KERNEL_AXES, prefix='mesh.')}",
                rule="measured-processes: each of several processes has one device, and no layer is split over devices",
                repair="leave --num_processes out, or set " + ", ".join(f"--config.mesh.{a}=1" for a in KERNEL_AXES),
            )
        program = ("-m", "jaxpipe.measure")
        content = pinned.launch(program, sys.argv[1:], num_processes=values.num_processes)
        measurement = Measurement.from_json(content)
    else:
        measurement = _measure(values, config, sizes)
    print(to_text(measurement))
    # After printing: a user sees what was measured even if a file of it would be of no use.
    _check_resolved(measurement)
    if values.output is not None:
        write(measurement.to_json(), values.output)


def _without_pipeline(config: RunConfig) -> RunConfig:
    """`config` with what fits every model: all of a pipeline but microbatches, a split head and pairs has no effect."""
    is_split = vocab_pipe(config) > 1
    section = PipelineSection(
        num_microbatches=config.pipeline.num_microbatches,
        vocab_over_pipe="true" if is_split else "false",
        overlap=config.pipeline.overlap,
    )
    # Times of layers do not depend on the pipeline; of a split head they do. Schedules without flush alone have error
    # feedback.
    pipe = config.mesh.pipe if is_split else 1
    return replace(config, pipeline=section).replaced({"mesh.pipe": pipe, "optimizer.error_feedback": False})


def sizes_of(written: list[str] | None, config: RunConfig) -> list[int]:
    """The microbatch sizes of the flag, by default the config's; ConfigError unless each is from 1 to 99999."""
    if written is None:
        return [RunConfig.of(config).microbatch_size]
    # At most five digits, as the error says: larger ones fit no device, and int() reads any number of digits.
    wrong = [size for size in written if not re.fullmatch("[1-9][0-9]{0,4}", size)]
    if wrong or not written:
        raise ConfigError(
            f"--microbatch_sizes={','.join(written)}",
            rule="microbatch-sizes: whole numbers from 1 to 99999, with commas between them",
            picture=f"wrong: {', '.join(map(repr, wrong)) or 'there is none'}",
            repair="write for example --microbatch_sizes=1,2,4",
        )
    return [int(size) for size in written]


def _measure(values: FlagValues, config: RunConfig, sizes: list[int]) -> Measurement:
    # A launched process has a device of its own and must not choose again.
    devices = devices_to_measure(config) if values.process_id is None else jax.local_devices()
    return measure(
        config, devices, microbatch_sizes=sizes, num_layers=values.num_layers, num_repeats=values.num_repeats
    )


# Output: a table, and costs.json


def check_output(path: str, *, overwrite: bool) -> None:
    """Raises ConfigError if `path` cannot be written; called before anything is timed."""
    file = local_path(path)
    folder = file.parent
    for is_wrong, said, repair in (
        (not folder.is_dir(), f": there is no folder {str(folder)!r}", "make the folder, or name another file"),
        (
            not os.access(folder, os.W_OK | os.X_OK),
            ": its folder may not be written to",
            "name another",
        ),
        (file.is_dir(), " is a folder", f"name a file, as --output={file / 'costs.json'}"),
        (file.exists() and not overwrite, " is there already", "add --overwrite, or name another file"),
    ):
        if is_wrong:
            raise ConfigError(
                f"--output={path}{said}",
                rule="output: a file in a folder that can be written to; one that is there is overwritten on request",
                picture=f"looked from {os.getcwd()}",
                repair=repair,
            )


def _check_resolved(measurement: Measurement) -> None:
    """Raises ConfigError if the measured times cannot be used, since noise was larger than one of them."""
    try:
        measurement.check()
    except ValueError as error:
        raise ConfigError(
            f"these times cannot be used: {error}",
            rule="measured-times: a forward takes more than no time; less than the noise is counted as none",
            repair="measure again with nothing else running, with more --num_repeats or a larger microbatch size",
        ) from error


def write(content: dict[str, Any], path: str) -> None:
    """Writes what was measured as JSON, the whole file or nothing."""
    write_whole(local_path(path), json.dumps(content, indent=2) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def to_text(measurement: Measurement) -> str:
    """The measurement as a table: milliseconds, a column for each microbatch size."""
    identity = measurement.identity
    subject = measurement.subject
    sizes = list(measurement.times)
    # Times of S and T are None unless the head is split.
    names = [field.name for field in fields(Times) if getattr(measurement.times[sizes[0]], field.name) is not None]
    lines = [
        f"device            {identity['device_kind']}, {identity['num_processes']} processes at once;"
        f" jax {identity['jax_version']}",
        f"model             {subject['family']} of hidden {subject['hidden']}, seq_len {subject['seq_len']},"
        f" {subject['dtype']}, recompute {subject['recompute']}, attention {subject['attention']},"
        + "".join(f" {axis} {subject[axis]}" for axis in KERNEL_AXES),
        f"{'milliseconds, of a microbatch of':34}" + "".join(f"{size:>12}" for size in sizes),
    ]
    for name in names:
        row = "".join(f"{1e3 * getattr(measurement.times[size], name):12.4g}" for size in sizes)
        lines.append(f"  {name.removesuffix('_s').replace('_', ' '):32}{row}")
    spreads = "".join(f"{100 * measurement.spread_ratio[size]:10.1f} %" for size in sizes)
    lines.append(f"  {'repeats apart (quartiles)':32}{spreads}")
    link = "not measured: there is one device"
    if measurement.link is not None:
        link = f"{1e6 * measurement.link.latency_s:.4g} us and {measurement.link.bytes_per_s / 1e9:.4g} GB/s, one way"
    lines.append(f"link              {link}")
    return "\n".join(lines)


main = main_of(run, execute, define_flags=define_flags, usage=__doc__, required={"config": "configs/bench_cpu.py"})

if __name__ == "__main__":
    sys.exit(main())
