"""Measured times of actions and links: `costs.json`, as `python -m jaxpipe.measure` writes it.

Times are those of one layer, of embedding and of head, for several microbatch sizes; between two sizes they are
interpolated linearly. Such times hold for any number of layers, but not for another model, dtype, sequence length or
`tensor`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.cluster.axes import LAYER_AXES, told
from jaxpipe.errors import ConfigError
from jaxpipe.estimate.communication import of_head_s
from jaxpipe.estimate.setting import Group, Setting, placement_of
from jaxpipe.estimate.times import Link, Times, TimeSource, ring_s
from jaxpipe.files import local_path, read_whole
from jaxpipe.models import ModelConfig

FORMAT = 1


@dataclass(frozen=True)
class Measurement:
    """Result of one run of `jaxpipe.measure`.

    Attributes:
        identity: device kind, versions, date, number of processes at once and repeats.
        subject: what was timed: the model's fields except its layers, dtype, seq_len, num_predicted, tensor.
        times: microbatch size -> seconds; their `update_s` is that of `num_update_parameters`. S and T are there
            without collectives over `pipe`, for a head in `head_parts`.
        spread_ratio: microbatch size -> spread of the repeats: the largest interquartile range of any timing,
            over its median.
        num_layer_parameters, num_shared_parameters: numbers of parameters on one device of `tensor`.
        num_update_parameters: number of parameters on the device whose update was timed.
        link: between two of the devices; None if there was only one.
        head_parts: devices of `pipe` over which the head is split that S and T were timed of; 1: they were not timed.
    """

    identity: dict[str, Any]
    subject: dict[str, Any]
    times: dict[int, Times]
    spread_ratio: dict[int, float]
    num_layer_parameters: int
    num_shared_parameters: int
    num_update_parameters: int
    link: Link | None
    head_parts: int = 1

    def to_json(self) -> dict[str, Any]:
        """Returns the measurement in the form of the file."""
        return {"format": FORMAT, **asdict(self)}

    def check(self) -> None:
        """Raises ValueError unless there are a subject and times, finite, 0 or more, above 0 for a layer's forward.

        What a pair hides alone may be less than 0.
        """
        if not isinstance(self.subject, dict):
            raise ValueError(f"subject={self.subject!r}")
        if not self.times:
            raise ValueError("there are no times")
        for size, times in self.times.items():
            # A pair may take longer than its halves, where nothing is there to hide.
            least = {"layer_hidden_s": -inf}
            wrong = {
                name: value
                for name, value in asdict(times).items()
                if value is not None and not least.get(name, 0) <= value < inf
            }
            if not times.layer_forward_s > 0:
                wrong["layer_forward_s"] = times.layer_forward_s
            if wrong:
                said = ", ".join(f"{name}={value:g}" for name, value in wrong.items())
                raise ValueError(f"microbatch size {size}: {said}")

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Measurement:
        """Returns the measurement that `to_json` has written.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: `found` is something else.
        """
        if written["format"] != FORMAT:
            raise ValueError(f"format {written['format']}, not {FORMAT}")
        values = {field.name: written[field.name] for field in fields(cls) if field.name != "head_parts"}
        # Files from before heads were split lack the field.
        values["head_parts"] = written.get("head_parts", 1)
        # JSON has only texts as keys.
        values["times"] = {int(size): Times(**times) for size, times in written["times"].items()}
        values["spread_ratio"] = {int(size): ratio for size, ratio in written["spread_ratio"].items()}
        values["link"] = None if written["link"] is None else Link(**written["link"])
        return cls(**values)


# Measurements have dicts, which no hash takes; caches know a source by its identity.
@dataclass(frozen=True, eq=False)
class Measured:
    """A source of times that reads measurements.

    Attributes:
        measurements: measurements, each of another subject.
        otherwise: source for links that no measurement has timed; they time those within a node.
    """

    measurements: tuple[Measurement, ...]
    otherwise: TimeSource | None = None

    def times(self, setting: Setting) -> Times:
        """The times of `setting`'s actions; of S and T if it has any, and if they were timed for as many devices.

        Raises:
            ConfigError: the model has not been measured, or neither its microbatch size nor a smaller and a larger one.
        """
        measurement = self._measurement(setting)
        size = setting.microbatch_size
        sizes = sorted(measurement.times)
        # No extrapolation: small microbatches leave a GPU idle, so that times bend below the smallest size.
        if not sizes[0] <= size <= sizes[-1]:
            raise ConfigError(
                f"microbatch_size={size} for times that were measured at {', '.join(map(str, sizes))}.",
                rule="measured-sizes: a microbatch size is a measured one, or lies between two of them",
                picture=f"{sizes[0]} <= {size} <= {sizes[-1]} does not hold",
                repair=f"measure with --microbatch_sizes={','.join(map(str, sorted({*sizes, size})))}",
            )
        columns = {
            field.name: [getattr(measurement.times[of_size], field.name) for of_size in sizes]
            for field in fields(Times)
        }
        # None marks what was not timed, as S and T of a model without a split head.
        timed = {name: column for name, column in columns.items() if None not in column}
        times = Times(**{name: float(np.interp(size, sizes, column)) for name, column in timed.items()})
        return _with_update_of(self._with_head_of(times, measurement, setting), measurement, setting)

    def _with_head_of(self, times: Times, measurement: Measurement, setting: Setting) -> Times:
        """`times` with the collectives of S and T, and without both where `setting` has other ones or none."""
        if not setting.vocab_over_pipe or measurement.head_parts != setting.pipe:
            return replace(times, statistics_s=None, gradients_s=None)
        # A measurement with `head_parts` above 1 has timed both.
        assert times.statistics_s is not None
        assert times.gradients_s is not None
        before_s, after_s = of_head_s(setting, self.gather_s)
        return replace(times, statistics_s=times.statistics_s + before_s, gradients_s=times.gradients_s + after_s)

    def link(self, *, in_node: bool) -> Link:
        """Link between two devices of a node, or of two nodes.

        Raises:
            ConfigError: the link has not been measured.
        """
        links = [measurement.link for measurement in self.measurements if measurement.link is not None]
        if in_node and links:
            return links[0]
        if self.otherwise is None:
            where = "two devices of a node" if in_node else "two nodes"
            raise ConfigError(
                f"no link between {where} has been measured.",
                rule=(
                    "measured-links: messages between devices need a link, which is timed if"
                    " there are two devices in a node"
                ),
                picture=f"links measured: {len(links)}, each within a node",
                repair="measure on two devices or with --num_processes=2, or give a source that knows the link",
            )
        return self.otherwise.link(in_node=in_node)

    def gather_s(self, group: Group, num_bytes: float) -> float:
        """Seconds of a ring over the links that messages take."""
        return ring_s(group, num_bytes, lambda in_node: self.link(in_node=in_node))

    def _measurement(self, setting: Setting) -> Measurement:
        wanted = subject_of(setting)
        for measurement in self.measurements:
            if measurement.subject == wanted:
                return measurement
        differing = [_differing(wanted, measurement.subject) for measurement in self.measurements]
        # The measurement with the fewest differing fields is most likely the one that was meant.
        nearest = min(differing, key=len)
        raise ConfigError(
            "no measurement fits this model as it is to be trained.",
            rule="measured-model: times are of one model, of any number of layers, its dtype, seq_len and "
            + ", ".join(told(setting.axes, LAYER_AXES)),
            picture=f"nearest: {'; '.join(nearest)}",
            repair="time this model too with python -m jaxpipe.measure, and give both files",
        )


def read_costs(path: str | Path, *more: str | Path, otherwise: TimeSource | None = None) -> Measured:
    """The times in `costs.json` files, each of another model, dtype, sequence length, recomputation or split layer.

    Args:
        path, more: files that `python -m jaxpipe.measure --output=FILE` wrote.
        otherwise: source for links that the files lack, such as those between two nodes.

    Raises:
        ConfigError: a file does not exist, or is not such a file.
    """
    return Measured(tuple(map(_read, (path, *more))), otherwise)


def subject_of(setting: Setting) -> dict[str, Any]:
    """All properties that the times of `setting` depend on besides its microbatch size, as JSON values."""
    return subject(
        setting.model,
        dtype=setting.dtype,
        seq_len=setting.seq_len,
        num_predicted=setting.num_predicted,
        **told(setting.axes, LAYER_AXES),
    )


def subject(model: ModelConfig, **others: Any) -> dict[str, Any]:
    """Identity of what is timed, as JSON values: `model` except its number of layers, and `others`."""
    # Times are of one layer, so that the number of layers does not matter.
    sizes = {name: value for name, value in asdict(model).items() if name != "num_layers"}
    # Through JSON, so that tuples become lists, as they come back from a file.
    return json.loads(json.dumps({"family": type(model).__name__, **sizes, **others}))


def _read(path: str | Path) -> Measurement:
    try:
        measurement = Measurement.from_json(json.loads(read_whole(local_path(str(path)), waits=True)))
        measurement.check()
        return measurement
    except (AttributeError, OSError, KeyError, RecursionError, TypeError, ValueError) as error:
        # A file that is something else may raise any of these on the way through `from_json`.
        raise ConfigError(
            f"costs={str(path)!r} cannot be read: {type(error).__name__}: {error}",
            rule=f"costs-file: a file that python -m jaxpipe.measure has written, of format {FORMAT}",
            repair="write it again with python -m jaxpipe.measure --config=... --output=costs.json",
        ) from error


def _differing(wanted: dict[str, Any], measured: dict[str, Any]) -> Sequence[str]:
    """Fields that differ, as text."""
    # A dict keeps the order of the fields; a set would change the message from run to run.
    names = dict.fromkeys((*wanted, *measured))
    return [
        f"{name}={wanted.get(name)!r}, measured {measured.get(name)!r}"
        for name in names
        if wanted.get(name) != measured.get(name)
    ]


def _with_update_of(times: Times, measurement: Measurement, setting: Setting) -> Times:
    """`times` with the update scaled to the number of parameters that a device of `setting` holds."""
    numbers = measurement.num_layer_parameters, measurement.num_shared_parameters
    share = num_updated(setting, *numbers) / measurement.num_update_parameters
    return replace(times, update_s=share * times.update_s)


def num_updated(setting: Setting, num_of_layer: int, num_shared: float) -> float:
    """Parameters that a device of `setting` updates, given those of a layer, and of embedding and head, on one."""
    placement = placement_of(setting)
    # Chunks of the second replica come after these; their masters are with the first.
    owned = [chunks[: placement.num_chunks] for chunks in placement.stages_of]
    num_layers = max(sum(setting.layers_per_stage[stage] for _, stage in chunks) for chunks in owned)
    num_of_layers: float = num_layers * num_of_layer
    if setting.shard.splits_masters:
        num_of_layers /= setting.num_master_parts
        num_shared /= setting.num_master_parts
    if setting.shard.splits_masters or setting.vocab_over_pipe:
        # With ZeRO-1 devices of `pipe` share the masters of embedding and head; with a split head the rows.
        num_shared /= setting.pipe
    return num_of_layers + num_shared
