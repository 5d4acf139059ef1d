"""The section `pipeline` of a config: the schedule, the layers of its stages, device order; costs are in `costs`."""

from __future__ import annotations

from jaxpipe.config.base import AUTO, RunConfig
from jaxpipe.config.costs import are_decided, expected_costs, head_share
from jaxpipe.config.data import num_predicted_of
from jaxpipe.config.model import family_of, model_config, vocab_pipe
from jaxpipe.errors import ConfigError, closest
from jaxpipe.files import local_path
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.kinds import kinds_of, layer_of_head, pattern_of
from jaxpipe.models.multi_token import check_further
from jaxpipe.program import balanced_split
from jaxpipe.python_file import is_python_file
from jaxpipe.schedules import Costs, Schedule
from jaxpipe.schedules.files import ENDINGS, is_file_name
from jaxpipe.schedules.methods.registry import find_method, method_names
from jaxpipe.schedules.spec import ScheduleSpec
from jaxpipe.sharding import Shard


def spec_of(config: RunConfig, costs: Costs | None) -> ScheduleSpec:
    """What the schedule of a config is built from.

    Args:
        config: the config; its `pipeline.vocab_over_pipe` says whether rows have S and T.
        costs: expected costs, for which the order is made; None: it is made for the times of the options.
    """
    pipeline = config.pipeline
    spec = ScheduleSpec(pipeline.schedule, config.mesh.pipe, pipeline.options)
    spec = spec.for_costs(costs) if costs else spec
    spec = spec.with_pairs(costs or expected_costs(config)) if pipeline.overlap else spec
    if pipeline.vocab_over_pipe != "true":
        return spec
    share = head_share(model_config(config), config.data.seq_len, num_predicted_of(config))
    return spec.with_head(costs or expected_costs(config), share)


def build_schedule(config: RunConfig) -> Schedule:
    """The schedule that `pipeline` and `mesh.pipe` describe, for times that stand in the config.

    Raises:
        ConfigError: the schedule of a file has another size than the config, or is given options.
        ScheduleError: the schedule cannot be built or read, or breaks a rule.
    """
    config = RunConfig.of(config)
    pipeline = config.pipeline
    if is_file_name(pipeline.schedule) and pipeline.options:
        raise ConfigError(
            f"pipeline.options={pipeline.options!r} with pipeline.schedule={pipeline.schedule!r}",
            rule="file-options: options are for a generator; they have no effect on a schedule from a file",
            repair="set pipeline.options='', or pipeline.schedule to a registered schedule",
        )
    costs = expected_costs(config) if are_decided(pipeline.costs) else None
    schedule = spec_of(config, costs).build(pipeline.num_microbatches)
    _check_sizes(config, schedule)
    return schedule


def check_vocab_over_pipe(config: RunConfig) -> None:
    """Raises ConfigError for a vocabulary that cannot be split over `mesh.pipe`; see `check_divides` for its rows."""
    pipeline = config.pipeline
    if pipeline.vocab_over_pipe == "false" and is_written_with_head(config):
        raise ConfigError(
            f"pipeline.vocab_over_pipe=false with pipeline.schedule={pipeline.schedule!r}, which has S and T",
            rule="vocab-over-pipe: S and T are a head whose rows all stages share",
            repair="set pipeline.vocab_over_pipe=true, or name a schedule without S and T",
        )
    if pipeline.vocab_over_pipe != "true":
        return
    reasons = {
        f"mesh.pipe={config.mesh.pipe}": config.mesh.pipe == 1,
        f"model.family={config.model.family!r}, whose head is one function": family_of(config).is_given,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"pipeline.vocab_over_pipe=true with {reason}",
                rule="vocab-over-pipe: several stages share the rows of a language model's vocabulary",
                repair="set pipeline.vocab_over_pipe=false",
            )
    costs = [name for name in ("embedding_layers", "head_layers") if getattr(config.pipeline, name)]
    if costs:
        raise ConfigError(
            f"pipeline.vocab_over_pipe=true with pipeline.{costs[0]}={getattr(config.pipeline, costs[0])}",
            rule="balance-costs: all devices have equal parts of embedding and head, so no stage has fewer layers",
            repair=f"set {' and '.join(f'pipeline.{name}=0.0' for name in costs)}",
        )


def check_head_layer(config: RunConfig) -> None:
    """Raises ConfigError for a head with a layer of its own beside what it does not go with."""
    try:
        model = model_config(config)
    except ConfigError:
        return  # `check` reports it by itself
    if layer_of_head(model) is None:
        return
    check_further(model, TensorAxis(num_pipe=vocab_pipe(config)))
    if outline(config).delays:
        raise ConfigError(
            f"a head that predicts a further token with pipeline.schedule={config.pipeline.schedule!r}, without flush",
            rule="further-token: it reads the token table, of which the first stage has another version",
            repair="set pipeline.schedule='1f1b', or model.mtp_factor=0.0",
        )


