"""Where a schedule's stages stand on a cluster, and what crosses its nodes; the only part that loads the mesh."""

from __future__ import annotations

import argparse
import itertools
import json

from jaxpipe.errors import ConfigError
from jaxpipe.schedules import Schedule


def show_placement(schedule: Schedule, flags: argparse.Namespace) -> str:
    """Which GPU of `--topology` holds which stage, and what crosses nodes, under each order of the devices."""
    from jaxpipe.cluster.assignment import ORDERS, assign
    from jaxpipe.cluster.drawing import draw, to_values
    from jaxpipe.cluster.topology import parse_topology

    topology = parse_topology(flags.topology)
    mesh = {"data": flags.data, "pipe": schedule.num_devices, "tensor": flags.tensor}
    topology.check_holds(**mesh)
    hops, sums = _hops(schedule), _sums(schedule, flags.data)
    assignments, refusals = [], {}
    for order in ORDERS:
        if order == "replicas_together" and not sums:
            continue
        try:
            assignments.append(assign(order, **mesh, gpus_per_node=topology.gpus_per_node))
        except ConfigError as error:
            if order != "replicas_together":
                raise
            refusals[order] = str(error)
    if flags.format == "json":
        orders = {assignment.order: to_values(assignment, hops=hops, sums=sums) for assignment in assignments}
        refused = {order: {"refused": message} for order, message in refusals.items()}
        values = {"schedule": schedule.name, "topology": str(topology), **mesh, **orders, **refused}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    drawing = draw(assignments, topology, labels=_labels(schedule), hops=hops, sums=sums)
    return drawing + "".join(f"\n{order}\n  {message}\n" for order, message in refusals.items())


def _labels(schedule: Schedule) -> dict[str, list[str]]:
    """[device] its stages, of each replica."""
    held = schedule.placement.stages_of
    names = ("stage",) if schedule.num_replicas == 1 else ("down", "up")
    return {
        name: [",".join(str(stage) for of, stage in stages if of == replica) for stages in held]
        for replica, name in enumerate(names)
    }


def _sums(schedule: Schedule, data: int) -> dict[str, list[int]]:
    """The devices that hold each stage; none where each stage has one holder."""
    if data == schedule.num_replicas == 1:
        return {}
    holders = zip(*schedule.placement.devices, strict=True)
    return {f"stage {stage}": sorted(set(devices)) for stage, devices in enumerate(holders)}


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
