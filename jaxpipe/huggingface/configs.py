"""From a config.json of transformers to our config, and from the config of our model to theirs.

Goes in: a config.json. Comes out: all of our config, of which `model` and `data.seq_len` are theirs. The way
back is for models that never came from Hugging Face: it takes the first class of transformers whose config,
read again, is the same model. Left to others: which fields there are (one file a family).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxpipe.config import base_config, model_config
from jaxpipe.errors import ConfigError, closest
from jaxpipe.huggingface.fields import check_only, read_fields, write_fields
from jaxpipe.huggingface.gpt2 import GPT2
from jaxpipe.huggingface.listing import listed
from jaxpipe.huggingface.llama import LLAMA, MISTRAL, QWEN2
from jaxpipe.huggingface.megatron_bert import MASKED, PRETRAINING
from jaxpipe.huggingface.rows import Architecture
from jaxpipe.models import Family, family_named

ARCHITECTURES = {one.name: one for one in (GPT2, LLAMA, MISTRAL, QWEN2, PRETRAINING, MASKED)}
CONFIG = "config.json"
MAX_SEQ_LEN = 1024  # of a converted config: longer sequences are for those who ask for them

_DROPOUTS = ("embedding_dropout", "attention_dropout", "hidden_dropout")
_NOT_THE_MODEL = ("attention", "recompute", "vocab_multiple")  # how it is computed, and rows that nothing reads


def load_config(folder: Path) -> dict[str, Any]:
    """The config.json in `folder`.

    Raises:
        ConfigError: there is none, or it is no JSON object.
    """
    path = folder / CONFIG
    repair = "name a folder that save_pretrained wrote, or a snapshot of a model from the Hugging Face hub"
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no model of transformers\n"
            f"  rule huggingface-folder: a model is a folder with {CONFIG} and safetensors files\n"
            f"      no file {path}\n"
            f"  repair: {repair}"
        )
    try:
        theirs = json.loads(path.read_text())
        theirs.keys()
    except (AttributeError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}\n  rule huggingface-config: {CONFIG} is a JSON object\n  repair: {repair}"
        ) from error
    return theirs


def architecture_of(theirs: dict[str, Any], *, where: str) -> Architecture:
    """The class that `theirs` is the config of.

    Raises:
        ConfigError: none that we have.
    """
    names = theirs.get("architectures") or ["none"]
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: architectures={names} is not known.{closest(str(names[0]), list(ARCHITECTURES))}\n"
            f"  rule huggingface-architecture: it is one of {', '.join(ARCHITECTURES)}\n"
            f"      model_type={theirs.get('model_type')!r}\n"
            "  repair: convert a model of one of these classes; transformers saves a base model with its head\n"
            "      after ClassOfTheHead.from_pretrained(...).save_pretrained(...)"
        )
    return ARCHITECTURES[names[0]]


def read_config(theirs: dict[str, Any], *, where: str) -> ConfigDict:
    """Our config for the model of `theirs`, locked; what is not the model's is as in `base_config`.

    Args:
        theirs: a config.json of transformers 4 or 5.
        where: the file, for messages.

    Raises:
        ConfigError: a field that changes the numbers and that we do not have, or a value of the wrong type.
    """
    architecture = architecture_of(theirs, where=where)
    check_only(theirs, architecture.only, where=where)
    ours = read_fields(theirs, architecture.fields, where=where) | architecture.read(theirs, where)
    config = base_config(architecture.family)
    family = family_named(architecture.family)
    defaults = family.fields
    for name, value in _to_section(ours, family).items():
        config.model[name] = _of_type(defaults[name], value, path=f"model.{name}", where=where)
    longest = read_fields(theirs, (architecture.longest,), where=where)["seq_len"]
    config.data.seq_len = min(_of_type(MAX_SEQ_LEN, longest, path="data.seq_len", where=where), MAX_SEQ_LEN)
    config.mesh.pipe = 1  # so that it runs as it is; --config.mesh.pipe=N makes a pipeline
    return config


def new_config(config: ConfigDict, *, dtype: str) -> dict[str, Any]:
    """A config.json for the model of `config`, which never came from Hugging Face.

    Args:
        config: ours.
        dtype: of the tensors, "float32", "bfloat16" or "float16".

    Raises:
        ConfigError: no class of transformers is this model.
    """
    ours = model_config(config)
    wanted = comparable(config)
    found: list[tuple[str, list[str]]] = []
    for architecture in ARCHITECTURES.values():
        if architecture.family != config.model.family:
            continue
        theirs = _write_config(architecture, ours, seq_len=config.data.seq_len, dtype=dtype)
        back = comparable(read_config(theirs, where=CONFIG))
        different = [f"model.{name}={wanted[name]!r}" for name in wanted if wanted[name] != back[name]]
        if not different:
            return theirs
        found.append((architecture.name, different))
    raise ConfigError(
        f"no class of transformers is this model of family {config.model.family!r}\n"
        "  rule huggingface-export: a class has a field for everything that the model is\n"
        + "".join(f"      {name} has no {', '.join(different)}\n" for name, different in found)
        + "  repair: train a model without these; a dropout may be changed in the run's config.json"
    )


def _write_config(architecture: Architecture, ours: Any, *, seq_len: int, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        architecture.longest.theirs: seq_len,
        **write_fields(_resolved(ours), architecture.fields),
        **architecture.write(ours),
    }


def comparable(config: ConfigDict, *, dropouts: bool = True) -> dict[str, Any]:
    """All that the numbers of the model of `config` depend on, the same for the same model.

    Args:
        config: ours.
        dropouts: whether to compare what only training depends on.
    """
    fields = _resolved(model_config(config))
    scaling = fields.get("rope_scaling")
    if scaling is not None:
        fields["rope_scaling"] = tuple(_scaling_fields(scaling).values())
    left_out = _NOT_THE_MODEL if dropouts else (*_NOT_THE_MODEL, *_DROPOUTS)
    return {name: value for name, value in fields.items() if name not in left_out}


def _resolved(ours: Any) -> dict[str, Any]:
    """The fields of a model's config, with numbers in place of what may be derived."""
    fields = {name: getattr(ours, name) for name in asdict(ours)}
    if fields["feed_forward"] is None:
        fields["feed_forward"] = ours.anatomy.width
    if "head_size" in fields:
        fields["head_size"] = ours.anatomy.head_size
    return fields


