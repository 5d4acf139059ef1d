"""Where a schedule's stages stand on a cluster, and what crosses its nodes: as text or JSON."""

from __future__ import annotations

import itertools
import json

from jaxpipe.cluster.assignment import ORDERS, assign
from jaxpipe.cluster.drawing import draw, to_values
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.errors import ConfigError
from jaxpipe.schedules import Schedule


def show_placement(schedule: Schedule, cluster: str, *, data: int = 1, tensor: int = 1, as_json: bool = False) -> str:
    """Which GPU of a cluster holds which stage, and what crosses nodes, under each order of the devices.

    Args:
        schedule: any.
        cluster: hardware, nodes and GPUs of a node, as "a100-80g:2x8".
        data: copies of the pipeline.
        tensor: GPUs that share each layer.
        as_json: whether it is a JSON object in place of a drawing.

    Raises:
        ConfigError: no such hardware, too few GPUs, or a group that no node can hold.
    """
    topology = parse_topology(cluster)
    mesh = {"data": data, "pipe": schedule.num_devices, "tensor": tensor}
    topology.check_holds(**mesh)
    hops, sums = _hops(schedule), _sums(schedule, data)
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
    if as_json:
        orders = {assignment.order: to_values(assignment, hops=hops, sums=sums) for assignment in assignments}
        refused = {order: {"refused": message} for order, message in refusals.items()}
        values = {"schedule": schedule.name, "topology": str(topology), **mesh, **orders, **refused}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    drawing = draw(assignments, topology, labels=_labels(schedule), hops=hops, sums=sums)
    return drawing + "".join(f"\n{order}\n  {message}\n" for order, message in refusals.items())


def _labels(schedule: Schedule) -> dict[str, list[str]]:
    """Name of a replica -> [device] its stages of that replica, as text."""
    held = schedule.placement.stages_of
    names = ("stage",) if schedule.num_replicas == 1 else ("down", "up")
    return {
        name: [",".join(str(stage) for of, stage in stages if of == replica) for stages in held]
        for replica, name in enumerate(names)
    }


def _sums(schedule: Schedule, data: int) -> dict[str, list[int]]:
    """Name of a stage -> the devices that hold it; empty where each stage has one holder."""
    if data == schedule.num_replicas == 1:
        return {}
    holders = zip(*schedule.placement.devices, strict=True)
    return {f"stage {stage}": sorted(set(devices)) for stage, devices in enumerate(holders)}


def _hops(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """Name of a hop -> the two devices between which a stage sends to the next; without those within a device."""
    hops = {}
    for replica, devices in enumerate(schedule.placement.devices):
        for stage, pair in enumerate(itertools.pairwise(devices)):
            if pair[0] != pair[1]:
                name = f"{_stage_name(schedule, replica, stage)}->{_stage_name(schedule, replica, stage + 1)}"
                hops[name] = pair
    return hops


def _stage_name(schedule: Schedule, replica: int, stage: int) -> str:
    return f"{stage}@{replica}" if schedule.num_replicas > 1 else str(stage)
