"""The command: which checkpoints a run has, and whether their files are as they were written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.checkpoints import files
from jaxpipe.checkpoints.checks import damaged_files, no_checkpoint
from jaxpipe.checkpoints.files import CHECKPOINTS, About
from jaxpipe.checkpoints.keep import Keep
from jaxpipe.checkpoints.sums import damages
from jaxpipe.errors import JaxpipeError

_HEAD = ("step", "complete", "MiB", "written (UTC)", "held-out loss", "kept because of")
_SET_ASIDE = "set aside"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 for anything that the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m jaxpipe.checkpoints", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the checkpoints of a run").add_argument("workdir", help="folder of the run")
    verify = commands.add_parser("verify", help="compare all files of all checkpoints with their SHA256SUMS")
    verify.add_argument("workdir", help="folder of the run")
    flags = parser.parse_args(arguments)
    folder = Path(flags.workdir).expanduser().absolute() / CHECKPOINTS
    try:
        if flags.command == "list":
            print(list_checkpoints(folder))
        else:
            verify_checkpoints(folder)
    except JaxpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def list_checkpoints(folder: Path) -> str:
    """A table of all that stands in `folder`, as far as it is not deleted meanwhile.

    Raises:
        ConfigError: there is nothing.
    """
    abouts = {step: files.read_about(folder / str(step)) for step in files.complete_steps(folder)}
    others = dict.fromkeys(files.set_aside_paths(folder), _SET_ASIDE)
    others |= dict.fromkeys(files.unfinished(folder), "half-written, or half-deleted")
    if not abouts and not others:
        raise no_checkpoint(folder, None)
    losses = {step: about.heldout_loss if about else None for step, about in abouts.items()}
    kept = _keep(abouts).reasons(losses)
    rows = [_row(folder / str(step), about, kept[step]) for step, about in abouts.items()]
    rows += [(path.name, "no", _mebibytes(path), "", "", what) for path, what in others.items()]
    rows = [_HEAD, *(row for row in rows if (folder / row[0]).is_dir())]
    if len(rows) == 1:
        return list_checkpoints(folder)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(row[-1] == _SET_ASIDE for row in rows):
        lines.append("nothing deletes what is set aside: delete it when you do not need it")
    return "\n".join(lines)


def verify_checkpoints(folder: Path) -> None:
    """Prints a line for each complete checkpoint in `folder`.

    Raises:
        ConfigError: there is none.
        CheckpointError: some file is damaged.
    """
    steps, wrong = files.complete_steps(folder), {}
    if not steps:
        raise no_checkpoint(folder, None)
    for step in steps:
        found = damages(folder / str(step))
        if found and not (folder / str(step)).is_dir():
            print(f"step {step}: deleted meanwhile by its run", flush=True)
            continue
        print(f"step {step}: {f'damaged files: {len(found)}' if found else 'undamaged'}", flush=True)
        if found:
            wrong[step] = found
    if wrong:
        raise damaged_files(folder, wrong)


def _row(path: Path, about: About | None, reasons: Sequence[str]) -> tuple[str, ...]:
    written = about.written.removesuffix("+00:00") if about else "unknown"
    loss = f"{about.heldout_loss:.4f}" if about and about.heldout_loss is not None else ""
    return path.name, "yes", _mebibytes(path), written, loss, ", ".join(reasons)


def _mebibytes(path: Path) -> str:
    return f"{files.num_bytes(path) / 2**20:.1f}"


def _keep(abouts: dict[int, About | None]) -> Keep:
    """What the newest config says."""
    configs = [about.config for about in abouts.values() if about and about.config]
    fields = configs[-1].get("checkpoint", {}) if configs else {}
    return Keep(**{name: fields[f"keep_{name}"] for name in ("last", "every", "best") if f"keep_{name}" in fields})
