"""The config file of a row of a plan, which `train` and `compile` run.

Goes in: the config that was planned for, and the row. Comes out: a Python file whose docstring has the predicted
numbers, and which sets every field that differs from its default.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from jaxpipe.cluster.axes import describe_mesh
from jaxpipe.command_line import write_output
from jaxpipe.config import base_config, check
from jaxpipe.config.base import AUTO, RunConfig
from jaxpipe.config.costs import written_costs
from jaxpipe.config.model import family_of
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Setting
from jaxpipe.estimate.plan.rows import Row
from jaxpipe.files import local_path
from jaxpipe.sharding import NONE_KEPT
from jaxpipe.units import MIB, gib


def config_of(config: RunConfig, setting: Setting) -> RunConfig:
    """`config` with pipeline, mesh, recomputation and error feedback of `setting`; checked if it tells its sizes."""
    is_even = len(set(setting.layers_per_stage)) == 1
    planned = RunConfig.of(config).replaced(
        {
            "model.recompute": setting.recompute,
            "pipeline.schedule": setting.schedule_name,
            "pipeline.options": setting.options,
            "pipeline.overlap": setting.overlap,
            "pipeline.costs": written_costs(setting.costs) if setting.costs else AUTO,
            "pipeline.num_microbatches": setting.num_microbatches,
            "pipeline.layers_per_stage": AUTO if is_even else ",".join(map(str, setting.layers_per_stage)),
            "pipeline.embedding_layers": 0.0,
            "pipeline.head_layers": 0.0,
            "pipeline.vocab_over_pipe": "true" if setting.vocab_over_pipe else "false",
            **{f"mesh.{axis}": size for axis, size in setting.axes.items()},
            "mesh.order": setting.order,
            "mesh.shard": setting.shard.value,
            "mesh.keep_gathered": f"{setting.keep_bytes / MIB:.3f}MiB" if setting.keep_bytes else NONE_KEPT,
            "mesh.keep_sums": f"{setting.keep_sums_bytes / MIB:.3f}MiB" if setting.keep_sums_bytes else NONE_KEPT,
            "mesh.platform": AUTO,
            "optimizer.error_feedback": setting.error_feedback,
        }
    )
    if not family_of(planned).is_given:  # whose sizes `fit` reads off the model before it checks them
        check(planned, name="the planned config")
    return planned


def file_and_row(written: str) -> tuple[str, int]:
    """The file and the row, counted from 1, of `--write_config=FILE` or `FILE:ROW`.

    Example:
        >>> file_and_row("planned.py"), file_and_row("runs/planned.py:4")
        (('planned.py', 1), ('runs/planned.py', 4))
    """
    path, colon, row = written.rpartition(":")
    return (path, int(row)) if colon and row.isdecimal() and row.isascii() else (written, 1)


def check_row(written: str, row: int, num_rows: int, *, of: str) -> None:
    """Raises ConfigError unless there is such a row to write.

    Args:
        written: the flag's text.
        row: the row that it names, from 1.
        num_rows: the rows that there are, or that are asked for.
        of: what has so many rows.
    """
    if not 1 <= row <= num_rows:
        rows = "only row 1" if num_rows == 1 else f"rows 1 to {num_rows}"
        raise ConfigError(
            f"--write_config={written} asks for row {row}, and {of} has {rows}",
            rule="plan-row: FILE:ROW writes a row of the table, counted from 1; FILE alone writes row 1",
            repair=f"give a ROW of 1 to {num_rows}" + (f", or --top={row}" if row > num_rows else ""),
        )


def check_writable(path: str, *, overwrite: bool) -> None:
    """Raises ConfigError unless a config can be written there, called before the search, which takes a while."""
    file = local_path(path)
    if file.suffix != ".py" or not os.access(file.parent, os.W_OK | os.X_OK) or file.is_dir():
        raise ConfigError(
            f"cannot write --write_config={path}",
            rule="plan-output: its name ends in .py; its folder exists and can be written to",
            repair="make the folder, or give another path, for example --write_config=planned.py",
        )
    if file.exists() and not overwrite:
        raise ConfigError(
            f"--write_config={path} exists already",
            rule="plan-overwrite: a file is replaced only if --overwrite is given",
            repair="give another path, or add --overwrite",
        )


def write_config(path: str, config: RunConfig, row: Row, *, command: str) -> None:
    """Writes the config of `row`.

    Args:
        path: path of the file, checked by `check_writable`.
        config: the config that was planned for.
        row: the row of the plan.
        command: the command that planned it, for the docstring.
    """
    write_output(config_text(path, config, row, command=command), path)


def config_text(path: str, config: RunConfig, row: Row, *, command: str) -> str:
    """The text of a config file: a docstring with the prediction, and every field that differs from its default."""
    default = RunConfig.of(base_config(config.model.family)).by_path
    planned = config_of(config, row.setting).by_path
    lines = [f"    config.{path} = {_written(planned[path])}" for path in default if planned[path] != default[path]]
    first = f'    config = base_config("{config.model.family}")'
    return "\n".join([*_docstring(path, row, command), *_BEGIN, first, *lines, *_END])


_BEGIN = (
    "",
    "from ml_collections import ConfigDict",
    "",
    "from jaxpipe.config import base_config",
    "",
    "",
    'def get_config(arg: str = "") -> ConfigDict:',
    '    """The config; it takes no argument."""',
    "    del arg",
)


_END = ("    return config", "")


def _docstring(path: str, row: Row, command: str) -> list[str]:
    setting = row.setting
    estimate = row.estimate
    hardware = setting.topology.hardware
    stem = Path(path).stem
    return [
        f'"""{stem}: {setting.schedule_name}, planned for {setting.topology}.',
        "",
        f"Command:  python -m jaxpipe.train --config={_in_docstring(path)} --workdir=runs/{stem}",
        f"Hardware: {setting.num_gpus} x {hardware.description} ({describe_mesh(setting.axes)})",
        f"Time:     {estimate.step_s:.3f} s a step, {estimate.samples_per_s:.2f} sequences/s, as predicted",
        f"Number:   MFU {estimate.mfu:.1%}, bubble ratio {estimate.bubble_ratio:.3f},"
        f" {gib(row.held.total, '.1f')} of {gib(hardware.memory_bytes, '.1f')} GiB of a GPU, as predicted",
        f"Source:   {_in_docstring(command)}",
        '"""',
    ]


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _in_docstring(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
