"""What a run keeps of the model it came from, so that it can go back in the very form that it had.

In the folder `hf/` of a run: config.json, the files of the tokenizer and of generation, the index of the
shards, all as they were; and `safetensors.json`, with the header of every tensor file: names, dtypes, order.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.configs import CONFIG
from jaxpipe.huggingface.files import INDEX, TensorFiles

FOLDER = "hf"
RECORD = "safetensors.json"
TOKENIZER = "tokenizer.json"

# Files beside the tensors that go with a model wherever it goes, where they are there.
COMPANIONS = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "LICENSE",
    "LICENSE.txt",
)


@dataclass(frozen=True)
class Origin:
    """The form in which a model came.

    Attributes:
        folder: the `hf/` of a run.
        headers: of the tensor files, by name.
        index: text of the index, None for a single file.
        left_out: names of tensors that were no parameters.
    """

    folder: Path
    headers: dict[str, str]
    index: str | None
    left_out: tuple[str, ...]


def save_origin(source: Path, workdir: Path, files: TensorFiles, *, left_out: list[str]) -> list[str]:
    """Keeps the form of the model in `source`; the names of the companions that were copied."""
    folder = workdir / FOLDER
    folder.mkdir()
    copied = copy_companions(source, folder)
    if files.index is not None:
        shutil.copyfile(source / INDEX, folder / INDEX)
    record = {"left_out": left_out, "headers": files.headers}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return copied


def read_origin(workdir: Path) -> Origin | None:
    """The form in which the model of a run came; None for a run that was not converted, nor started from one.

    Raises:
        ConfigError: the record of it cannot be read.
    """
    folder = workdir / FOLDER
    if not folder.is_dir():
        return None
    try:
        record = json.loads((folder / RECORD).read_text())
        headers, left_out = dict(record["headers"]), tuple(record["left_out"])
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / RECORD} cannot be read: {error}\n"
            f"  rule huggingface-origin: {FOLDER}/ of a run is what jaxpipe.convert put there\n"
            f"  repair: copy {FOLDER}/ from the run that jaxpipe.convert made, or remove it for the form of a new model"
        ) from error
    index = folder / INDEX
    return Origin(folder, headers, index.read_text() if index.is_file() else None, left_out)


def copy_origin(source: Path, target: Path) -> None:
    """Copies what the run in `source` keeps of its origin, if anything, to the run in `target`, whole or not at all."""
    if (source / FOLDER).is_dir() and not (target / FOLDER).exists():
        partial = target / f"{FOLDER}.partial"
        shutil.copytree(source / FOLDER, partial, dirs_exist_ok=True)
        partial.rename(target / FOLDER)


def copied_name(name: str, source: Path, target: Path) -> str:
    """The file `name` as `copy_origin` left it in the run `target`, where it is one of the origin of `source`."""
    path = Path(name)
    return str(target / FOLDER / path.name) if path.parent == source / FOLDER else name


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copies the companions in `source` to `target`; their names."""
    found = [name for name in COMPANIONS if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found
