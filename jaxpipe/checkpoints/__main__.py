"""Lists or verifies the checkpoints of a run.

    python -m jaxpipe.checkpoints list DIR
    python -m jaxpipe.checkpoints verify DIR

DIR is the --workdir of a run. `verify` compares every file with its SHA256SUMS; it exits with 2 if one is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from absl.flags import FlagValues

from jaxpipe.checkpoints import files
from jaxpipe.checkpoints.checks import damaged_files, no_checkpoint
from jaxpipe.checkpoints.files import CHECKPOINTS, About, Keep, damages
from jaxpipe.command_line import main_of, run
from jaxpipe.files import local_path
from jaxpipe.units import mib

_HEAD = ("step", "complete", "MiB", "written (UTC)", "held-out loss", "kept because of")
_SET_ASIDE = "set aside"


def define_flags(values: FlagValues) -> None:
    """Defines the command and the folder of the run."""
    flags.DEFINE_enum(
        "command", None, ["list", "verify"], "Shows the checkpoints, or compares all their files.", values
    )
    flags.DEFINE_string("workdir", None, "Folder of a run.", values)


def execute(values: FlagValues) -> None:
    """Lists or verifies the checkpoints of one run."""
    folder = local_path(values.workdir).absolute() / CHECKPOINTS
    if values.command == "list":
        print(list_checkpoints(folder))
    else:
        verify_checkpoints(folder)


def list_checkpoints(folder: Path) -> str:
    """A table of all checkpoints in `folder`, less those deleted meanwhile; ConfigError if there is none."""
    abouts = {step: files.read_about(folder / str(step)) for step in files.complete_steps(folder)}
    # A run may save, set aside and delete while this reads: what has no folder any more is left out below.
    others = dict.fromkeys(files.set_aside_paths(folder), _SET_ASIDE)
    others |= dict.fromkeys(files.unfinished(folder), "half-written or half-deleted")
    if not abouts and not others:
        raise no_checkpoint(folder, None)
    losses = {step: about.heldout_loss if about else None for step, about in abouts.items()}
    kept = _keep(abouts).reasons(losses)
    rows = [_row(folder / str(step), about, kept[step]) for step, about in abouts.items()]
    rows += [(path.name, "no", _mebibytes(path), "", "", what) for path, what in others.items()]
    rows = [_HEAD, *(row for row in rows if (folder / row[0]).is_dir())]
    if len(rows) == 1:
        # All checkpoints were deleted between the two looks at the folder, so there are newer ones to list.
        return list_checkpoints(folder)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(row[-1] == _SET_ASIDE for row in rows):
        lines.append("nothing deletes what is set aside: delete it yourself when you no longer need it")
    return "\n".join(lines)


def verify_checkpoints(folder: Path) -> None:
    """Prints which checkpoints are undamaged; CheckpointError at its end unless all are, ConfigError without any."""
    steps = files.complete_steps(folder)
    wrong = {}
    if not steps:
        raise no_checkpoint(folder, None)
    for step in steps:
        damaged = damages(folder / str(step))
        # A checkpoint that is being deleted lacks files too, and is not damaged.
        if damaged and not (folder / str(step)).is_dir():
            print(f"step {step}: deleted meanwhile by its run", flush=True)
            continue
        print(f"step {step}: {f'damaged files: {len(damaged)}' if damaged else 'undamaged'}", flush=True)
        if damaged:
            wrong[step] = damaged
    if wrong:
        raise damaged_files(folder, wrong)


def _row(path: Path, about: About | None, reasons: Sequence[str]) -> tuple[str, ...]:
    # Always UTC, as the table's head says.
    written = about.written.removesuffix("+00:00") if about else "unknown"
    loss = f"{about.heldout_loss:.4f}" if about and about.heldout_loss is not None else ""
    return path.name, "yes", _mebibytes(path), written, loss, ", ".join(reasons)


def _mebibytes(path: Path) -> str:
    return mib(files.num_bytes(path), ".1f")


def _keep(abouts: dict[int, About | None]) -> Keep:
    """The rule of the newest checkpoint's config, since a run may change its rule when it resumes."""
    configs = [about.config for about in abouts.values() if about and about.config]
    fields = configs[-1].get("checkpoint", {}) if configs else {}
    return Keep(**{name: fields[f"keep_{name}"] for name in ("last", "every", "best") if f"keep_{name}" in fields})


main = main_of(
    run,
    execute,
    define_flags=define_flags,
    usage=__doc__,
    positional=("command", "workdir"),
    required={"command": "list", "workdir": "runs/first"},
)

if __name__ == "__main__":
    sys.exit(main())