def _to_section(ours: dict[str, Any], family: Family) -> dict[str, Any]:
    """`ours`, fields of a model's config, as fields of `model`."""
    ours = dict(ours)
    scaling = ours.pop("rope_scaling", None)
    if scaling is not None:
        ours |= _scaling_fields(scaling)
    if "num_kv_heads" in ours and ours["num_kv_heads"] is None:
        ours["num_kv_heads"] = ours["num_heads"]
    if ours.get("head_size") is not None and ours["head_size"] * ours["num_heads"] == ours["hidden"]:
        ours["head_size"] = None
    return {name: family.words.get(name) if value is None else value for name, value in ours.items()}


def _scaling_fields(scaling: Any) -> dict[str, Any]:
    fields = {"rope_scaling": scaling.kind, "rope_scaling_factor": scaling.factor}
    if scaling.kind == "llama3":
        fields |= {
            "rope_low_frequency_factor": scaling.low_freq_factor,
            "rope_high_frequency_factor": scaling.high_freq_factor,
            "rope_original_positions": scaling.original_max_position,
        }
    return fields


def _of_type(default: Any, value: Any, *, path: str, where: str) -> Any:
    """`value` as the type of `default`; numbers in text fields as text."""
    if type(default) is str and type(value) is int:
        return str(value)
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(
            f"{where}: the value for {path} is {value!r}, of type {type(value).__name__}\n"
            f"  rule field-type: {path} is of type {type(default).__name__}\n"
            f"  repair: mend the field of {where}; our default is {default!r}"
        )
    return value


def check_same(config: ConfigDict, theirs: ConfigDict, *, run: str, where: str) -> None:
    """Raises ConfigError where the model of `config` is not that of `theirs`, whose tensors are its own.

    Args:
        config: of the run.
        theirs: our config for the config.json that the run keeps.
        run: its folder, for the message.
        where: that config.json.
    """
    own, kept = comparable(config, dropouts=False), comparable(theirs, dropouts=False)
    different = [name for name in sorted(own.keys() | kept.keys()) if own.get(name) != kept.get(name)]
    if different:
        lines = [f"model.{name}: {own.get(name)!r} in the run, {kept.get(name)!r} by {where}" for name in different]
        raise ConfigError(
            f"{run} is no longer the model that it came from\n"
            "  rule huggingface-origin: a run that keeps a config.json of transformers is the model of that file\n"
            f"{listed(lines)}"
            f"  repair: move {Path(where).parent} away, for the config.json of a new model"
        )


def change_dtype(theirs: dict[str, Any], dtype: str) -> bool:
    """Writes `dtype` into `theirs` where it says another; whether it did.

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
    """Writes `theirs` to `folder`, as transformers does."""
    (folder / CONFIG).write_text(json.dumps(theirs, indent=2, sort_keys=True) + "\n")
