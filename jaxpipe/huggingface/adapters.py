"""Adapters in the files of Hugging Face's peft, and merged into the kernels of a model.

Goes in: a model with adapters, or a folder of peft. Comes out: kernels with adapters added, or the two files,
adapter_config.json and adapter_model.safetensors, byte for byte as they came in. The modules of transformers that have
adapters are those of the table of its class: the weights of a kernel of ours, one for each part of its columns.
Source: peft 0.21, `LoraConfig` and `get_peft_model_state_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.errors import ConfigError, first_of
from jaxpipe.files import read_whole
from jaxpipe.huggingface.mapping import SEPARATE_QKV_WEIGHTS, TRANSPOSED, Architecture
from jaxpipe.huggingface.tensor_files import TensorFiles, TensorWriter, new_header
from jaxpipe.models import LanguageModel
from jaxpipe.models.lora import NAMES, Columns, Lora, merged
from jaxpipe.models.parameters import adapted_columns

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
FOLDER = "peft"  # of a run, with the config that its adapters came with
_PREFIX = "base_model.model."
_SIDES = ("lora_A", "lora_B")  # of peft, in the order of NAMES
_WEIGHT = ".weight"

# Fields that change what an adapter computes, and the values that jaxpipe has.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}


@dataclass(frozen=True)
class _Merged:
    """A kernel into which its adapters are merged layer by layer, when a layer is asked for."""

    kernel: np.ndarray
    columns: Columns
    adapters: Mapping[str, tuple[np.ndarray, np.ndarray]]  # A and B with all layers, by the name of their part

    def __getitem__(self, layer: int) -> np.ndarray:
        of_layer = {name: (a[layer], b[layer]) for name, (a, b) in self.adapters.items()}
        # As the stream of weights merges them: both have the same numbers.
        return np.asarray(jax.jit(merged, static_argnums=1)(self.kernel[layer], self.columns, of_layer))


def read_merged(read: Callable[[str], np.ndarray], model: LanguageModel) -> Callable[[str], Any]:
    """`read` of the canonical parameters of a model with adapters, as that of the model into which they are merged."""
    adapted = adapted_columns(model.config)

    def read_one(path: str) -> Any:
        linear, _, kind = path.rpartition(".")
        columns = adapted.get(linear) if kind == "kernel" else None
        array = np.asarray(read(path), np.float32)
        if columns is None:
            return array
        there = [name for name in columns.names if _lora_of(model).is_target(name)]
        a, b = NAMES
        return _Merged(
            array, columns, {name: (read(f"{linear}.{name}.{a}"), read(f"{linear}.{name}.{b}")) for name in there}
        )

    return read_one


@dataclass(frozen=True)
class Module:
    """A linear layer of transformers that has an adapter."""

    name: str  # with {layer}
    path: str  # of our adapter's parameters
    target: str


def modules_of(architecture: Architecture, model: LanguageModel) -> list[Module]:
    """The modules of `architecture` that have adapters in `model`.

    Raises:
        ConfigError: in peft's form of this class one adapter stands beside queries, keys and values together.
    """
    modules = []
    rows = {row.path: row for row in architecture.parameters}
    lora = _lora_of(model)
    for path, columns in adapted_columns(model.config).items():
        row = rows[f"{path}.kernel"]
        if row.transform not in (TRANSPOSED, SEPARATE_QKV_WEIGHTS):
            raise ConfigError(
                f"{architecture.name} keeps {path} in another form than adapters have it",
                rule="peft-modules: an adapter of jaxpipe stands beside one weight 'out in' of transformers",
                repair="export the merged model: --to=hf:DIR",
            )
        for name, weight in zip(columns.names, row.names, strict=True):
            if lora.is_target(name):
                modules.append(Module(weight.removesuffix(_WEIGHT), f"{path}.{name}", name))
    return modules


def _lora_of(model: LanguageModel) -> Lora:
    lora = getattr(model.config, "lora", None)
    assert isinstance(lora, Lora)
    return lora


def tensors_of(modules: list[Module], num_layers: int) -> Iterator[tuple[str, str, int]]:
    """Yields (name of their tensor, path of our parameter, layer), in the order of peft's file: that of names."""
    named = [
        (f"{_PREFIX}{module.name.format(layer=layer)}.{side}{_WEIGHT}", f"{module.path}.{name}", layer)
        for module in modules
        for layer in range(num_layers)
        for side, name in zip(_SIDES, NAMES, strict=True)
    ]
    yield from sorted(named)


