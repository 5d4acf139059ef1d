"""Converts a config.json of transformers to our config, and the config of our model to a config.json.

Goes in: a config.json. Comes out: our whole config, in which `model` and `data.seq_len` come from that file. The way
back serves models that jaxpipe made: it chooses the first class of transformers whose config, read again, gives the
same model. Left to others: which fields there are (one file a family).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxpipe.config import base_config, model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.config.checks import check_model
from jaxpipe.errors import ConfigError, closest, first_of
from jaxpipe.files import read_whole
from jaxpipe.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxpipe.huggingface.gpt2 import GPT2
from jaxpipe.huggingface.gpt_oss import GPT_OSS
from jaxpipe.huggingface.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from jaxpipe.huggingface.mapping import Architecture, check_supported, read_fields, write_fields
from jaxpipe.huggingface.megatron_bert import MASKED, PRETRAINING
from jaxpipe.huggingface.mixture import MIXTRAL, QWEN3_MOE
from jaxpipe.models import Family, family_named
from jaxpipe.models.rotary import scaling_fields

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        GPT2,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        MIXTRAL,
        QWEN3_MOE,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        PRETRAINING,
        MASKED,
    )
}
CONFIG = "config.json"
MAX_SEQ_LEN = 1024  # limit for a converted config; the user may ask for longer sequences

_DROPOUTS = ("embedding_dropout", "attention_dropout", "hidden_dropout")
_AS_COMPUTED = ("attention", "recompute", "vocab_multiple", "dispatch", "capacity_factor")
# How it is computed, losses of training alone, and adapters, which are merged or stand apart.
_NOT_THE_MODEL = (*_AS_COMPUTED, "balance_loss", "z_loss", "mtp_factor", "lora")


def load_config(folder: Path) -> dict[str, Any]:
    """Returns the config.json in `folder`; ConfigError if the file does not exist, or is not a JSON object."""
    path = folder / CONFIG
    repair = "name a folder that save_pretrained wrote, or a snapshot of a model from the Hugging Face hub"
    if not path.is_file():
        raise ConfigError(
            f"{folder} contains no model of transformers",
            rule=f"huggingface-folder: a model is a folder with {CONFIG} and safetensors files",
            picture=f"no file {path}",
            repair=repair,
        )
    try:
        theirs = json.loads(read_whole(path))
        # A list or a number is JSON too, and has no keys.
        theirs.keys()
    except (AttributeError, OSError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", rule=f"huggingface-config: {CONFIG} is a JSON object", repair=repair
        ) from error
    return theirs


def architecture_of(theirs: dict[str, Any], *, where: str) -> Architecture:
    """Returns the class of transformers whose config `theirs` is; ConfigError if jaxpipe does not have that class."""
    # Base models have no head here; their class is not among the names.
    names = theirs.get("architectures") or ["none"]
    name, *others = map(str, names if isinstance(names, list) else [names])
    if others or name not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: architectures={names} is not known.{closest(name, list(ARCHITECTURES))}",
            rule=f"huggingface-architecture: it is one of {', '.join(ARCHITECTURES)}",
            picture=f"model_type={theirs.get('model_type')!r}",
            repair="convert a model of one of these classes; transformers saves a base model with its head by"
            " ClassWithHead.from_pretrained(...).save_pretrained(...)",
        )
    return ARCHITECTURES[name]


def read_config(theirs: dict[str, Any], *, where: str, names: Collection[str] = ()) -> RunConfig:
    """Returns our config for the model of `theirs`; all other fields are those of `base_config`.

    Args:
        theirs: a config.json.
        where: its path, for errors.
        names: of the tensors in its files, as far as they are known.

    Raises:
        ConfigError: jaxpipe does not support the value of a field, or it has the wrong type.
    """
    architecture = architecture_of(theirs, where=where)
    try:
        return _read_config(theirs, architecture, where=where, names=names)
    except (AttributeError, TypeError) as error:  # of a list where a number should stand
        raise ConfigError(
            f"{where}: a field has a value of the wrong type: {error}",
            rule=f"huggingface-config: {CONFIG} is as transformers writes it",
            repair="download or save the model again",
        ) from error


def _read_config(
    theirs: dict[str, Any], architecture: Architecture, *, where: str, names: Collection[str]
) -> RunConfig:
    check_supported(theirs, architecture.supported, where=where)
    ours = read_fields(theirs, architecture.fields, where=where) | architecture.read(theirs, where)
    ours |= architecture.read_names(theirs, names, where)
    family = family_named(architecture.family)
    defaults = family.fields
    # A field by itself, so that an error names the field of their file.
    fields = {
        f"model.{name}": _of_type(defaults[name], value, path=f"model.{name}", where=where)
        for name, value in _to_section(ours, family).items()
    }
    longest = read_fields(theirs, (architecture.longest,), where=where)["seq_len"]
    # No longer: with sequences of 128k tokens a first try would need too much memory.
    fields["data.seq_len"] = min(_of_type(MAX_SEQ_LEN, longest, path="data.seq_len", where=where), MAX_SEQ_LEN)
    fields["mesh.pipe"] = 1  # so that it runs on one device; --config.mesh.pipe=N makes a pipeline
    config = RunConfig.of(base_config(architecture.family)).replaced(fields)
    check_model(config, name=where)
    return config


def new_config(config: RunConfig, *, dtype: str) -> dict[str, Any]:
    """A config.json for a model that jaxpipe made; ConfigError if no class of transformers has such a model."""
    ours = model_config(config)
    wanted = defining_fields(config)
    misfits: list[tuple[str, list[str]]] = []
    for architecture in ARCHITECTURES.values():
        if architecture.family != config.model.family:
            continue
        theirs = _write_config(architecture, ours, seq_len=config.data.seq_len, dtype=dtype)
        # Read back by the same code, so that what transformers would make of it is what is compared.
        back = defining_fields(read_config(theirs, where=CONFIG))
        different = [f"model.{name}={wanted[name]!r}" for name in wanted if wanted[name] != back[name]]
        if architecture.heads_divide_hidden and ours.anatomy.hidden % ours.anatomy.num_heads:
            different.append(f"model.num_heads={ours.anatomy.num_heads} for model.hidden={ours.anatomy.hidden}")
        if not different:
            return theirs
        misfits.append((architecture.name, different))
    raise ConfigError(
        f"no class of transformers can express this model of family {config.model.family!r}",
        rule="huggingface-export: some class has a field for every property of the model",
        picture="\n".join(f"{name} has no {', '.join(different)}" for name, different in misfits),
        repair="train a model without these; a dropout may be changed in the run's config.json",
    )


def _write_config(architecture: Architecture, ours: Any, *, seq_len: int, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        # Version 4's name, which version 5 reads too.
        "torch_dtype": dtype,
        # Null and not left out: a class has defaults of its own, which are tokens of another vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        architecture.longest.theirs: seq_len,
        **write_fields(_resolved(ours), architecture.fields),
        **architecture.write(ours),
    }


def defining_fields(config: RunConfig, *, dropouts: bool = True) -> dict[str, Any]:
    """Returns the fields that the outputs of a model depend on; two configs of the same model have equal ones.

    Args:
        dropouts: whether to include dropouts, on which only training depends.
    """
    fields = _resolved(model_config(config))
    scaling = fields.get("rope_scaling")
    if scaling is not None:
        # As numbers that have an effect: two scalings that differ in others alone are equal.
        fields["rope_scaling"] = tuple(scaling_fields(replace(scaling, attention_factor=scaling.amplitude)).values())
    left_out = _NOT_THE_MODEL if dropouts else (*_NOT_THE_MODEL, *_DROPOUTS)
    return {name: value for name, value in fields.items() if name not in left_out}


def _resolved(ours: Any) -> dict[str, Any]:
    """The fields of a model's config, with numbers in place of those that follow from others."""
    fields = {name: getattr(ours, name) for name in asdict(ours)}
    if fields["feed_forward"] is None:
        fields["feed_forward"] = ours.anatomy.width
    if "head_size" in fields:
        fields["head_size"] = ours.anatomy.head_size
    return fields


