"""All fields of a config with their meanings, defaults and legal values; those of `model` are defined by its family.

A user's config is a `ConfigDict` of `base_config`. All else reads a `RunConfig`: the same fields as a value, which
nobody can write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from functools import cache
from typing import Any, get_type_hints

from ml_collections import ConfigDict

from jaxpipe.cluster.assignment import ORDERS
from jaxpipe.cluster.axes import AXES, ROWS, MeshSizes
from jaxpipe.config.legal import MOST_DEVICES, OF_MODEL, UINT32, Legal, at_least, one_of, positive
from jaxpipe.config.optimizers import OptimizerSection
from jaxpipe.config.other_names import closest_field, elsewhere
from jaxpipe.data.packing import PACKING, WINDOWS
from jaxpipe.errors import ConfigError
from jaxpipe.models import FAMILIES, Family, family_named
from jaxpipe.sharding import NONE_KEPT, Shard

AUTO = "auto"  # value of a field that is derived from others


@dataclass(frozen=True)
class DataSection:
    """The section `data`; which fields a config has depends on what its family reads."""

    # A glob of text files, ** descends; "auto": Python's standard library; "indexed:PREFIX": what jaxpipe.prepare
    # wrote, or Megatron-LM, as PREFIX.bin and PREFIX.idx; "indexed:0.7 PREFIX 0.3 PREFIX": a blend, by weight.
    files: str = AUTO
    tokenizer: str = "byte"  # a token is a byte; or the path of a tokenizer.json, or of a folder that has one
    # Sequences of one step, over all devices; of a model given in Python 0: as many as the batches have.
    batch_size: int = positive(32, most=2**24)
    seq_len: int = positive(128, most=2**26)  # tokens of one sequence
    heldout_fraction: float = positive(0.05, most=0.5)  # fraction of the text that is held out, about
    seed: int = at_least(0, 0, most=UINT32)  # of the order of the sequences, and of masks
    # The contents of a row: "windows" of the running text, in which attention crosses the ends of documents;
    # whole "documents" back to back, each of which sees itself alone; "none", one document, padded.
    packing: str = one_of(PACKING, WINDOWS)
    mask_fraction: float = positive(0.15, most=1.0)  # fraction of the tokens of a sequence to predict
    short_fraction: float = at_least(0, 0.1, most=1.0)  # fraction of sequences shorter than seq_len, about


@dataclass(frozen=True)
class PipelineSection:
    """The section `pipeline`."""

    # A key of jaxpipe.schedules.REGISTRY; a .py file with a method of your own; or the path of a schedule's .csv or
    # .json, as jaxpipe.optimize writes it.
    schedule: str = "1f1b"
    options: str = ""  # of the schedule, as "num_chunks=3,eager_sync=false" of bitpipe
    # Expected times of a stage's actions, for orders, rounds and predictions: "forward=1.0,backward=1.8", only ratios
    # matter, keys are fields of jaxpipe.schedules.Costs; or a file of jaxpipe.measure. "auto": those of a known GPU,
    # else by model.recompute, except for times in options.
    costs: str = AUTO
    # Of one step; times the devices of mesh that split microbatches it divides data.batch_size.
    num_microbatches: int = positive(16, most=1_000_000)
    layers_per_stage: str = AUTO  # one count a stage, as "4,4,3,5"; "auto": as balanced as possible
    embedding_layers: float = at_least(0, 0.0)  # cost of the embedding in the first stage, in layers, for "auto"
    head_layers: float = at_least(0, 0.0)  # cost of head and loss in the last stage, in layers, for "auto"
    # Embedding and head: "true" splits them by rows of the vocabulary over mesh.pipe too, and gives every
    # device its part of each microbatch's head; "false" has them in the first and the last stage; "auto": "true" where
    # a step is estimated to be shorter, on GPUs that are known.
    vocab_over_pipe: str = one_of((AUTO, "true", "false"), "false")
    overlap: bool = False  # whether forwards and backwards are one action where that makes the step no longer


# Keyword-only as the sizes, whose defaults of a new config are those of their rows.
@dataclass(frozen=True, kw_only=True)
class MeshSection(MeshSizes):
    """The section `mesh`: devices along each axis, as `jaxpipe/cluster/axes.py` describes it, and which they are."""

    platform: str = AUTO  # "gpu", "cpu" (virtual devices); "auto": GPUs where the mesh fits, else cpu
    # Which device holds which stage: "contiguous", in the order of the devices; "pair_adjacent", both devices of a pair
    # (d, D-1-d) in one node; "replicas_together", all devices that hold a stage in one node, in both directions and in
    # all copies. "auto": pair_adjacent if the schedule moves activations within pairs; with two replicas, the first of
    # replicas_together, pair_adjacent and contiguous in which the mesh can be laid out.
    order: str = one_of((AUTO, *ORDERS), AUTO)
    # What devices with equal copies of a layer share among themselves. "none": nothing; "optimizer": master weights and
    # optimizer state, of embedding and head over mesh.pipe too (ZeRO stage 1); "gradients": running sums of gradients,
    # too (stage 2); "weights": compute copies, too, which each action gathers (stage 3, FSDP).
    shard: str = one_of(tuple(Shard), Shard.OPTIMIZER.value)
    # With shard "weights" the bytes of gathered layers that a device may keep from action to action, as "12GiB": of as
    # many chunks as fit, whose actions gather nothing while they are there. "none": each action gathers its layers.
    keep_gathered: str = NONE_KEPT
    # With "gradients" or "weights" the bytes of whole float32 sums that a device may keep: those of a chunk travel once
    # it leaves. "none": each backward sums its layers over devices.
    keep_sums: str = NONE_KEPT
    # In which gradients travel to be summed over devices; "bfloat16" halves their bytes and rounds them.
    sums_dtype: str = one_of(("float32", "bfloat16"), "float32")
    deterministic: bool = False  # True: sums over devices are added in mesh order, with equal digits in every run


@dataclass(frozen=True)
class TrainSection:
    """The section `train`."""

    steps: int = 300
    seed: int = at_least(0, 0, most=UINT32)  # of the initial parameters and of dropout
    eval_every: int = 100  # steps between held-out losses; there is always one at the end
    # Steps between rows of metrics; a step with a held-out loss, or whose numbers are not finite, always has one.
    log_every: int = 1
    eval_batches: int = 8  # held-out batches of one evaluation, at most
    # Consecutive skipped steps (loss or gradients not finite) before the run ends with an error.
    max_skipped_in_row: int = 5
    lost_after_s: float = positive(120.0, most=1e9)  # a process lost or stuck in a step for so long ends the run


@dataclass(frozen=True)
class CheckpointSection:
    """The section `checkpoint`."""

    init_from: str = ""  # folder of a run whose parameters the run starts from; "": initial ones
    save_every: int = at_least(0, 100)  # steps between checkpoints of the train state; 0: none before the end
    save_at_end: bool = True  # whether there is one after the last step, whatever save_every says
    keep_last: int = 3  # number of newest checkpoints that are kept
    keep_every: int = at_least(0, 0)  # steps between checkpoints that are kept forever; 0: none
    keep_best: int = at_least(0, 0)  # number of checkpoints with the least held-out loss that are kept


@dataclass(frozen=True)
class RunConfig:
    """A config as a value; hashable.

    Attributes:
        model: a dataclass of the fields of the family, which `jaxpipe.models` defines.
        data, pipeline, mesh, optimizer, train, checkpoint: the other sections.
    """

    model: Any
    data: DataSection
    pipeline: PipelineSection
    mesh: MeshSection
    optimizer: OptimizerSection
    train: TrainSection
    checkpoint: CheckpointSection

    @classmethod
    def of(cls, config: ConfigDict | RunConfig) -> RunConfig:
        """The value of a user's config.

        Raises:
            ConfigError: it has a field that is none.
        """
        if isinstance(config, RunConfig):
            return config
        sections = config.to_dict()
        try:
            model = _model_value(sections.pop("model"))
            config = cls(model, **{name: _CLASSES[name](**values) for name, values in sections.items()})
        except (KeyError, TypeError) as error:
            raise unknown_field(error, where="the config", repair="use one of them") from error
        return config if config.optimizer.zero1 else config._with_shard_of_zero1()

    def _with_shard_of_zero1(self) -> RunConfig:
        if self.mesh.shard != Shard.OPTIMIZER:
            raise ConfigError(
                f"optimizer.zero1=False with mesh.shard={self.mesh.shard!r}",
                rule="older-field: optimizer.zero1=False stands for mesh.shard='none', and says nothing beside it",
                repair="leave optimizer.zero1 out",
            )
        return self.replaced({"mesh.shard": Shard.NONE.value, "optimizer.zero1": True})

    def replaced(self, fields: Mapping[str, object]) -> RunConfig:
        """The config with other values of some fields, by path, as {"mesh.pipe": 2}."""
        config = self
        for path, value in fields.items():
            section, name = path.split(".")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        return config

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The fields of a user's config, section by section."""
        sections = asdict(self)
        sections["data"] = {name: sections["data"][name] for name in _data_fields(family_named(self.model.family))}
        return sections

    @property
    def microbatch_size(self) -> int:
        """Sequences of a microbatch on one device."""
        return self.data.batch_size // (self.mesh.num_batch_parts * self.pipeline.num_microbatches)

    @property
    def by_path(self) -> dict[str, Any]:
        """The values of all fields by path, as "mesh.pipe"."""
        return {f"{name}.{field}": value for name, of in self.to_dict().items() for field, value in of.items()}


