"""Makes a run of a Hugging Face model, or a Hugging Face model of a run.

    python -m jaxpipe.convert --from=hf:DIR --to=WORKDIR
    python -m jaxpipe.convert --from=WORKDIR --to=hf:DIR [--dtype=float32|bfloat16|float16] [--step=N]

WORKDIR gets config.json, a checkpoint at step 0 and `hf/`: what the model leaves there to go back as it came,
without training byte for byte. A run that was started from a converted one has its `hf/` too and goes the same
way. Dtypes are those that the model came with, float32 for one that jaxpipe made; --dtype is for all tensors.
Needs 8 bytes a parameter on the way in, since Orbax copies what it saves, and one tensor; on the way out one
parameter with all its layers, 4 bytes each. Nothing is half-written: the target is made beside, then renamed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from absl.flags import FlagValues

from jaxpipe.checkpoints import open_canonical, save_canonical
from jaxpipe.config import model_config
from jaxpipe.config.command_line import run
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface import configs, layout, origin
from jaxpipe.huggingface.files import TensorFiles
from jaxpipe.huggingface.headers import CODES, DTYPES, Writer, entries
from jaxpipe.huggingface.staging import check_target, staged
from jaxpipe.huggingface.tensors import TensorMap
from jaxpipe.models import LanguageModel
from jaxpipe.training import run_folder

MARK = "hf:"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run(
        execute,
        define_flags=define_flags,
        usage=__doc__,
        arguments=arguments,
        required={"from": "hf:DIR", "to": "runs/converted"},
    )


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --from, --to, --dtype and --step."""
    del arguments
    flags.DEFINE_string("from", None, "hf:DIR, a model of transformers, or the folder of a run.", values)
    flags.DEFINE_string("to", None, "The folder of a run, or hf:DIR.", values)
    flags.DEFINE_enum("dtype", None, list(CODES), "Of the tensors that are written to hf:DIR.", values)
    flags.DEFINE_integer(
        "step", None, "Of the checkpoint that is taken from a run; the last one if left out.", flag_values=values
    )


def execute(values: FlagValues) -> None:
    """One conversion."""
    jax.config.update("jax_platforms", "cpu")  # only numbers are moved
    source, target = str(values["from"].value), str(values["to"].value)
    print(convert(source, target, dtype=values.dtype, step=values.step))


def convert(source: str, target: str, *, dtype: str | None = None, step: int | None = None) -> str:
    """What `import_model` or `export_model` returns, whichever `source` and `target` ask for.

    Raises:
        ConfigError: as these do, or the two ask for neither, or for what has no effect.
    """
    if source.startswith(MARK) == target.startswith(MARK):
        raise ConfigError(
            f"--from={source} with --to={target}\n"
            f"  rule convert-direction: one of the two is a model of transformers, {MARK}DIR, the other a run\n"
            f"  repair: write {MARK} before the folder of transformers"
        )
    if target.startswith(MARK):
        return export_model(source, target.removeprefix(MARK), dtype=dtype or "", step=step)
    for name, value in {"dtype": dtype, "step": step}.items():
        if value is not None:
            raise ConfigError(
                f"--{name}={value} with --from={source}\n"
                f"  rule flags: --{name} is for --to={MARK}DIR; a run starts at step 0 and holds float32\n"
                f"  repair: leave --{name} out"
            )
    return import_model(source.removeprefix(MARK), target)


def import_model(source: str, target: str) -> str:
    """Makes the run `target` of the Hugging Face model in `source`; returns what to tell of it.

    Raises:
        ConfigError: a model that we do not have, tensors that do not fit it, or a target that is there.
    """
    folder, path = run_folder.path_of(source), run_folder.path_of(target)
    check_target(path, flag=f"--to={target}")
    theirs = configs.load_config(folder)
    where = str(folder / configs.CONFIG)
    architecture = configs.architecture_of(theirs, where=where)
    config = configs.read_config(theirs, where=where)
    files = TensorFiles(folder)
    tensors = TensorMap.of_names(architecture, model_config(config), files.entries)
    left_out = tensors.check(files.entries, where=source)
    has_tokenizer = (folder / origin.TOKENIZER).is_file()
    if has_tokenizer:
        config.data.tokenizer = str(path / origin.FOLDER / origin.TOKENIZER)
    with staged(path, flag=f"--to={target}") as work:
        save_canonical(work, step=0, params=tensors.read(files, where=source))
        run_folder.write_config(work, config)
        copied = origin.save_origin(folder, work, files, left_out=left_out)
    without_tokenizer = "" if has_tokenizer else f" (there is no {origin.TOKENIZER})"
    without = f", without {len(left_out)} that are no parameters" if left_out else ""
    return (
        f"read       {architecture.name} from {source}: {tensors.num_params:,} parameters in {len(files.entries)}"
        f" tensors{without}\n"
        f"written    {target}: config.json, checkpoint of step 0, {origin.FOLDER}/ with {', '.join(copied)}\n"
        f"tokens     data.tokenizer={config.data.tokenizer}{without_tokenizer}\n"
        f"next       python -m jaxpipe.train --config=configs/finetune.py:{target} --workdir=runs/finetuned"
    )


