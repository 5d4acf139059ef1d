"""What a run that goes on may do otherwise than before: mesh, schedule, optimizer, but not its model and its data.

Left to others: whether files of other names hold the same tokens (`same_data`).
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.config import build_schedule
from jaxpipe.errors import CheckpointError, ConfigError
from jaxpipe.training.same_data import DATA
from jaxpipe.training.same_schedule import is_other
from jaxpipe.training.workdir import METRICS, read_config

# How a model is computed, which its parameters do not show.
FREE_OF_MODEL = ("dtype", "attention", "recompute", "embedding_dropout", "attention_dropout", "hidden_dropout")
FREE_OF_DATA = ("files", "tokenizer")  # where they lie, once it is known by what to know them again
DECIDED = ("mesh.platform",)  # "auto" in the one, what it has become in the other

DECIDES_SCHEDULE = {"mesh.pipe", "pipeline.schedule", "pipeline.options", "pipeline.num_microbatches"}


def changes(path: Path, config: ConfigDict) -> list[str]:
    """The fields in which `config` differs from that of the run in `path`, as "pipeline.schedule: 1f1b -> bpipe".

    Also a schedule of other actions under the same fields, as of a file that has changed.

    Raises:
        ConfigError: fields are among them that decide the model, or the order of the data.
    """
    before = read_config(str(path))
    if before.model.family != config.model.family:
        raise _refused(path, [_in_words("model.family", before.model.family, config.model.family)])
    fields = [(section, field) for section in before for field in before[section]]
    differ = {
        f"{section}.{field}": _in_words(f"{section}.{field}", before[section][field], config[section][field])
        for section, field in fields
        if before[section][field] != config[section][field]
    }
    refused = [words for name, words in differ.items() if _is_fixed(name, knows_data=(path / DATA).is_file())]
    if refused:
        raise _refused(path, refused)
    found = [words for name, words in differ.items() if name not in DECIDED]
    if not differ.keys() & DECIDES_SCHEDULE and is_other(path, build_schedule(config)):
        found.append(f"pipeline.schedule: {config.pipeline.schedule} has other actions than before")
    return found


def check_first_step(path: Path) -> None:
    """Raises CheckpointError for a run without checkpoints that is too far for having none.

    A run writes its checkpoints in the background, the second not before the first is complete.
    """
    every, rows = read_config(str(path)).checkpoint.save_every, path / METRICS
    num_rows = sum(1 for _ in rows.open("rb")) if rows.is_file() else 0
    if every and num_rows >= 2 * every:
        raise CheckpointError(
            f"--workdir={path} holds a run of {num_rows} steps, and none of its checkpoints\n"
            "  rule checkpoints-there: a run goes on from a checkpoint, from step 0 only where it has written none\n"
            f"      checkpoint.save_every={every}; {path / CHECKPOINTS} has no complete one\n"
            "  repair: put the checkpoints back (is the disk mounted?), or name another --workdir for a new run"
        )


def _is_fixed(name: str, *, knows_data: bool) -> bool:
    section, field = name.split(".")
    free = {"model": FREE_OF_MODEL, "data": FREE_OF_DATA if knows_data else ()}
    return section in free and field not in free[section]


def _in_words(name: str, before: object, now: object) -> str:
    return f"{name}: {before} -> {now}"


def _refused(path: Path, refused: list[str]) -> ConfigError:
    listed = "".join(f"      {words}\n" for words in refused)
    return ConfigError(
        f"--workdir={path} holds a run of another model or on other data\n"
        "  rule same-run: a run goes on with its model and its data, since its parameters are of the one and its"
        " position counts batches of the other\n"
        f"{listed}"
        "  repair: name another --workdir, or leave these fields as they were; checkpoint.init_from starts a new run"
        " from the parameters"
    )
