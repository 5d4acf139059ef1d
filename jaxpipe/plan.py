"""Ranks the ways to train a config's model on a cluster by the predicted time of a step; no GPU is needed.

    python -m jaxpipe.plan --config=configs/gpt3_96b.py --topology=a100-80g:6x8 [--costs=costs.json] [--top=10]
        [--method=my_method.py ...] [--allow_delayed] [--format=json] [--write_config=FILE[:ROW]] [--config.X=Y ...]

The search covers schedule, chunks, all axes of the mesh, microbatch size, recompute, mesh order, the head on
the last stage or over all devices, what copies share (mesh.shard), and fewer GPUs where they are faster. Ways that do
not fit a GPU with a margin are dropped. Model, sequence length and batch size are the config's. The config's pipeline
and mesh are not read, except mesh.shard, the least that is shared, and a method's .py file in pipeline.schedule, which
is tried as well.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from absl.flags import FlagValues

from jaxpipe.cluster.axes import AXES
from jaxpipe.cluster.hardware import with_such_cores
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.command_line import check_unused, define_number, main_of
from jaxpipe.config.base import RunConfig
from jaxpipe.config.command_line import config_of, define_config_file, run
from jaxpipe.estimate.measured import read_costs
from jaxpipe.estimate.plan.breakdown import baselines, breakdown_of
from jaxpipe.estimate.plan.config_file import check_row, check_writable, file_and_row, write_config
from jaxpipe.estimate.plan.exposure import remedies
from jaxpipe.estimate.plan.nothing_fits import nothing_fits
from jaxpipe.estimate.plan.ranking import MEMORY_MARGIN, search_with_fewer
from jaxpipe.estimate.plan.report import to_json, to_text
from jaxpipe.estimate.plan.rows import Plan
from jaxpipe.estimate.plan.space import ALONE, space_of
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.python_file import is_python_file
from jaxpipe.schedules.methods.registry import DELAYED, METHOD_FILE_HELP, register, register_file

if TYPE_CHECKING:
    from jaxpipe.training.given import Model
    from jaxpipe.training.given_batches import BatchSource


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --config, --topology and what else the module's docstring shows."""
    define_config_file(values, arguments)
    flags.DEFINE_string("topology", None, "Hardware, nodes and GPUs of a node, as a100-80g:6x8.", values)
    flags.DEFINE_multi_string(
        "costs",
        [],
        "costs.json of jaxpipe.measure; several for several kinds of recomputation or ways to split a layer. Links that"
        " were not measured, and all times without a file, are a roofline's.",
        values,
    )
    flags.DEFINE_multi_string("method", [], METHOD_FILE_HELP, values)
    flags.DEFINE_bool(
        "allow_delayed",
        False,
        "Whether to try schedules without flush too: their gradients are of older weights, so training results change.",
        values,
    )
    flags.DEFINE_integer("top", 10, "Rows, the fastest.", lower_bound=1, flag_values=values)
    define_number(
        values,
        "memory_margin",
        MEMORY_MARGIN,
        "Fraction of its predicted bytes by which a step may need more, and must fit all the same.",
        what="fraction",
        is_positive=False,
    )
    flags.DEFINE_enum(
        "format", "text", ["text", "json"], "How the plan is printed; json has seconds and bytes.", values
    )
    flags.DEFINE_string(
        "write_config",
        None,
        "A file for the config of a row, which train and compile run: FILE for row 1, FILE:4 for row 4.",
        values,
    )
    flags.DEFINE_bool("overwrite", False, "Whether --write_config may replace a file.", values)