def write(
    folder: Path, architecture: Architecture, model: LanguageModel, read: Callable[[str], np.ndarray], *, base: str
) -> int:
    """Writes the two files of peft; returns the number of parameters.

    Args:
        read: returns the canonical parameter at a path.
        base: name or folder of the model that the adapters are for; "" if it is not known.
    """
    lora = _lora_of(model)
    modules = modules_of(architecture, model)
    tensors = list(tensors_of(modules, model.config.num_layers))
    arrays = {path: np.asarray(read(path), np.float32) for path in dict.fromkeys(path for _, path, _ in tensors)}
    # Ours are "in rank" and "rank out", theirs "rank in" and "out rank".
    shapes = {name: ("F32", arrays[path].shape[:0:-1]) for name, path, _ in tensors}
    writer = TensorWriter(folder / FILE, new_header(shapes, {"format": "pt"}))
    try:
        for name, path, layer in tensors:
            writer.write(name, arrays[path][layer].T)
    finally:
        writer.close()
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "r": lora.rank,
        "target_modules": sorted({module.name.rpartition(".")[2] for module in modules}),
    }
    (folder / CONFIG).write_text(json.dumps(about, indent=2, sort_keys=True))
    return sum(array.size for array in arrays.values())


@dataclass(frozen=True)
class PeftFiles:
    """A folder of peft."""

    about: Mapping[str, Any]  # adapter_config.json
    files: TensorFiles
    where: str

    @classmethod
    def open(cls, folder: Path) -> PeftFiles:
        """Opens the folder; ConfigError if a file is missing, damaged, or of another kind of adapter."""
        path = folder / CONFIG
        try:
            about = json.loads(read_whole(path))
            rank = about["r"]
            alpha = about["lora_alpha"]
            if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
                raise TypeError(f"r={rank!r}, lora_alpha={alpha!r}")
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} cannot be read: {type(error).__name__}: {error}",
                rule=f"peft-files: a folder has {CONFIG} and {FILE}, as peft's save_pretrained writes them",
                repair="save the adapters again",
            ) from error
        for field, values in _SUPPORTED.items():
            if (value := about.get(field, values[0])) not in values:
                raise ConfigError(
                    f"{path}: {field}={value!r}",
                    rule=f"peft-field: {field} is {values[0]!r}; jaxpipe has no other kind of adapter",
                    repair="merge the adapters in peft, merge_and_unload(), and convert the model: --from=hf:DIR",
                )
        return cls(about, TensorFiles(folder, single=FILE), str(folder))

    def lora_fields(self, architecture: Architecture, model: LanguageModel) -> dict[str, Any]:
        """Fields of `model` in a config for these adapters.

        Args:
            model: of the same sizes, with adapters for all that can have some.
        """
        modules = modules_of(architecture, model)
        there = set(self.files.entries)
        num_layers = model.config.num_layers
        targets = [
            module.target for module in modules if there & {name for name, *_ in tensors_of([module], num_layers)}
        ]
        wanted = {name for name, *_ in tensors_of([m for m in modules if m.target in targets], num_layers)}
        if there != wanted or not targets:
            different = sorted(there ^ wanted)
            raise ConfigError(
                f"{self.where} is not of this model: {len(different)} tensors differ",
                rule="peft-tensors: every layer has the same adapters, and there are no other tensors",
                picture=first_of([f"{name}: {'unknown' if name in there else 'missing'}" for name in different]),
                repair=f"name the model that the adapters are for, {self.about.get('base_model_name_or_path')!r}",
            )
        fields = {"lora_rank": self.about["r"], "lora_alpha": float(self.about["lora_alpha"])}
        return fields | {"lora_targets": ",".join(dict.fromkeys(targets))}

    def read(self, architecture: Architecture, model: LanguageModel) -> dict[str, np.ndarray]:
        """Canonical adapters, float32, by path."""
        shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init, jax.random.key(0)))
        like = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in shapes}
        arrays: dict[str, np.ndarray] = {}
        for name, path, layer in tensors_of(modules_of(architecture, model), model.config.num_layers):
            tensor = self.files.read(name).T
            if tensor.shape != like[path][1:]:
                raise ConfigError(
                    f"{self.where}: {name} has the shape {tensor.T.shape}",
                    rule=f"peft-shapes: of this model it is {like[path][:0:-1]}",
                    repair=f"name the model that the adapters are for, {self.about.get('base_model_name_or_path')!r}",
                )
            arrays.setdefault(path, np.empty(like[path], np.float32))[layer] = tensor
        return arrays


def describes(kept: Path, written: Path) -> bool:
    """Whether a config that adapters came with is still that of adapters, of which `written` has a new one."""
    before, now = (json.loads(path.read_text()) for path in (kept, written))
    same = all(before[name] == now[name] for name in ("r", "lora_alpha"))
    return same and sorted(before["target_modules"]) == now["target_modules"]
