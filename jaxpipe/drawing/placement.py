"""The placement of stages on the GPUs of a cluster and the messages that cross nodes, as text or JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

from jaxpipe.cluster.assignment import ORDERS, Assignment, assign
from jaxpipe.cluster.axes import OUTER_AXES, MeshSizes, describe_mesh, told
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.errors import ConfigError, first_of
from jaxpipe.schedules import Schedule


def show_placement(schedule: Schedule, cluster: str, *, as_json: bool = False, **sizes: int) -> str:
    """The GPU of each stage and the messages that cross nodes, under each order of the devices.

    Args:
        cluster: hardware, nodes and GPUs per node, as "a100-80g:2x8".
        as_json: returns a JSON object in place of a drawing.
        sizes: devices along axes of the mesh but that of the stages, as in `jaxpipe.cluster.axes.MeshSizes`.

    Raises:
        ConfigError: the hardware is unknown, there are too few GPUs, or no node can hold a group.
    """
    topology = parse_topology(cluster)
    whole = MeshSizes(**sizes, pipe=schedule.num_devices)
    mesh = told(whole.axes)
    topology.check_holds(**mesh)
    hops = _hops(schedule)
    sums = _sums(schedule, whole.along(OUTER_AXES))
    assignments = []
    refusals = {}
    for order in ORDERS:
        # Where each stage has a single holder, there are no replicas to keep together.
        if order == "replicas_together" and not sums:
            continue
        try:
            assignments.append(assign(order, **mesh, gpus_per_node=topology.gpus_per_node))
        except ConfigError as error:
            # This order needs a node that holds all replicas of a stage; the others are shown all the same.
            if order != "replicas_together":
                raise
            refusals[order] = str(error)
    if as_json:
        orders = {assignment.order: _values(assignment, hops=hops, sums=sums) for assignment in assignments}
        refused = {order: {"refused": message} for order, message in refusals.items()}
        values = {"schedule": schedule.name, "topology": str(topology), **mesh, **orders, **refused}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    hardware = topology.hardware
    head = (
        f"{topology}, {whole.num_devices} of {topology.num_gpus} GPUs: {describe_mesh(whole.axes)}\n"
        f"to another GPU of the node {hardware.nvlink_bytes_per_s / 1e9:g} GB/s,"
        f" to another node {hardware.network_bytes_per_s / 1e9:g} GB/s (peaks, one way)\n"
    )
    drawings = [_drawing(assignment, _labels(schedule), hops, sums) for assignment in assignments]
    return "".join([head, *drawings, *(f"\n{order}\n  {message}\n" for order, message in refusals.items())])


def _labels(schedule: Schedule) -> dict[str, list[str]]:
    """The stages that each device holds of a replica, as text: name of the replica -> [device]."""
    held = schedule.placement.stages_of
    names = ("stage",) if schedule.num_replicas == 1 else ("down", "up")
    return {
        name: [",".join(str(stage) for of, stage in stages if of == replica) for stages in held]
        for replica, name in enumerate(names)
    }


def _sums(schedule: Schedule, num_copies: int) -> dict[str, list[int]]:
    """The holders of each stage by its name; empty if each stage has one holder."""
    if num_copies == schedule.num_replicas == 1:
        return {}
    # [stage] -> its device in each replica; with several copies of the pipeline, sums are over these too.
    holders = zip(*schedule.placement.devices, strict=True)
    return {f"stage {stage}": sorted(set(devices)) for stage, devices in enumerate(holders)}


def _hops(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """The source and target device of each hop between stages by its name, hops within a device left out."""
    hops = {}
    for replica, devices in enumerate(schedule.placement.devices):
        for stage, pair in enumerate(itertools.pairwise(devices)):
            # The last stage of a chunk and the first of the next may share a device: then nothing travels.
            if pair[0] != pair[1]:
                name = f"{_stage_name(schedule, replica, stage)}->{_stage_name(schedule, replica, stage + 1)}"
                hops[name] = pair
    return hops


def _stage_name(schedule: Schedule, replica: int, stage: int) -> str:
    return f"{stage}@{replica}" if schedule.num_replicas > 1 else str(stage)


# ---- One order: what each device holds and sends is given; the assignment says on which GPU.

_MOST_LISTED = 8


def _values(
    assignment: Assignment, *, hops: Mapping[str, tuple[int, int]], sums: Mapping[str, Sequence[int]]
) -> dict[str, object]:
    """The assignment and the messages that cross nodes, for JSON; `data` counts copies of the pipeline."""
    return {
        "gpus": assignment.gpus.tolist(),
        "nodes": assignment.nodes.tolist(),
        "crossing_hops": [{"data": copy, "hop": name} for copy, name in _crossing(assignment, hops)],
        "crossing_pairs": [
            {"data": copy, "devices": [device, assignment.gpus.shape[1] - 1 - device]}
            for copy, device in assignment.split_pairs
        ],
        "crossing_sums": _scattered(assignment, sums),
    }


def _drawing(
    assignment: Assignment,
    labels: Mapping[str, Sequence[str]],
    hops: Mapping[str, tuple[int, int]],
    sums: Mapping[str, Sequence[int]],
) -> str:
    data, pipe, _ = assignment.gpus.shape
    held = {gpu: place for place, gpu in _places(assignment)}
    lines = ["", assignment.order]
    for node in range(assignment.nodes.max() + 1):
        first = node * assignment.gpus_per_node
        # A mesh may leave some GPUs of the last node unused.
        gpus = [gpu for gpu in range(first, first + assignment.gpus_per_node) if gpu in held]
        rows = {"GPU": [str(gpu) for gpu in gpus]}
        if data > 1:
            rows["data"] = [str(held[gpu][0]) for gpu in gpus]
        for name, words in labels.items():
            rows[name] = [words[held[gpu][1]] for gpu in gpus]
        width = max(len(cell) for cells in rows.values() for cell in cells)
        for name, cells in rows.items():
            where = f"node {node}" if name == "GPU" else " " * len(f"node {node}")
            lines.append(f"  {where}  {name:5}  {' '.join(cell.rjust(width) for cell in cells)}")
    pairs = [(copy, f"{device}<->{pipe - 1 - device}") for copy, device in assignment.split_pairs]
    lines.append(f"  hops that cross nodes:   {_counted(_of_copies(_crossing(assignment, hops), data))}")
    lines.append(f"  pairs that cross nodes:  {_counted(_of_copies(pairs, data))}")
    if sums:
        lines.append(f"  sums that cross nodes:   {_counted(_scattered(assignment, sums))}")
    return "\n".join(lines) + "\n"


def _places(assignment: Assignment) -> Iterator[tuple[tuple[int, int], int]]:
    """Every place of the mesh as (copy, device), with its GPU."""
    for copy, devices in enumerate(assignment.gpus.tolist()):
        for device, gpus in enumerate(devices):
            for gpu in gpus:
                yield (copy, device), gpu


def _crossing(assignment: Assignment, hops: Mapping[str, tuple[int, int]]) -> list[tuple[int, str]]:
    """Hops that cross nodes, as (copy, name)."""
    # [copy], since a hop may cross nodes in one copy of the pipeline and stay in a node in another.
    apart = {name: assignment.is_apart(*devices) for name, devices in hops.items()}
    return [(copy, name) for copy in range(len(assignment.gpus)) for name in hops if apart[name][copy]]


def _scattered(assignment: Assignment, sums: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of the sums that span several nodes."""
    return [name for name, devices in sums.items() if assignment.is_scattered(devices)]


def _of_copies(crossing: Sequence[tuple[int, str]], data: int) -> list[str]:
    """Names, followed by the copy if there are several."""
    return [f"{name} of copy {copy}" if data > 1 else name for copy, name in crossing]


def _counted(names: Sequence[str]) -> str:
    """The number of names, and the first of them."""
    # Large clusters have thousands of hops.
    listed = first_of(names, joined_by=", ", most=_MOST_LISTED)
    return f"{len(names)} ({listed})" if names else "0"
