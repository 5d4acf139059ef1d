"""What may be done where a microbatch does not fit: each remedy as settings of one model and mesh.

Goes in: a model with its mesh, a microbatch size and a remedy. Comes out: the fastest setting of that remedy that fits,
by prediction; or, if none does, the one of fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jaxpipe.cluster import parse_topology
from jaxpipe.config import RunConfig, read_config_file
from jaxpipe.estimate import Bytes, Estimate, Roofline, Setting, estimate, fits, memory, recomputations, setting_of
from jaxpipe.estimate.plan import MEMORY_MARGIN, bytes_within

CONFIGS = Path(__file__).parents[2] / "configs"
BATCH_SIZE = 128


@dataclass(frozen=True)
class Model:
    """A preset on its mesh, with attention in one kernel, which keeps no scores.

    Attributes:
        preset: its name.
        topology: nodes and GPUs.
        mesh: axis -> devices.
        changes: key -> value, of the config besides.
    """

    preset: str
    topology: str
    mesh: Mapping[str, int]
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As printed."""
        return f"{self.preset}, {self.topology}, {' x '.join(f'{axis} {size}' for axis, size in self.mesh.items())}"


NO_DROPOUT = {"model.attention_dropout": 0.0}
MODELS = (
    Model("gpt3_96b", "a100-80g:4x8", {"tensor": 4, "pipe": 8}, NO_DROPOUT),
    Model("gpt3_134b", "a100-80g:8x8", {"tensor": 4, "pipe": 8, "data": 2}, NO_DROPOUT),
    Model("llama_65b", "a100-80g:4x8", {"tensor": 4, "pipe": 8}),
    Model("llama3_8b", "h100-80g:1x8", {"tensor": 1, "pipe": 8}),
    Model("llama3_70b", "h100-80g:8x8", {"tensor": 4, "pipe": 8, "data": 2}),
    Model("mixtral_8x7b", "h100-80g:2x8", {"tensor": 2, "pipe": 8}),
    Model("qwen3_30b_a3b", "h100-80g:2x8", {"tensor": 2, "pipe": 8}),
)


@dataclass(frozen=True)
class Remedy:
    """A way to hold fewer bytes, or none.

    Attributes:
        name: as printed.
        changes: key -> value, of the config.
        by_stage: whether layers are computed again, as few of each stage as make the step fit.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    by_stage: bool = False


def _schedule(name: str) -> dict[str, str]:
    return {"pipeline.schedule": name}


REMEDIES = (
    Remedy("1F1B"),
    Remedy("BPipe", _schedule("bpipe")),
    Remedy("by stage", by_stage=True),
    Remedy("BPipe, by stage", _schedule("bpipe"), by_stage=True),
    Remedy("full", {"model.recompute": "full"}),
    Remedy("split head", {"pipeline.vocab_over_pipe": "true"}),
    Remedy("ZB-V", _schedule("zb_v")),
    Remedy("V-Half", _schedule("v_half")),
    Remedy("V-Min", _schedule("v_min")),
)


@dataclass(frozen=True)
class Cell:
    """What a remedy comes to.

    Attributes:
        estimate: of its step.
        held: bytes of its fullest device.
    """

    estimate: Estimate
    held: Bytes

    @property
    def setting(self) -> Setting:
        """The setting."""
        return self.estimate.setting

    @property
    def fits(self) -> bool:
        """Whether a device has room for it and the margin."""
        return fits(self.setting, self.held, margin=MEMORY_MARGIN)


@cache
def cell(model: int, microbatch_size: int, remedy: int) -> Cell:
    """The fastest setting that fits, else that of fewest bytes, by index of `MODELS` and `REMEDIES`."""
    cells = [
        Cell(estimate(setting, source(MODELS[model])), memory(setting))
        for setting in settings(MODELS[model], microbatch_size, REMEDIES[remedy])
    ]
    return min(cells, key=lambda cell: (not cell.fits, cell.estimate.step_s if cell.fits else cell.held.total))


def source(model: Model) -> Roofline:
    """Times of the model's GPUs, by their data sheets."""
    return Roofline(parse_topology(model.topology).hardware)


def settings(model: Model, microbatch_size: int, remedy: Remedy) -> Iterator[Setting]:
    """The settings of a remedy: layers by stage balanced with embedding and head, and without."""
    changes = [remedy.changes]
    if "pipeline.vocab_over_pipe" not in remedy.changes:
        changes.append({**remedy.changes, **ends_in_layers(model, microbatch_size)})
    for each in changes:
        plain = setting_of(config(model, microbatch_size, each), parse_topology(model.topology))
        yield plain
        if remedy.by_stage:
            most_bytes = bytes_within(plain, margin=MEMORY_MARGIN)
            yield from recomputations(plain, "full", most_bytes, source(model))


def config(model: Model, microbatch_size: int, changes: Mapping[str, Any]) -> RunConfig:
    """The config that a user would write.

    Raises:
        ConfigError: it cannot run.
    """
    preset = RunConfig.of(read_config_file(str(CONFIGS / f"{model.preset}.py")))
    common = {
        "model.attention": "cudnn",
        "data.batch_size": BATCH_SIZE,
        "pipeline.num_microbatches": BATCH_SIZE // microbatch_size // model.mesh.get("data", 1),
        **{f"mesh.{axis}": size for axis, size in model.mesh.items()},
    }
    return preset.replaced({**common, **model.changes, **changes})


def ends_in_layers(model: Model, microbatch_size: int) -> dict[str, float]:
    """What a config says of the times of embedding and head, for layers by stage."""
    times = source(model).times(setting_of(config(model, microbatch_size, {}), parse_topology(model.topology)))
    layer_s = times.layer_forward_s + times.layer_backward_s
    return {
        "pipeline.embedding_layers": (times.embed_forward_s + times.embed_backward_s) / layer_s,
        "pipeline.head_layers": times.head_s / layer_s,
    }
