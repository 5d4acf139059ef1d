"""Where a schedule's stages stand on a cluster, and what crosses its nodes; the only part that loads the mesh."""

from __future__ import annotations

import argparse
import itertools
import json

from jaxpipe.schedules import Schedule


def show_placement(schedule: Schedule, flags: argparse.Namespace) -> str:
    """Which GPU of `--topology` holds which stage, and what crosses nodes, under each order of the devices."""
    from jaxpipe.mesh.assignment import ORDERS, assign
    from jaxpipe.mesh.drawing import draw, to_values
    from jaxpipe.mesh.topology import parse_topology

    topology = parse_topology(flags.topology)
    mesh = {"data": flags.data, "pipe": schedule.num_devices, "tensor": flags.tensor}
    topology.check_holds(**mesh)
    assignments = [assign(order, **mesh, gpus_per_node=topology.gpus_per_node) for order in ORDERS]
    hops = _hops(schedule)
    if flags.format == "json":
        orders = {assignment.order: to_values(assignment, hops=hops) for assignment in assignments}
        values = {"schedule": schedule.name, "topology": str(topology), **mesh, **orders}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    labels = [
        ",".join(_stage_name(schedule, replica, stage) for replica, stage in held)
        for held in schedule.placement.stages_of
    ]
    return draw(assignments, topology, labels=labels, hops=hops)


def _hops(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """The devices between which each stage sends to the next one, where they are two."""
    hops = {}
    for replica, devices in enumerate(schedule.placement.devices):
        for stage, pair in enumerate(itertools.pairwise(devices)):
            if pair[0] != pair[1]:
                name = f"{_stage_name(schedule, replica, stage)}->{_stage_name(schedule, replica, stage + 1)}"
                hops[name] = pair
    return hops


def _stage_name(schedule: Schedule, replica: int, stage: int) -> str:
    return f"{stage}@{replica}" if schedule.num_replicas > 1 else str(stage)
