"""What is wrong with a checkpoint, in five parts: where, what, rule, picture, repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxpipe.checkpoints.files import complete_steps
from jaxpipe.errors import CheckpointError, ConfigError

Shapes = Mapping[str, tuple[int, ...]]
_PARAMS = "params."
_SUMS_RULE = "  rule checkpoint-sums: the files of a checkpoint are those that its SHA256SUMS names, byte for byte\n"
_MOST_SHOWN = 20


def check_same(saved: Shapes, wanted: Shapes, *, folder: Path) -> None:
    """Raises ConfigError unless a checkpoint has the arrays that are wanted; it may have others too.

    Args:
        saved: shapes of its arrays, by name.
        wanted: those of the parameters, or of a whole state.
        folder: of the checkpoint.
    """
    different = sorted(name for name in wanted if saved.get(name) != wanted[name])
    different += sorted(name for name in saved if name.startswith(_PARAMS) and name not in wanted)
    params = [name for name in different if name.startswith(_PARAMS)]
    if params:
        name = params[0]
        raise ConfigError(
            f"the checkpoint {folder} is of another model: {len(params)} parameters differ\n"
            "  rule checkpoint-model: the parameters have the shapes that model.* and data.seq_len give\n"
            f"      {name.removeprefix(_PARAMS)}: {saved.get(name, 'none')} in the checkpoint, "
            f"{wanted.get(name, 'none')} in the config\n"
            "  repair: leave out the --config.model.* and --config.data.seq_len that the run did not have"
        )
    if different:
        name = different[0]
        raise ConfigError(
            f"the checkpoint {folder} has another train state: {len(different)} of its arrays differ\n"
            "  rule checkpoint-state: optimizer and counters are those that this version of jaxpipe gives the config\n"
            f"      {name}: {saved.get(name, 'none')} in the checkpoint, {wanted[name]} in the config\n"
            "  repair: resume with the optimizer.* of the run; to start from its parameters alone set\n"
            "      checkpoint.init_from to its folder and name another --workdir"
        )


def no_checkpoint(folder: Path, step: int | None) -> ConfigError:
    """There is none, or none of `step`."""
    there = complete_steps(folder)
    if step is not None and there:
        return ConfigError(
            f"no checkpoint of step {step} in {folder}\n"
            "  rule checkpoint-there: a run has checkpoints of some of its steps\n"
            f"      there: {', '.join(map(str, there))}\n"
            "  repair: name one of these, or none for the last"
        )
    return ConfigError(
        f"no checkpoint in {folder}\n"
        "  rule checkpoint-there: a run writes one every checkpoint.save_every steps, and at its end\n"
        "  repair: name the --workdir of a run that has come so far"
    )


def all_damaged(folder: Path, damaged: Mapping[int, str]) -> CheckpointError:
    """Every checkpoint that could be taken is damaged; what is wrong with each, by step."""
    picture = "".join(f"      {step}/{what}\n" for step, what in damaged.items())
    return CheckpointError(
        f"no undamaged checkpoint in {folder}\n"
        f"{_SUMS_RULE}{picture}"
        "  repair: put back the files from a copy; to start again from step 0 name another --workdir"
    )


def damaged_files(folder: Path, damaged: Mapping[int, Sequence[str]]) -> CheckpointError:
    """Some files of some checkpoints are damaged; all that is wrong, by step."""
    texts = [f"{step}/{what}" for step, found in damaged.items() for what in found]
    picture = "".join(f"      {text}\n" for text in texts[:_MOST_SHOWN])
    more = f"      and {len(texts) - _MOST_SHOWN} more\n" if len(texts) > _MOST_SHOWN else ""
    return CheckpointError(
        f"damaged files in {folder}: {len(texts)}, in checkpoints: {len(damaged)}\n"
        f"{_SUMS_RULE}{picture}{more}"
        "  repair: put back the files from a copy; a run passes over checkpoints that are damaged"
    )


def parts_missing(folder: Path, missing: Sequence[str]) -> CheckpointError:
    """A checkpoint that is being written in `folder` lacks what some processes have written elsewhere."""
    more = f", and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
    return CheckpointError(
        f"the checkpoint {folder} lacks the parts of some processes: {len(missing)}\n"
        "  rule checkpoint-shared: all processes of a run write into one folder, which all of them see\n"
        f"      not there: {', '.join(missing[:_MOST_SHOWN])}{more}\n"
        "  repair: name a --workdir on a file system that all machines share"
    )


def not_written(folder: Path, step: int, error: Exception, complete: Sequence[int]) -> CheckpointError:
    """The checkpoint of `step` failed with `error`."""
    lines = str(error).splitlines() or [type(error).__name__]
    return CheckpointError(
        f"the checkpoint of step {step} cannot be written to {folder}\n"
        "  rule checkpoint-written: there is room and permission for a checkpoint more than are kept\n"
        f"      {lines[0][:300]}\n"
        f"      complete there: {', '.join(f'step {good}' for good in complete) or 'none'}\n"
        "  repair: make room, or mend the folder, and start the same command again: it goes on from the last of these"
    )