def base_config(family: str = "gpt") -> ConfigDict:
    """A locked config with all fields at their defaults, which can be set but not added to.

    Args:
        family: name of the model family, as for `jaxpipe.models.family_named`; decides the fields of `model` and
            `data`. "given": model and batches are given to `jaxpipe.training.fit`.

    Raises:
        ConfigError: there is no such family.
    """
    data = DataSection(batch_size=0) if family_named(family).is_given else DataSection()
    axes: dict[str, Any] = {row.name: row.default for row in ROWS}
    mesh = MeshSection(**axes)
    others = (PipelineSection(), mesh, OptimizerSection(), TrainSection(), CheckpointSection())
    sections = RunConfig(_model_value(model_section(family)), data, *others).to_dict()
    config = _unsorted({name: _unsorted(values) for name, values in sections.items()})
    return config.lock()


def _unsorted(values: dict[str, Any]) -> ConfigDict:
    return ConfigDict(values, sort_keys=False)  # pyright: ignore[reportCallIssue]  # its stub is behind


def model_section(name: str) -> dict[str, Any]:
    """All fields of `model` of a family, with their defaults."""
    return {"family": name, **family_named(name).fields}


def _data_fields(family: Family) -> list[str]:
    """The names of the fields of `data` that a config of the family has."""
    if family.is_given:
        return ["batch_size"]
    left_out = {"packing"} if family.masked else {"mask_fraction", "short_fraction"}
    return [field.name for field in fields(DataSection) if field.name not in left_out]


