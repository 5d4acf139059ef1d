"""Converts a Hugging Face model to a run, or a run to a Hugging Face model.

    python -m jaxpipe.convert --from=hf:DIR --to=WORKDIR [--vocab_size=N]
    python -m jaxpipe.convert --from=WORKDIR --to=hf:DIR [--dtype=float32|bfloat16|float16] [--step=N]
        [--average]
    python -m jaxpipe.convert --from=WORKDIR --to=peft:DIR [--step=N] [--average]
    python -m jaxpipe.convert --from=peft:DIR --base=WORKDIR --to=WORKDIR

WORKDIR gets config.json, a checkpoint at step 0, and `hf/` with everything that exporting the model in the form that it
came in needs; without training the export is equal byte for byte. A run that was started from a converted one has `hf/`
too and is exported the same way. Dtypes are those of the original tensors, and float32 for a model that jaxpipe made;
--dtype sets that of all tensors. With --vocab_size the tables of tokens get more rows, for a tokenizer with more tokens
than the model: each new row is the mean of the others. Importing needs 4 bytes a parameter and one tensor; exporting
needs one parameter with all its layers, 4 bytes each. Nothing is half-written: the
target is written under another name, then renamed. Adapters are merged into the model of hf:DIR; peft:DIR has them
alone, in the files of Hugging Face's peft, and --base names the run whose model they are for.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import flags
from absl.flags import FlagValues

from jaxpipe.checkpoints import open_canonical, save_canonical
from jaxpipe.command_line import main_of
from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.config.checks import check_model
from jaxpipe.config.command_line import define_average, run
from jaxpipe.config.data import tokenizer_of
from jaxpipe.data.prepare.endings import ends_of_text
from jaxpipe.data.prepare.templates import read_templates
from jaxpipe.data.special_tokens import FILE
from jaxpipe.data.tokenizer_file import identity_of
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface import adapters, configs, source_model
from jaxpipe.huggingface.mapping import Architecture
from jaxpipe.huggingface.quantized import opened, unquantized
from jaxpipe.huggingface.tensor_files import CODES, GrownFiles, entries
from jaxpipe.huggingface.tensors import TensorMap
from jaxpipe.huggingface.writing import check_target, files_of_source, new_files, whole_folder
from jaxpipe.models import LanguageModel
from jaxpipe.models.lora import base_of
from jaxpipe.models.parameters import adapted_columns
from jaxpipe.training import run_folder

HF = "hf:"
PEFT = "peft:"
MOST_TOKENS = 10_000_000


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --from, --to, --base, --dtype, --step, --average and --vocab_size."""
    del arguments
    flags.DEFINE_string("from", None, "hf:DIR or peft:DIR, of transformers or peft, or the folder of a run.", values)
    flags.DEFINE_string("to", None, "The folder of a run, or hf:DIR or peft:DIR.", values)
    flags.DEFINE_string("base", None, "The run whose model the adapters of peft:DIR are for.", values)
    flags.DEFINE_enum("dtype", None, list(CODES), "Dtype of the tensors that are written to hf:DIR.", values)
    flags.DEFINE_integer(
        "vocab_size",
        None,
        "Tokens of the run's model, more than the model of hf:DIR has.",
        lower_bound=1,
        upper_bound=MOST_TOKENS,
        flag_values=values,
    )
    flags.DEFINE_integer("step", None, "Step of the run's checkpoint; the last one by default.", flag_values=values)
    define_average(values)


def execute(values: FlagValues) -> None:
    """Runs one conversion."""
    jax.config.update("jax_platforms", "cpu")  # the conversion only moves numbers
    source = str(values["from"].value)
    target = str(values["to"].value)
    of = values.flag_values_dict()
    print(convert(source, target, **{name: of[name] for name in ("dtype", "step", "average", "vocab_size", "base")}))