def export_model(source: str, target: str, *, dtype: str = "", step: int | None = None) -> str:
    """Makes the Hugging Face model `target` of a run's checkpoint; returns what to tell of it.

    Args:
        source: the run.
        target: folder.
        dtype: of all tensors, "float32", "bfloat16" or "float16"; "" for those the model came with.
        step: of the checkpoint; None takes the last.

    Raises:
        ConfigError: no such checkpoint, a model that transformers does not have, or a target that is there.
    """
    run_path, path = run_folder.path_of(source), run_folder.path_of(target)
    flag = f"--to={MARK}{target}"
    check_target(path, flag=flag)
    config = run_folder.read_config(source)
    ours = model_config(config)
    came = origin.read_origin(run_path)
    theirs = configs.load_config(came.folder) if came else configs.new_config(config, dtype=dtype or "float32")
    where = str(came.folder / configs.CONFIG if came else configs.CONFIG)
    architecture = configs.architecture_of(theirs, where=where)
    if came is None:
        tensors = TensorMap(architecture, ours)
        files = layout.as_new(tensors.new_tensors, dtype=dtype or "float32")
    else:
        configs.check_same(config, configs.read_config(theirs, where=where), run=source, where=where)
        files = layout.as_it_came(came, dtype=dtype)
        found = {name: entry for header in files.headers.values() for name, entry in entries(header).items()}
        tensors = TensorMap.of_names(architecture, ours, found)
        tensors.check(found, where=str(came.folder))
    with (
        open_canonical(run_path, model=LanguageModel(ours), step=step) as saved,
        staged(path, flag=flag) as work,
    ):
        _write_tensors(tensors, saved.read, files, work)
        for name, text in files.texts.items():
            (work / name).write_text(text)
        copied = origin.copy_companions(came.folder, work) if came else []
        if configs.change_dtype(theirs, dtype) or came is None:
            configs.save_config(work, theirs)
    names = ", ".join([*sorted(files.headers), *files.texts, *dict.fromkeys([configs.CONFIG, *copied])])
    return (
        f"read       step {saved.step} of {source}\n"
        f"written    {target}: {architecture.name}, {tensors.num_params:,} parameters; {names}\n"
        f"next       transformers.{architecture.name}.from_pretrained({target!r})"
    )


def _write_tensors(tensors: TensorMap, read: Any, files: layout.FileLayout, folder: Path) -> None:
    with ExitStack() as stack:
        places = {}
        for file, header in files.headers.items():
            writer = Writer(folder / file, header)
            stack.callback(writer.close)
            places |= {name: (writer, DTYPES[entry.code]) for name, entry in entries(header).items()}
        for tensor, numbers in tensors.tensors(read):
            for name in tensor.names:
                if name in places:
                    writer, dtype = places[name]
                    writer.write(name, _cast(numbers, dtype, name=name))


def _cast(numbers: np.ndarray, dtype: np.dtype, *, name: str) -> np.ndarray:
    """`numbers` rounded to `dtype`.

    Raises:
        ConfigError: some are beyond its largest.
    """
    with np.errstate(over="ignore"):
        cast = numbers.astype(dtype)
    lost = np.isfinite(numbers) & ~np.isfinite(cast)
    if lost.any():
        raise ConfigError(
            f"the tensor {name} does not fit {dtype.name}: {int(lost.sum())} of its {numbers.size} numbers\n"
            f"  rule convert-dtype: every number is within the range of the dtype\n"
            f"      the largest is {np.abs(numbers[lost]).max():g}\n"
            "  repair: write another --dtype; bfloat16 has the range of float32"
        )
    return cast


if __name__ == "__main__":
    sys.exit(main())
