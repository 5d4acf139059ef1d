"""Draws a mesh on a cluster, as text or plain values: which GPU of which node holds what, and what crosses nodes.

The caller says what each device of the pipe axis holds and sends; the assignment says where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxpipe.cluster.assignment import Assignment
from jaxpipe.cluster.topology import Topology

_MOST_LISTED = 8


def draw(
    assignments: Sequence[Assignment],
    topology: Topology,
    *,
    labels: Mapping[str, Sequence[str]],
    hops: Mapping[str, tuple[int, int]],
    sums: Mapping[str, Sequence[int]],
) -> str:
    """The nodes under each assignment and what crosses them, as text.

    Args:
        assignments: assignments of the same mesh to the GPUs of `topology`.
        topology: the cluster.
        labels: name -> `[pipe]`, a short label of what each device holds.
        hops: name -> the source and target device of a message.
        sums: name -> the devices that sum their gradients, together with those of all copies of the pipeline.

    Example:
        >>> from jaxpipe.cluster.assignment import assign
        >>> from jaxpipe.cluster.topology import parse_topology
        >>> print(draw([assign(pipe=4, gpus_per_node=2)], parse_topology("h200:2x2"),
        ...            labels={"stage": "0123"}, hops={"0->1": (0, 1), "1->2": (1, 2), "2->3": (2, 3)},
        ...            sums={"stage 0": (0, 3)}), end="")
        h200:2x2, 4 of 4 GPUs: data 1 x pipe 4 x tensor 1
        to another GPU of the node 450 GB/s, to another node 50 GB/s (peaks, one way)
        <BLANKLINE>
        pair_adjacent
          node 0  GPU    0 1
                  stage  0 3
          node 1  GPU    2 3
                  stage  1 2
          hops that cross nodes:   2 (0->1, 2->3)
          pairs that cross nodes:  0
          sums that cross nodes:   0
    """
    data, pipe, tensor = assignments[0].gpus.shape
    hardware = topology.hardware
    head = (
        f"{topology}, {data * pipe * tensor} of {topology.num_gpus} GPUs: data {data} x pipe {pipe} x tensor {tensor}\n"
        f"to another GPU of the node {hardware.nvlink_bytes_per_s / 1e9:g} GB/s,"
        f" to another node {hardware.network_bytes_per_s / 1e9:g} GB/s (peaks, one way)\n"
    )
    return head + "".join(_draw_one(assignment, labels, hops, sums) for assignment in assignments)


def to_values(
    assignment: Assignment, *, hops: Mapping[str, tuple[int, int]], sums: Mapping[str, Sequence[int]]
) -> dict[str, object]:
    """The assignment and what crosses nodes, for JSON; `data` counts copies of the pipeline."""
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


def _draw_one(
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
    if not names:
        return "0"
    more = f", and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"{len(names)} ({', '.join(names[:_MOST_LISTED])}{more})"