def convert(
    source: str,
    target: str,
    *,
    dtype: str | None = None,
    step: int | None = None,
    average: bool = False,
    vocab_size: int | None = None,
    base: str | None = None,
) -> str:
    """Imports or exports a model, as `source` and `target` ask for; returns the report."""
    if source.startswith((HF, PEFT)) == target.startswith((HF, PEFT)):
        raise ConfigError(
            f"--from={source} with --to={target}",
            rule=f"convert-direction: one of the two is a model of transformers, {HF}DIR, or adapters of peft, "
            f"{PEFT}DIR; the other is a run",
            repair=f"write {HF} before the folder of transformers",
        )
    if source.startswith(PEFT):
        others = {"dtype": dtype, "step": step, "average": average or None, "vocab_size": vocab_size}
        _check_unused(others, f"is not for --from={PEFT}DIR", source)
        return import_adapters(source.removeprefix(PEFT), target, base=base)
    _check_unused({"base": base}, f"is for --from={PEFT}DIR: the run whose model the adapters are for", source)
    if target.startswith(PEFT):
        others = {"dtype": dtype, "vocab_size": vocab_size}
        _check_unused(others, f"is not for --to={PEFT}DIR, whose tensors are float32", source)
        return export_adapters(source, target.removeprefix(PEFT), step=step, average=average)
    if target.startswith(HF):
        _check_unused(
            {"vocab_size": vocab_size}, f"is for --from={HF}DIR; a run has the tables that it trained", source
        )
        # "" and not None: a dtype that every tensor is written in, or none.
        return export_model(source, target.removeprefix(HF), dtype=dtype or "", step=step, average=average)
    why = f"is for --to={HF}DIR; a run starts at step 0 and has float32 parameters"
    _check_unused({"dtype": dtype, "step": step, "average": average or None}, why, source)
    return import_model(source.removeprefix(HF), target, vocab_size=vocab_size)


def _check_unused(options: Mapping[str, object], why: str, source: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"--{name}={value} with --from={source}", rule=f"flags: --{name} {why}", repair=f"leave --{name} out"
            )


def import_model(source: str, target: str, *, vocab_size: int | None = None) -> str:
    """Makes the run `target` from the Hugging Face model in `source`; returns the report.

    Args:
        vocab_size: tokens of the run's model, more than those of the source; None: as many.

    Raises:
        ConfigError: jaxpipe does not have the model, its tensors do not fit it, the target exists, or `vocab_size` is
            none that its tables can grow to.
    """
    folder = run_folder.path_of(source)
    path = run_folder.path_of(target)
    # Before anything large is read: a target that exists is told at once.
    check_target(path, flag=f"--to={target}")
    run_folder.check_name(path, flag=f"--to={target}")
    theirs = unquantized(configs.load_config(folder))
    where = str(folder / configs.CONFIG)
    architecture = configs.architecture_of(theirs, where=where)
    configs.read_config(theirs, where=where)  # refused before any file is opened
    files = opened(folder)
    config = configs.read_config(theirs, where=where, names=files.entries)
    tensors = TensorMap(architecture, model_config(config), in_files=files.entries)
    left_out = tensors.check(files.entries, where=source)
    if vocab_size is not None:
        if vocab_size <= config.model.vocab_size:
            raise ConfigError(
                f"--vocab_size={vocab_size}, and the model of --from={HF}{source} has {config.model.vocab_size} tokens",
                rule="vocabulary-grows: the tables of tokens get more rows; none is taken away",
                repair=f"leave --vocab_size out, or set it to more than {config.model.vocab_size}",
            )
        # Another dict, since `theirs` may be compared with the file again.
        theirs = theirs | {"vocab_size": vocab_size}
        config = configs.read_config(theirs, where=where, names=files.entries)
        files = GrownFiles(files, tensors.token_tables, num_rows=vocab_size)
        # Mapped anew for the shapes of the larger tables; the names stay.
        tensors = TensorMap(architecture, model_config(config), in_files=files.entries)
    has_tokenizer = (folder / FILE).is_file()
    if has_tokenizer:
        identity_of(folder / FILE)  # a damaged one is refused here, not by the next command
        config = config.replaced({"data.tokenizer": f"{source_model.FOLDER}/{FILE}"})
    with whole_folder(path, flag=f"--to={target}") as work:
        save_canonical(work, step=0, params=tensors.read(files, where=source))
        run_folder.write_config(work, config)
        copied = source_model.save_source_model(folder, work, files, theirs, left_out=left_out)
    without_tokenizer = "" if has_tokenizer else f" (there is no {FILE})"
    without = f", without {len(left_out)} that are no parameters" if left_out else ""
    return (
        f"read       {architecture.name} from {source}: {tensors.num_params:,} parameters in {len(files.entries)}"
        f" tensors{without}\n"
        f"written    {target}: config.json, checkpoint of step 0, {source_model.FOLDER}/ with {', '.join(copied)}\n"
        f"tokens     data.tokenizer={source_model.own_path(config.data.tokenizer, path)}{without_tokenizer}\n"
        f"next       python -m jaxpipe.train --config={shlex.quote(f'configs/finetune.py:{target}')}"
        " --workdir=runs/finetuned --config.data.files='texts/*.txt'"
    )