def execute(values: FlagValues) -> None:
    """Searches, prints the plan, and writes the config of a row if that is asked for."""
    if not values.write_config:
        check_unused(values, ["overwrite"], "it needs --write_config")
    config = config_of(values)
    # Before methods are registered: a typo here is the likeliest error.
    topology = parse_topology(values.topology)
    # Registered before the search, which goes over all registered methods.
    for path in (*values.method, *filter(is_python_file, [config.pipeline.schedule])):
        register_file(path)
    if values.allow_delayed:
        for method in DELAYED.values():
            register(method)
    path, row = file_and_row(values.write_config or "")
    if path:
        # Before the search, which takes a while.
        check_writable(path, overwrite=values.overwrite)
        # `values.top` bounds the rows; how many there are is known only after the search.
        check_row(values.write_config, row, values.top, of=f"--top={values.top}")
    roofline = Roofline.of(topology.hardware)
    source = roofline
    if values.costs:
        source = read_costs(*values.costs, otherwise=roofline)
        # One warning for each kind of GPU, in the order of the files.
        for kind in dict.fromkeys(str(measurement.identity.get("device_kind")) for measurement in source.measurements):
            cores = with_such_cores(kind)
            # Peaks are compared: GPUs that differ in memory alone take the same times.
            if cores is None or cores.bf16_flops_per_s != topology.hardware.bf16_flops_per_s:
                print(f"costs        measured on {kind}, planned for {topology.hardware.description}", file=sys.stderr)
    planned = search_with_fewer(space_of(config, topology), source, top=values.top, margin=values.memory_margin)
    parts = [breakdown_of(row.estimate, source) for row in planned.rows]
    compared = baselines(planned.rows[0], source) if planned.rows else []
    exposed = remedies(planned.rows[0], source, margin=values.memory_margin) if planned.rows else []
    if values.format == "json":
        print(json.dumps(to_json(planned, parts, compared, exposed)))
    else:
        print(to_text(planned, parts, compared, exposed))
    if not planned.rows:
        # After the printed plan, which says what was searched and what is too large.
        raise nothing_fits(planned)
    if path:
        # Again: fewer rows may fit than were asked for.
        check_row(values.write_config, row, len(planned.rows), of="the plan")
        write_config(path, config, planned.rows[row - 1], command=_command())
        # To stderr: stdout may be JSON for another program.
        print(f"written      {path}", file=sys.stderr)


def plan(
    config: RunConfig,
    topology: str,
    *,
    model: Model | None = None,
    params: Any = None,
    train_batches: BatchSource | None = None,
    top: int = 10,
    margin: float = MEMORY_MARGIN,
) -> Plan:
    """The fastest ways to train what `config` describes, or a model given in Python, on the GPUs of `topology`.

    Args:
        config: a config of `base_config`; of `base_config("given")` with `model`. Its pipeline and mesh are not read.
        topology: as "h100-80g:2x8", HARDWARE:NODESxGPUS_PER_NODE.
        model, params, train_batches: as to `jaxpipe.training.fit`; of `params` and of a batch the shapes are read. The
            devices of a mesh that is planned never share a layer of such a model.
        top: number of rows.
        margin: fraction of its predicted bytes by which a step may need more, and must fit all the same.

    Returns:
        The plan; `to_text` of `jaxpipe.estimate.plan.report` prints it, and `config_of(config, row.setting)` of
        `jaxpipe.estimate.plan.config_file` is the config of a row.

    Raises:
        ConfigError: the config or what is given contradicts itself.
    """
    config = RunConfig.of(config)
    given = None
    if model:
        # Here, since the command plans without the trainer, which takes seconds to import.
        from jaxpipe.training.given import given_task

        # The batch is whole; how many microbatches it has is planned.
        alone = {"pipeline.num_microbatches": 1, "pipeline.schedule": ALONE, **{f"mesh.{axis}": 1 for axis in AXES}}
        config, task = given_task(
            config.replaced(alone), model=model, params=params, train_batches=train_batches, heldout_batches=()
        )
        given = task.given
    known = parse_topology(topology)
    return search_with_fewer(space_of(config, known, given), Roofline.of(known.hardware), top=top, margin=margin)


def _command() -> str:
    return shlex.join(["python", "-m", "jaxpipe.plan", *sys.argv[1:]])


main = main_of(
    run,
    execute,
    define_flags=define_flags,
    usage=__doc__,
    required={"config": "configs/gpt3_96b.py", "topology": "a100-80g:6x8"},
)

if __name__ == "__main__":
    sys.exit(main())