def _to_section(ours: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the section `model` of our config for `ours`, the fields of a model's config."""
    ours = dict(ours)
    scaling = ours.pop("rope_scaling", None)
    if scaling is not None:
        ours |= scaling_fields(scaling)
    if "num_kv_heads" in ours and ours["num_kv_heads"] is None:
        ours["num_kv_heads"] = ours["num_heads"]
    # Where a head's size follows from the others it is "auto", so that a changed `hidden` changes it.
    if ours.get("head_size") is not None and ours["head_size"] * ours["num_heads"] == ours["hidden"]:
        ours["head_size"] = None
    return {name: family.words.get(name) if value is None else value for name, value in ours.items()}


def _of_type(default: Any, value: Any, *, path: str, where: str) -> Any:
    """Returns `value` as the type of `default`; a number as text if the field is text."""
    # A bool is no number here, hence `type` and not `isinstance`.
    if type(default) is str and type(value) is int:
        return str(value)
    # JSON writes 10000.0 as 10000, too.
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(
            f"{where}: the value for {path} is {value!r}, of type {type(value).__name__}",
            rule=f"field-type: {path} is of type {type(default).__name__}",
            repair=f"correct the field of {where}; our default is {default!r}",
        )
    return value


def check_same_model(config: RunConfig, theirs: RunConfig, *, run: str, where: str) -> None:
    """Raises ConfigError if the model of a run is no longer that of the config.json that the run keeps."""
    of_run = defining_fields(config, dropouts=False)
    of_file = defining_fields(theirs, dropouts=False)
    different = [name for name in sorted(of_run.keys() | of_file.keys()) if of_run.get(name) != of_file.get(name)]
    if different:
        lines = [
            f"model.{name}: {of_run.get(name)!r} in the run, {of_file.get(name)!r} by {where}" for name in different
        ]
        raise ConfigError(
            f"{run} is no longer the model that it started from",
            rule="huggingface-origin: a run that keeps a config.json of transformers is the model of that file",
            picture=first_of(lines),
            repair=f"move {Path(where).parent} away to export a new model",
        )


def change_dtype(theirs: dict[str, Any], dtype: str) -> bool:
    """Writes `dtype` into `theirs`; returns whether that changed it.

    Args:
        theirs: a config.json; version 4 has "torch_dtype", version 5 "dtype".
        dtype: "" for no change.
    """
    name = "dtype" if "dtype" in theirs else "torch_dtype"
    if not dtype or theirs.get(name) == dtype:
        return False
    theirs[name] = dtype
    return True


def save_config(folder: Path, theirs: dict[str, Any]) -> None:
    """Writes `theirs` to the config.json in `folder`, formatted as by transformers."""
    (folder / CONFIG).write_text(json.dumps(theirs, indent=2, sort_keys=True) + "\n")