def check_kinds(config: RunConfig) -> None:
    """Raises ConfigError for layers of several kinds beside what they do not go with."""
    try:
        model = model_config(config)
    except ConfigError:
        return  # `check` reports it by itself
    num_kinds = len(kinds_of(model))
    if num_kinds == 1:
        return
    if pattern_of(model).only and Shard(config.mesh.shard).splits_gradients:
        raise ConfigError(
            f"layers of {num_kinds} kinds, with other parameters, and mesh.shard={str(config.mesh.shard)!r}",
            rule="kinds-compose: a layer that travels behind another one has the same parameters",
            repair=f"set mesh.shard={str(Shard.OPTIMIZER)!r}",
        )
    recompute = str(config.model.recompute)
    others = {
        f"model.recompute={recompute!r}, by stage": (":" in recompute, "model.recompute='none' or 'full'"),
        "pipeline.overlap=True": (config.pipeline.overlap, "pipeline.overlap=False"),
        f"pipeline.schedule={config.pipeline.schedule!r}, which has no flush": (
            bool(outline(config).delays),
            "pipeline.schedule='1f1b'",
        ),
        f"pipeline.schedule={config.pipeline.schedule!r} with pairs": (
            outline(config).has_pairs,
            "pipeline.options without overlap=true",
        ),
    }
    for what, (is_there, repair) in others.items():
        if is_there:
            raise ConfigError(
                f"layers of {num_kinds} kinds with {what}",
                rule="kinds-compose: layers of several kinds need a flush, forwards and backwards in actions of their"
                " own, and all layers computed again or none",
                repair=f"set {repair}",
            )


def check_overlap(config: RunConfig) -> None:
    """Raises ConfigError for pairs that would run as two actions, or beside what they do not go with."""
    if not config.pipeline.overlap:
        return
    others = {
        f"mesh.shard={config.mesh.shard!r}, whose weights and gradients travel behind all layers": Shard(
            config.mesh.shard
        ).splits_gradients,
        f"pipeline.vocab_over_pipe={config.pipeline.vocab_over_pipe}": config.pipeline.vocab_over_pipe != "false",
        f"model.recompute={config.model.recompute!r}, by stage": ":" in str(config.model.recompute),
    }
    for what, is_there in others.items():
        if is_there:
            raise ConfigError(
                f"pipeline.overlap=True with {what}",
                rule="overlap-alone: a forward and a backward are one action of layers that save alike, with a flush",
                repair="set pipeline.overlap=False",
            )
    # Which schedules and options have no pairs, the spec says; any number of microbatches shows it.
    spec = ScheduleSpec(config.pipeline.schedule, config.mesh.pipe, config.pipeline.options).with_pairs(Costs())
    spec.build(spec.least_microbatches)


def is_written_with_head(config: RunConfig) -> bool:
    """Whether `pipeline.schedule` is a schedule file, and its rows have S and T; False for a file that is not there."""
    name = config.pipeline.schedule
    return is_file_name(name) and is_known(name) and outline(config).has_head_actions


def outline(config: RunConfig) -> Schedule:
    """A schedule with the placement, and transfers if any, of `build_schedule`, without a search for its order.

    A method whose order is made for times has no transfers, and few microbatches show the rest.

    Raises:
        ConfigError, ScheduleError: as `build_schedule`.
    """
    pipeline = config.pipeline
    if is_file_name(pipeline.schedule) or not find_method(pipeline.schedule).takes_times:
        return build_schedule(config)
    # A searched order may take seconds; placement and transfers are the same with few microbatches.
    return ScheduleSpec(pipeline.schedule, config.mesh.pipe, pipeline.options).smallest


def is_known(name: str) -> bool:
    """Whether there is a schedule of this name: a registered method, or a file."""
    is_file = is_file_name(name) or is_python_file(name)
    path = name.partition(":")[0] if is_python_file(name) else name
    return local_path(path).is_file() if is_file else name in method_names()


def check_schedule_name(config: RunConfig) -> None:
    """Raises an error unless `pipeline.schedule` is a registered name, a file with a method, or a schedule file."""
    name = config.pipeline.schedule
    if is_python_file(name):
        find_method(name)
    elif name not in method_names() and not is_file_name(name):
        raise ConfigError(
            f"pipeline.schedule={name!r} is not known.{closest(name, method_names())}",
            rule=(
                f"field-choice: pipeline.schedule is one of {', '.join(method_names())}, or"
                f" the path of a file whose name ends in {' or '.join(ENDINGS)},"
                f" or of a method's, which ends in .py"
            ),
            repair="set pipeline.schedule to one of these",
        )


