"""The errors of checkpoints: another model, missing, damaged, incomplete, not written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpipe.checkpoints.average import AVERAGE
from jaxpipe.checkpoints.files import complete_steps
from jaxpipe.errors import CheckpointError, ConfigError, first_of

Shapes = Mapping[str, tuple[int, ...]]
PARAMS = "params."  # before the path of a parameter, in the names of arrays
_SUMS_RULE = "checkpoint-sums: the files of a checkpoint are those that its SHA256SUMS names, byte for byte"
_MOST_SHOWN = 20


def check_same(saved: Shapes, wanted: Shapes, *, folder: Path) -> None:
    """Raises ConfigError unless a checkpoint has the wanted arrays, with their shapes; it may have others too."""
    # The checkpoint may have more, but not of the parameters: then it is another model.
    different = sorted(name for name in wanted if saved.get(name) != wanted[name])
    different += sorted(name for name in saved if name.startswith(PARAMS) and name not in wanted)
    params = [name for name in different if name.startswith(PARAMS)]
    if params:
        name = params[0]
        raise ConfigError(
            f"the checkpoint {folder} is of another model: {len(params)} parameters differ",
            rule="checkpoint-model: the parameters have the shapes that model.* and data.seq_len give",
            picture=(
                f"{name.removeprefix(PARAMS)}: {saved.get(name, 'none')} in the checkpoint, "
                f"{wanted.get(name, 'none')} in the config"
            ),
            repair="leave out the --config.model.* and --config.data.seq_len that the run did not have",
        )
    if different:
        name = different[0]
        raise ConfigError(
            f"the checkpoint {folder} has another train state: {len(different)} of its arrays differ",
            rule="checkpoint-state: optimizer and counters are those that this version of jaxpipe gives the config",
            picture=f"{name}: {saved.get(name, 'none')} in the checkpoint, {wanted[name]} in the config",
            repair=(
                "resume with the optimizer.* of the run; to start from its parameters alone"
                " set\n      checkpoint.init_from to its folder and name another --workdir"
            ),
        )


def check_average(saved: Shapes, *, folder: Path) -> None:
    """Raises ConfigError unless a checkpoint, whose parameters are those wanted, has an average of them, too."""
    if not any(name.startswith(AVERAGE) for name in saved):
        raise ConfigError(
            f"--average, and the checkpoint {folder} has no average of the weights",
            rule="average-kept: a run keeps an average of its weights where optimizer.average_decay is more than 0",
            picture=f"there: {', '.join(sorted({name.partition('.')[0] for name in saved}))}",
            repair="leave --average out, or name a run with optimizer.average_decay, as 0.999",
        )


def no_checkpoint(folder: Path, step: int | None) -> ConfigError:
    """The error for a missing checkpoint, of any step or of `step`."""
    there = complete_steps(folder)
    if step is not None and there:
        return ConfigError(
            f"no checkpoint of step {step} in {folder}",
            rule="checkpoint-there: a run has checkpoints of some of its steps",
            picture=f"there: {', '.join(map(str, there))}",
            repair="name one of these, or none for the last",
        )
    return ConfigError(
        f"no checkpoint in {folder}",
        rule="checkpoint-there: a run writes one every checkpoint.save_every steps, and at its end",
        repair="name the --workdir of a run that has saved a checkpoint",
    )


def all_damaged(folder: Path, damaged: Mapping[int, str]) -> CheckpointError:
    """The error for a run whose checkpoints are all damaged; `damaged` says how, by step."""
    return CheckpointError(
        f"no undamaged checkpoint in {folder}",
        rule=_SUMS_RULE,
        picture="\n".join(f"{step}/{what}" for step, what in damaged.items()),
        repair="put back the files from a copy; to start again from step 0 name another --workdir",
    )


def damaged_files(folder: Path, damaged: Mapping[int, Sequence[str]]) -> CheckpointError:
    """The error for damaged files of some checkpoints, by step."""
    texts = [f"{step}/{what}" for step, of_step in damaged.items() for what in of_step]
    return CheckpointError(
        f"damaged files in {folder}: {len(texts)}, in checkpoints: {len(damaged)}",
        rule=_SUMS_RULE,
        picture=first_of(texts, most=_MOST_SHOWN),
        repair="put back the files from a copy; a run passes over damaged checkpoints",
    )


def not_written(folder: Path, error: Exception, complete: Sequence[int]) -> CheckpointError:
    """The error for a checkpoint whose writing failed with `error`, beside the `complete` ones."""
    lines = str(error).splitlines() or [type(error).__name__]
    return CheckpointError(
        f"the checkpoint of step {folder.name} cannot be written to {folder.parent}",
        rule="checkpoint-written: there is room and permission for a checkpoint more than are kept",
        picture=f"{lines[0][:300]}\ncomplete there: {', '.join(f'step {good}' for good in complete) or 'none'}",
        repair="make room, or correct the folder; the same command resumes an ended run from the last complete one",
    )


# ---- The parts of a checkpoint, one for each process that writes
#
# A process that writes into a folder of the same name on a disk of its own notices nothing, and neither do the sums.

_PART = "ocdbt.process_"


def writers(arrays: Mapping[str, Any]) -> frozenset[int]:
    """The processes that write parts of `arrays`: each the shards whose first copy it holds, 0 also those of NumPy."""
    # NumPy arrays are written by process 0 alone.
    of_jax = [array for array in arrays.values() if isinstance(array, jax.Array)]
    processes = {0} if len(of_jax) < len(arrays) else set()
    kinds = {(array.sharding, array.shape): array for array in of_jax}  # few, where shards are many
    for array in kinds.values():
        # All processes are there already: the shards of further arrays add none.
        if len(processes) == jax.process_count():
            break
        processes |= {shard.device.process_index for shard in array.global_shards if shard.replica_id == 0}
    return frozenset(processes)


def check_parts(folder: Path, processes: frozenset[int]) -> None:
    """Raises CheckpointError unless `folder` has the parts of all `processes`."""
    missing = [f"{_PART}{process}" for process in sorted(processes) if not (folder / f"{_PART}{process}").is_dir()]
    if missing:
        raise CheckpointError(
            f"the checkpoint {folder} lacks the parts of some processes: {len(missing)}",
            rule="checkpoint-shared: all processes of a run write into one folder, which all of them see",
            picture=f"not there: {first_of(missing, joined_by=', ', most=_MOST_SHOWN)}",
            repair="name a --workdir on a file system that all machines share",
        )