@dataclass(frozen=True)
class _SavedRun:
    """A run, and the class of transformers that its model is of."""

    path: Path
    config: RunConfig
    model: LanguageModel
    original: source_model.SourceModel | None  # the form in which the model came in; None if jaxpipe made it
    theirs: dict[str, Any]  # config.json of that form, or of a new one
    where: str  # name of that config.json, for errors
    architecture: Architecture

    @classmethod
    def open(cls, workdir: str, *, dtype: str = "float32") -> _SavedRun:
        """Reads the config of a run; ConfigError if there is none, or transformers does not have the model."""
        path = run_folder.path_of(workdir)
        config = RunConfig.of(run_folder.read_config(workdir))
        check_model(config, name=f"{workdir}/{run_folder.CONFIG}")
        original = source_model.read_source_model(path)
        theirs = configs.load_config(original.folder) if original else configs.new_config(config, dtype=dtype)
        where = str(original.folder / configs.CONFIG) if original else configs.CONFIG
        architecture = configs.architecture_of(theirs, where=where)
        return cls(path, config, LanguageModel(model_config(config)), original, theirs, where, architecture)


def export_model(source: str, target: str, *, dtype: str = "", step: int | None = None, average: bool = False) -> str:
    """Makes the Hugging Face model `target` from a checkpoint of a run; returns the report.

    Args:
        dtype: dtype of all tensors, "float32", "bfloat16" or "float16"; "" keeps the original dtypes.
        step: step of the checkpoint; None takes the last.
        average: whether to export the average of the weights in their place.

    Raises:
        ConfigError: the checkpoint does not exist or has no average, transformers does not have the model, or the
            target exists.
    """
    path = run_folder.path_of(target)
    flag = f"--to={HF}{target}"
    check_target(path, flag=flag)
    run = _SavedRun.open(source, dtype=dtype or "float32")
    original = run.original
    theirs = run.theirs
    if original is None:
        tensors = TensorMap(run.architecture, base_of(run.model.config))
        files = new_files(tensors.new_tensors, dtype=dtype or "float32")
    else:
        configs.check_same_model(run.config, configs.read_config(theirs, where=run.where), run=source, where=run.where)
        # Without a dtype every tensor keeps the one of its file.
        files = files_of_source(original, dtype=dtype)
        in_files = {name: entry for header in files.headers.values() for name, entry in entries(header).items()}
        tensors = TensorMap(run.architecture, base_of(run.model.config), in_files=in_files)
        # The run's record may have been changed since.
        tensors.check(in_files, where=str(original.folder))
    saved = open_canonical(run.path, model=run.model, step=step, average=average)
    with whole_folder(path, flag=flag) as work:
        files.write(work, tensors.tensors(adapters.read_merged(saved.read, run.model)))
        if original:
            copied = source_model.write_companions(run.config, original.folder, work, is_trained=saved.step > 0)
        else:
            copied = source_model.write_tokenizer(run.config, work)
            if copied and (tokenizer := tokenizer_of(run.config)).masked is None:
                ends = ends_of_text(tokenizer, read_templates(run.config.data.tokenizer))
                theirs["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
        if configs.change_dtype(theirs, dtype) or original is None:
            # A new model has no config.json yet.
            configs.save_config(work, theirs)
    names = ", ".join([*sorted(files.headers), *files.texts, *dict.fromkeys([configs.CONFIG, *copied])])
    return (
        f"read       {'average of the weights at ' if average else ''}step {saved.step} of {source}\n"
        f"written    {target}: {run.architecture.name}, {tensors.num_params:,} parameters; {names}\n"
        f"next       transformers.{run.architecture.name}.from_pretrained({target!r})"
    )


def export_adapters(source: str, target: str, *, step: int | None = None, average: bool = False) -> str:
    """Writes the adapters of a run as the files of peft in `target`; returns the report.

    Raises:
        ConfigError: the run has no adapters, peft has none of their form, or as `export_model`.
    """
    path = run_folder.path_of(target)
    flag = f"--to={PEFT}{target}"
    check_target(path, flag=flag)
    run = _SavedRun.open(source)
    if not adapted_columns(run.model.config):
        raise ConfigError(
            f"{flag} of a run without adapters",
            rule="peft-export: peft's files have adapters, which a run has with model.lora_rank above 0",
            repair=f"export the whole model: --to={HF}{target}",
        )
    saved = open_canonical(run.path, model=run.model, step=step, average=average)
    with whole_folder(path, flag=flag) as work:
        base = str(run.theirs.get("_name_or_path", ""))
        num_params = adapters.write(work, run.architecture, run.model, saved.read, base=base)
        kept = run.path / adapters.FOLDER / adapters.CONFIG
        if kept.is_file() and adapters.describes(kept, work / adapters.CONFIG):
            shutil.copyfile(kept, work / adapters.CONFIG)
    return (
        f"read       step {saved.step} of {source}\n"
        f"written    {target}: {num_params:,} parameters of adapters; {adapters.FILE}, {adapters.CONFIG}\n"
        f"next       peft.PeftModel.from_pretrained(model, {target!r})"
    )


def import_adapters(source: str, target: str, *, base: str | None) -> str:
    """Makes the run `target` of the model of the run `base` with the adapters in the folder `source` of peft.

    Raises:
        ConfigError: `base` is not named, the adapters are not for its model or of a kind that jaxpipe does not have, or
            the target exists.
    """
    if base is None:
        raise ConfigError(
            f"--from={PEFT}{source} without --base",
            rule="peft-base: adapters stand beside the kernels of a model, that of a run",
            repair=f"import the model first, --from={HF}DIR --to=runs/base, and name it: --base=runs/base",
        )
    path = run_folder.path_of(target)
    check_target(path, flag=f"--to={target}")
    run_folder.check_name(path, flag=f"--to={target}")
    run = _SavedRun.open(base)
    if getattr(run.config.model, "lora_rank", None) != 0:
        raise ConfigError(
            f"--base={base} has adapters itself, or a family without them",
            rule="peft-base: adapters are for the model of a run that has none",
            repair="name the run that the adapters began with",
        )
    folder = run_folder.path_of(source)
    files = adapters.PeftFiles.open(folder)
    widest = run.config.replaced({"model.lora_rank": int(files.about["r"]), "model.lora_targets": "all"})
    fields = files.lora_fields(run.architecture, LanguageModel(model_config(widest)))
    config_with = run.config.replaced({f"model.{name}": value for name, value in fields.items()})
    model = LanguageModel(model_config(config_with))
    arrays = files.read(run.architecture, model)
    saved = open_canonical(run.path, model=run.model)

    def value(key_path: Any, _: Any) -> Any:
        name = jax.tree_util.keystr(key_path, simple=True, separator=".")
        return arrays[name] if name in arrays else saved.read(name)

    params = jax.tree_util.tree_map_with_path(value, jax.eval_shape(model.init, jax.random.key(0)))
    with whole_folder(path, flag=f"--to={target}") as work:
        save_canonical(work, step=0, params=params)
        run_folder.write_config(work, config_with)
        source_model.copy_source_model(run.path, work)
        (work / adapters.FOLDER).mkdir()
        shutil.copyfile(folder / adapters.CONFIG, work / adapters.FOLDER / adapters.CONFIG)
    return (
        f"read       adapters of rank {fields['lora_rank']} beside {fields['lora_targets']} from {source}\n"
        f"written    {target}: {base} with them"
    )


main = main_of(
    run, execute, define_flags=define_flags, usage=__doc__, required={"from": "hf:DIR", "to": "runs/converted"}
)

if __name__ == "__main__":
    sys.exit(main())
