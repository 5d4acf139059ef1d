"""The record that a run keeps of the Hugging Face model it started from, to be exported in the same form.

The folder `hf/` of a run has config.json, the files of the tokenizer and of generation and the index of the shards, all
unchanged; and `safetensors.json` with the header of every tensor file: names, dtypes, order.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpipe.config.base import RunConfig
from jaxpipe.config.data import grow_or, tokenizer_of
from jaxpipe.data.byte_tokenizer import BYTE
from jaxpipe.data.prepare.endings import ends_of_text
from jaxpipe.data.prepare.templates import read_templates
from jaxpipe.data.special_tokens import END, END_ID, FILE, TOKENIZER_CONFIG
from jaxpipe.data.tokenizer_file import file_of, identity_of
from jaxpipe.errors import ConfigError
from jaxpipe.files import local_path, read_whole
from jaxpipe.huggingface.configs import CONFIG, load_config, save_config
from jaxpipe.huggingface.tensor_files import INDEX, Files, entries

FOLDER = "hf"
RECORD = "safetensors.json"

GENERATION = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", END_ID, "pad_token_id")

# Files beside the tensors that are copied with a model, if it has them; those of its tokenizer only with that one.
OF_TOKENIZER = (
    FILE,
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
COMPANIONS = (CONFIG, GENERATION, *OF_TOKENIZER, "LICENSE", "LICENSE.txt")


@dataclass(frozen=True)
class SourceModel:
    """The form of the Hugging Face model that a run started from."""

    folder: Path  # the folder `hf/` of the run
    headers: dict[str, str]  # headers of the tensor files, by file name
    index: str | None  # text of the index; None for a single file
    left_out: tuple[str, ...]  # names of the tensors that are no parameters


def dtype_of_source(workdir: str) -> str | None:
    """The dtype of the model that the run in `workdir` started from, as its config.json says; None if it says none."""
    path = local_path(workdir) / FOLDER / CONFIG
    theirs = load_config(path.parent) if path.is_file() else {}
    return theirs.get("dtype", theirs.get("torch_dtype"))


def save_source_model(
    source: Path, workdir: Path, files: Files, theirs: dict[str, Any], *, left_out: list[str]
) -> list[str]:
    """Saves the form of the model in `source` to a run; returns the names of the companion files that were copied."""
    folder = workdir / FOLDER
    folder.mkdir()
    copied = copy_companions(source, folder)
    if theirs != load_config(source):
        # The config in force differs where --dtype or more tokens changed it.
        save_config(folder, theirs)
    if files.index is not None:
        (folder / INDEX).write_text(files.index)
    record = {"left_out": left_out, "headers": files.headers}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return copied


def read_source_model(workdir: Path) -> SourceModel | None:
    """The form of the model that a run started from, None if jaxpipe made it; ConfigError if it cannot be read."""
    folder = workdir / FOLDER
    if not folder.is_dir():
        return None
    try:
        record = json.loads(read_whole(folder / RECORD))
        headers = dict(record["headers"])
        left_out = tuple(record["left_out"])
        for header in headers.values():
            # Read now and thrown away, so that a damaged header is told before an export begins.
            entries(header)
        index = read_whole(folder / INDEX) if (folder / INDEX).is_file() else None
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / RECORD} cannot be read: {error}",
            rule=f"huggingface-origin: {FOLDER}/ of a run was written by jaxpipe.convert",
            repair=f"copy {FOLDER}/ from the run that jaxpipe.convert made, or remove it to export a new model",
        ) from error
    return SourceModel(folder, headers, index, left_out)


def check_vocabulary(config: RunConfig) -> None:
    """Raises ConfigError if a new run starts from a converted model and has another vocabulary size than that.

    Such a run would train in rows of padding, and could not be exported as that model.
    """
    path = local_path(config.checkpoint.init_from) / FOLDER / CONFIG
    if not config.checkpoint.init_from or not path.is_file():
        return
    num_tokens = load_config(path.parent).get("vocab_size", config.model.vocab_size)
    if num_tokens != config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} with a checkpoint.init_from of {num_tokens} tokens",
            rule="huggingface-origin: a run that starts from a converted model is that model, with as many tokens",
            picture=f"{path}: vocab_size={num_tokens}",
            repair=grow_or(f"leave model.vocab_size={num_tokens}", num_tokens=config.model.vocab_size),
        )


def copy_source_model(source: Path, target: Path) -> None:
    """Copies the folder `hf/` of the run in `source`, if there is one, to the run in `target`, whole or not at all."""
    if (source / FOLDER).is_dir() and not (target / FOLDER).exists():
        partial = target / f"{FOLDER}.partial"
        # Under another name first: a run that is killed here leaves no half of a folder under its own.
        shutil.copytree(source / FOLDER, partial, dirs_exist_ok=True)
        partial.rename(target / FOLDER)


def copied_path(name: str, source: Path, target: Path) -> str:
    """Returns the path of `name` after `copy_source_model`; unchanged unless the file is in `hf/` of `source`."""
    path = Path(name)
    return str(target / FOLDER / path.name) if path.parent == source / FOLDER else name


def own_path(name: str, workdir: Path) -> str:
    """Returns the path of the file `name` of the config of the run in `workdir`, which may have been moved.

    A file in the run's `hf/` has a path from there, or one in the folder that the run had when it was written.
    """
    beside_run = workdir / FOLDER / Path(name).name
    was_own = Path(name).parent == Path(FOLDER) or (Path(name).parent.name == FOLDER and not Path(name).exists())
    # The old folder's file may still be there, of another run, hence `not exists`.
    return str(beside_run) if was_own and beside_run.is_file() else name


def write_tokenizer(config: RunConfig, target: Path) -> list[str]:
    """Writes the tokenizer that `data.tokenizer` names, with its special tokens and chat template, if it is a file.

    tokenizer_config.json says that tokenizer.json is all there is: by the type of the model transformers would take
    another class for some, and with it another way to cut text into words.
    """
    path = _file_of(config)
    if path is None:
        return []
    shutil.copyfile(path, target / FILE)
    # See above: without the class, transformers takes the one of the model's type.
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = tokenizer_of(config)
    if tokenizer.masked is None:
        about |= tokenizer.about | {END: tokenizer.decode([tokenizer.separator])}
    (target / TOKENIZER_CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    return [FILE, TOKENIZER_CONFIG]


def is_other_tokenizer(config: RunConfig, source: Path) -> bool:
    """Whether `data.tokenizer` names a file with other tokens than the one in `source`, or there is none."""
    path = _file_of(config)
    of_source = source / FILE
    if path is None:
        return False
    # By its bytes first, since loading a large vocabulary takes a second.
    is_same = of_source.is_file() and (
        of_source.read_bytes() == path.read_bytes() or identity_of(of_source) == identity_of(path)
    )
    return not is_same


def has_tokenizer(config: RunConfig) -> bool:
    """Whether `data.tokenizer` names a file that is there."""
    return _file_of(config) is not None


def _file_of(config: RunConfig) -> Path | None:
    """The file of `data.tokenizer`; None for bytes, and for one that is not there."""
    path = file_of(config.data.tokenizer)
    return path if config.data.tokenizer != BYTE and path.is_file() else None


def write_ends(config: RunConfig, target: Path, *, is_new: bool) -> list[str]:
    """Has transformers end a generated text where `jaxpipe.sample` does; returns the names of the files written.

    generation_config.json keeps what it has; its eos_token_id gets the tokens that it lacks, as the end of an answer
    after tuning on chats.

    Args:
        is_new: whether the tokenizer is another than the model came with, so that the old numbers mean other tokens.
    """
    tokenizer = tokenizer_of(config)
    path = target / GENERATION
    of_config = load_config(target)
    # Without this file transformers takes the numbers from config.json; once it is there, it must have them.
    theirs = json.loads(path.read_text()) if path.is_file() else {key: of_config.get(key) for key in _TOKEN_IDS}
    before = theirs.get(END_ID)
    before = before if isinstance(before, list) else [] if before is None else [before]
    after = ends_of_text(tokenizer, read_templates(config.data.tokenizer))
    # Old numbers mean other tokens in a new vocabulary.
    ends = [*dict.fromkeys([*([] if is_new else before), *after])]
    # A masked model generates no text.
    if ends == before or tokenizer.masked is not None:
        return []
    theirs = {key: value for key, value in theirs.items() if not (is_new and key in _TOKEN_IDS)}
    path.write_text(json.dumps(theirs | {END_ID: ends[0] if len(ends) == 1 else ends}, indent=2) + "\n")
    return [GENERATION]


def write_companions(config: RunConfig, source: Path, target: Path, *, is_trained: bool) -> list[str]:
    """Copies the companion files in `source` to `target`, with the tokenizer in force; returns their names."""
    is_other = is_other_tokenizer(config, source)
    written = copy_companions(source, target, has_tokenizer=not is_other)
    if is_other:
        written += write_tokenizer(config, target)
    # Of a model that was not trained the export stays equal byte for byte.
    if is_other or (is_trained and has_tokenizer(config)):
        written += write_ends(config, target, is_new=is_other)
    return written


def copy_companions(source: Path, target: Path, *, has_tokenizer: bool = True) -> list[str]:
    """Copies the companion files in `source` to `target`, the tokenizer's only if asked; returns their names."""
    names = [name for name in COMPANIONS if has_tokenizer or name not in OF_TOKENIZER]
    companions = [name for name in names if (source / name).is_file()]
    for name in companions:
        shutil.copyfile(source / name, target / name)
    return companions
