"""The field `model.recompute` where it counts layers by stage: `full:4,3,2,0`, or `auto:70GiB`, which decides counts.

Goes in: a config. Comes out: how many layers of each stage are computed again. Left to others: what a kind computes
again (`jaxpipe.models.choices`), and which counts fit into a device (`jaxpipe.estimate.recompute`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxpipe.config.base import AUTO, RunConfig
from jaxpipe.config.costs import BACKWARD_COSTS
from jaxpipe.config.model import check_choices_of, family_of, kind_of_others
from jaxpipe.config.pipeline import layers_per_stage, outline
from jaxpipe.errors import ConfigError, check_choice
from jaxpipe.models.choices import NOTHING, RECOMPUTE
from jaxpipe.units import bytes_of

FULL = "full"


@dataclass(frozen=True)
class Recomputed:
    """Layers that backward computes again, counted by stage.

    Attributes:
        kind: what of them is computed again, as of `model.recompute`; of the other layers nothing.
        counts: [stage] its first layers.

    Example:
        >>> str(Recomputed("full", (4, 3, 2, 0)))
        'full:4,3,2,0'
    """

    kind: str
    counts: tuple[int, ...]

    @property
    def more(self) -> tuple[float, ...]:
        """[stage] what its backward computes again, in forwards of a layer."""
        again = BACKWARD_COSTS[self.kind] - BACKWARD_COSTS[NOTHING]
        return tuple(again * num for num in self.counts)

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(map(str, self.counts))}"


def recomputed_of(config: RunConfig) -> Recomputed | None:
    """The layers of each stage that `model.recompute` counts; None if it counts none, or has yet to be decided.

    Raises:
        ConfigError: the counts do not fit the stages and their layers.
    """
    kind, is_list, text = config.model.recompute.partition(":")
    if not is_list or kind == AUTO:
        return None
    counts = _counts(config, text)
    return Recomputed(kind, counts) if any(counts) else None


def most_bytes(config: RunConfig) -> int | None:
    """The bytes of a device that `model.recompute="auto:BYTES"` names; None if it is something else.

    Raises:
        ConfigError: it names none.
    """
    kind, _, text = config.model.recompute.partition(":")
    if kind != AUTO:
        return None
    most = bytes_of(text)
    if most is None:
        raise ConfigError(
            f"model.recompute={config.model.recompute!r} names no bytes",
            rule="recompute-bytes: auto: and the bytes that a step may take of a device, in GiB or MiB",
            repair="set for example model.recompute='auto:70GiB'",
        )
    return most


def check_recompute(config: RunConfig) -> None:
    """Raises ConfigError unless the layers that `model.recompute` counts are there, and a program can tell them."""
    text = config.model.recompute
    kind, is_list, _ = text.partition(":")
    if not is_list:
        return  # the family checks it
    if kind == AUTO:
        most_bytes(config)
    known = family_of(config).choices.get("recompute", RECOMPUTE)
    check_choice("model.recompute", kind, (AUTO, *(other for other in known if other != kind_of_others(config))))
    check_choices_of(config, recompute=FULL if kind == AUTO else kind)
    if outline(config).delays:
        raise ConfigError(
            f"model.recompute={text!r} with pipeline.schedule={config.pipeline.schedule!r}",
            rule="recompute-flush: without flush slots of all stages have one size, so all layers save alike",
            repair=f"set model.recompute={FULL!r} or 'none', or pipeline.schedule='1f1b'",
        )
    recomputed_of(config)


def _counts(config: RunConfig, text: str) -> tuple[int, ...]:
    """[stage] the counts of a list, of one count a stage or a device."""
    layers = layers_per_stage(config)
    placement = outline(config).placement
    whole = f"model.recompute={config.model.recompute!r}"
    repair = f"set for example model.recompute={str(Recomputed(FULL, _example(layers)))!r}"
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise ConfigError(
            f"{whole} is not a list of counts",
            rule="recompute-list: a kind, a colon, and whole numbers separated by commas",
            repair=repair,
        )
    counts = tuple(map(int, text.split(",")))
    if placement.num_replicas == 1 and len(counts) == placement.num_devices:
        counts = tuple(counts[device] for device in placement.devices[0])
    if len(counts) != len(layers):
        raise ConfigError(
            f"{whole} has {len(counts)} counts",
            rule="recompute-list: one count a stage, in the order of the model, or one a device for all its stages",
            picture=f"{len(layers)} stages on {placement.num_devices} devices",
            repair=repair,
        )
    if wrong := [stage for stage, most in enumerate(layers) if counts[stage] > most]:
        raise ConfigError(
            f"{whole} counts {counts[wrong[0]]} layers of stage {wrong[0]}",
            rule="recompute-layers: of a stage at most all its layers are computed again",
            picture=f"layers per stage: {','.join(map(str, layers))}",
            repair=repair,
        )
    return counts


def _example(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Counts that fall from stage to stage, as what 1F1B holds does."""
    first, *others = (most * (len(layers) - 1 - stage) // len(layers) for stage, most in enumerate(layers))
    return max(1, first), *others
