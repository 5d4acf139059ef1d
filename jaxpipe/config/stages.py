"""How many layers each stage of the schedule that a config asks for holds."""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxpipe.config.base import AUTO
from jaxpipe.config.schedules import build_schedule
from jaxpipe.errors import ConfigError
from jaxpipe.program import balanced_split
from jaxpipe.schedules.files import is_file_name


def layers_per_stage(config: ConfigDict) -> tuple[int, ...]:
    """[stage] the number of layers that it holds: the config's own counts, or the most balanced ones.

    Raises:
        ConfigError: the counts do not fit the stages and the layers, or costs are set that nothing reads.
    """
    _check_enough_layers(config)
    pipeline = config.pipeline
    if pipeline.layers_per_stage != AUTO:
        _check_costs_unset(config)
        return _explicit(config)
    return balanced_split(
        config.model.num_layers,
        _num_stages(config),
        embedding_layers=pipeline.embedding_layers,
        head_layers=pipeline.head_layers,
    )


def _check_enough_layers(config: ConfigDict) -> None:
    num_stages, num_chunks = _num_stages(config), build_schedule(config).placement.num_chunks
    if num_stages > config.model.num_layers:
        fewer = f"mesh.pipe={max(1, config.model.num_layers // num_chunks)} or less, or "
        if is_file_name(config.pipeline.schedule):  # whose devices and stages are as they are
            fewer = ""
        raise ConfigError(
            f"{num_stages} stages for model.num_layers={config.model.num_layers}\n"
            "  rule layer-per-stage: every stage holds at least one layer\n"
            f"      mesh.pipe={config.mesh.pipe} x {num_chunks} on each device = {num_stages}\n"
            f"  repair: set {fewer}model.num_layers={num_stages} or more"
        )


def _check_costs_unset(config: ConfigDict) -> None:
    pipeline = config.pipeline
    costs = [name for name in ("embedding_layers", "head_layers") if pipeline[name]]
    if costs:
        raise ConfigError(
            f"{', '.join(f'pipeline.{name}={pipeline[name]}' for name in costs)}"
            f" with pipeline.layers_per_stage={pipeline.layers_per_stage!r}\n"
            f"  rule balance-costs: what the ends cost decides {AUTO!r} alone; on counts it has no effect\n"
            f"  repair: set {' and '.join(f'pipeline.{name}=0.0' for name in costs)},"
            f" or pipeline.layers_per_stage={AUTO!r}"
        )


def _explicit(config: ConfigDict) -> tuple[int, ...]:
    text, num_layers, num_stages = config.pipeline.layers_per_stage, config.model.num_layers, _num_stages(config)
    balanced = ",".join(map(str, balanced_split(num_layers, num_stages)))
    repair = f"  repair: set pipeline.layers_per_stage={AUTO!r}, which is {balanced!r}"
    try:
        counts = tuple(int(count) for count in text.split(","))
    except ValueError:
        raise ConfigError(
            f"pipeline.layers_per_stage={text!r} is no row of counts\n"
            f"  rule layers-of-stages: {AUTO!r}, or whole numbers with commas between them\n{repair}"
        ) from None
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"pipeline.layers_per_stage={text!r} for model.num_layers={num_layers} on {num_stages} stages\n"
            "  rule layers-of-stages: one count >= 1 for each stage, together model.num_layers\n"
            f"      {len(counts)} counts, the least {min(counts)}, together {sum(counts)}\n{repair}"
        )
    return counts


def _num_stages(config: ConfigDict) -> int:
    return build_schedule(config).num_stages