def legal_of(path: str) -> Legal:
    """The legal values of a field of `RunConfig`, by path."""
    section, name = path.split(".")
    if section == "model":
        return OF_MODEL.get(name, Legal())
    if section == "mesh" and name in AXES:
        return Legal(most=MOST_DEVICES)
    declared = {field.name: field.metadata for field in fields(_CLASSES[section])}
    return declared[name].get("legal", Legal())


@cache
def _model_class(names: tuple[str, ...]) -> type:
    # One class for equal names, so that equal sections compare as equal.
    return make_dataclass("ModelSection", names, frozen=True)


def _model_value(values: dict[str, Any]) -> Any:
    return _model_class(tuple(values))(**values)


# Section -> its dataclass, but for `model`.
_CLASSES = {name: kind for name, kind in get_type_hints(RunConfig).items() if name != "model"}


def example_of(family: Family) -> str:
    """Text for the end of a repair: where a config of `family` stands."""
    return f", for example --config={family.example}" if family.example else ""


def unknown_field(error: BaseException, *, where: str, repair: str) -> ConfigError:
    """The error for a field that is unknown, of another model family or of the wrong type.

    Args:
        error: an AttributeError, KeyError or TypeError of ml_collections.
        where: the source that was being read.
        repair: advice for the user if the field belongs to no family.
    """
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    text = str(error.args[0] if error.args else error)
    other = None if isinstance(error, TypeError) else _other_families(text)
    if other:
        field, families = other
        return ConfigError(
            f"model.{field} is no field of this model's family, in {where}",
            rule=(
                f"model-family: a model has the fields of its family, and {field} is one of"
                f" model.family={' or '.join(map(repr, families))} alone"
            ),
            repair=f"leave it out, or take a config of base_config(family={families[0]!r})"
            + example_of(FAMILIES[families[0]]),
        )
    return ConfigError(
        f"a field is unknown or of the wrong type, in {where}\n" + _with_names_of_others(text.strip("\"'")),
        rule="config-fields: the fields and their types are those of jaxpipe.config.base_config()",
        repair=repair,
    )


def _with_names_of_others(text: str) -> str:
    """`text` of ml_collections with what other trainers' name in it is here, and its guess only if that is close."""
    named = re.search(r'^Key "(\w+)" does not exist', text)
    guess = re.search(r'\s*Did you mean "(\w+)"[^\n?]*\?', text)
    if not named:
        return text
    if other := elsewhere(named[1]):
        return f"{named[1]}: {other}\n{text[: guess.start()] if guess else text}"
    return text[: guess.start()] if guess and not closest_field(named[1], [guess[1]]) else text


def _other_families(text: str) -> tuple[str, list[str]] | None:
    """The field that `text` names first, and the families that have it; None if all or none have it."""
    quoted = re.search(r"""["'](\w+)["']""", text)
    families = [name for name in FAMILIES if quoted and quoted[1] in model_section(name)]
    return (quoted[1], families) if quoted and 0 < len(families) < len(FAMILIES) else None
