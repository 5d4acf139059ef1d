"""Ranks the ways to train a config's model on a cluster by the predicted time of a step; no GPU is needed.

    python -m jaxpipe.plan --config=configs/gpt3_96b.py --topology=a100-80g:6x8 [--costs=costs.json] [--top=10]
        [--format=json] [--write_config=FILE] [--config.X=Y ...]

Searched: schedule, chunks, pipe x tensor x data, microbatch size, recompute, order of the mesh. What does not fit a GPU
is dropped. Model, sequence length and batch size are the config's, its own pipeline and mesh are not looked at.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config.command_line import require, run
from jaxpipe.errors import ConfigError
from jaxpipe.estimate.measured import read_costs
from jaxpipe.estimate.plan.breakdown import plain_choices, shares_of
from jaxpipe.estimate.plan.report import to_json, to_text
from jaxpipe.estimate.plan.search import search
from jaxpipe.estimate.plan.space import space_of
from jaxpipe.estimate.plan.written_config import check_writable, write_config
from jaxpipe.estimate.roofline import Roofline

FLAGS = flags.FLAGS


def define_flags(arguments: list[str]) -> None:
    """Defines --config, --topology and what else the module's docstring shows."""
    require("config", arguments, example="configs/gpt3_96b.py")
    require("topology", arguments, example="a100-80g:6x8")
    config_flags.DEFINE_config_file("config", help_string="Python file with get_config(); see jaxpipe.config.base.")
    flags.DEFINE_string("topology", None, "Hardware, nodes and GPUs of a node, as a100-80g:6x8.")
    flags.DEFINE_string("costs", None, "costs.json of jaxpipe.measure; without it times are a roofline's.")
    flags.DEFINE_integer("top", 10, "Rows, the fastest.", lower_bound=1)
    flags.DEFINE_enum("format", "text", ["text", "json"], "How the plan is printed; json has seconds and bytes.")
    flags.DEFINE_string("write_config", None, "A file for the config of the best row, which train and compile run.")
    flags.DEFINE_bool("overwrite", False, "Whether --write_config may replace a file.")


def main(arguments: Sequence[str]) -> None:
    """One plan."""
    del arguments
    config, topology = FLAGS.config, parse_topology(FLAGS.topology)
    if FLAGS.write_config:
        check_writable(FLAGS.write_config, overwrite=FLAGS.overwrite)
    source = read_costs(FLAGS.costs) if FLAGS.costs else Roofline(topology.hardware)
    plan = search(space_of(config, topology), source, top=FLAGS.top)
    shares = [shares_of(row.estimate, source) for row in plan.rows]
    plains = plain_choices(plan.rows[0], source) if plan.rows else []
    if FLAGS.format == "json":
        print(json.dumps(to_json(plan, shares, plains)))
    else:
        print(to_text(plan, shares, plains))
    if FLAGS.write_config:
        if not plan.rows:
            raise ConfigError(
                f"--write_config={FLAGS.write_config}: no way to train fits {topology}\n"
                "  rule plan-fits: a config is written of a row, and there is none\n"
                "  repair: give more GPUs, or a smaller batch or model"
            )
        write_config(FLAGS.write_config, config, plan.rows[0], command=_command())
        print(f"written      {FLAGS.write_config}", file=sys.stderr)


def _command() -> str:
    return shlex.join(["python", "-m", "jaxpipe.plan", *sys.argv[1:]])


if __name__ == "__main__":
    run(main, define_flags=define_flags)