def _check_sizes(config: RunConfig, schedule: Schedule) -> None:
    path = config.pipeline.schedule
    mesh = config.mesh
    pipeline = config.pipeline
    sizes = (
        ("mesh.pipe", mesh.pipe, schedule.num_devices),
        ("pipeline.num_microbatches", pipeline.num_microbatches, schedule.batch_size),
    )
    if differ := [(name, ours, theirs) for name, ours, theirs in sizes if ours != theirs]:
        raise ConfigError(
            f"{', '.join((f'{name}={ours}' for name, ours, _ in differ))} with pipeline.schedule={path!r}",
            rule="file-sizes: a schedule from a file fits its own numbers of devices and microbatches only",
            picture=(f"in the file: num_devices={schedule.num_devices}, num_microbatches={schedule.batch_size}"),
            repair=(
                f"set {' and '.join((f'{name}={theirs}' for name, _, theirs in differ))}, or"
                " make a schedule of these sizes with jaxpipe.optimize"
            ),
        )


# ---- Layers of the stages


def layers_per_stage(config: RunConfig) -> tuple[int, ...]:
    """The number of layers of each stage, [stage]: the config's own counts, or the most balanced ones.

    Raises:
        ConfigError: the counts do not fit the stages and the layers, or costs are set that have no effect.
    """
    config = RunConfig.of(config)
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


def _check_enough_layers(config: RunConfig) -> None:
    num_stages = _num_stages(config)
    num_chunks = outline(config).placement.num_chunks
    if num_stages > config.model.num_layers:
        fewer = f"mesh.pipe={max(1, config.model.num_layers // num_chunks)} or less, or "
        if is_file_name(config.pipeline.schedule):  # its devices and stages are fixed
            fewer = ""
        raise ConfigError(
            f"{num_stages} stages for model.num_layers={config.model.num_layers}",
            rule="layer-per-stage: every stage holds at least one layer",
            picture=f"mesh.pipe={config.mesh.pipe} x {num_chunks} on each device = {num_stages}",
            repair=f"set {fewer}model.num_layers={num_stages} or more",
        )


def _check_costs_unset(config: RunConfig) -> None:
    pipeline = config.pipeline
    costs = [name for name in ("embedding_layers", "head_layers") if getattr(pipeline, name)]
    if costs:
        raise ConfigError(
            (
                f"{', '.join((f'pipeline.{name}={getattr(pipeline, name)}' for name in costs))} with"
                f" pipeline.layers_per_stage={pipeline.layers_per_stage!r}"
            ),
            rule=f"balance-costs: costs of embedding and head decide {AUTO!r} only; counts ignore them",
            repair=(
                f"set {' and '.join(f'pipeline.{name}=0.0' for name in costs)}, or pipeline.layers_per_stage={AUTO!r}"
            ),
        )


def _explicit(config: RunConfig) -> tuple[int, ...]:
    text = config.pipeline.layers_per_stage
    num_layers = config.model.num_layers
    num_stages = _num_stages(config)
    balanced = ",".join(map(str, balanced_split(num_layers, num_stages)))
    repair = f"set pipeline.layers_per_stage={AUTO!r}, which is {balanced!r}"
    try:
        counts = tuple(int(count) for count in text.split(","))
    except ValueError:
        raise ConfigError(
            f"pipeline.layers_per_stage={text!r} is not a list of counts",
            rule=f"layers-of-stages: {AUTO!r}, or whole numbers separated by commas",
            repair=repair,
        ) from None
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"pipeline.layers_per_stage={text!r} for model.num_layers={num_layers} on {num_stages} stages",
            rule="layers-of-stages: one count >= 1 for each stage, together model.num_layers",
            picture=f"{len(counts)} counts, the least {min(counts)}, together {sum(counts)}",
            repair=repair,
        )
    return counts


def _num_stages(config: RunConfig) -> int:
    return outline(config).num_stages


# ---- Order of the devices


def orders_to_try(schedule: Schedule) -> tuple[str, ...]:
    """The orders that `mesh.order="auto"` tries for `schedule`, the best first."""
    if schedule.num_replicas > 1:
        return ("replicas_together", "pair_adjacent", "contiguous")
    return ("pair_adjacent",) if schedule.parks_with_partner else ("contiguous",)
