"""Pairs stand in one node, neighbours cross nodes as seldom as possible, and what cannot be laid so is refused."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from jaxpipe.cluster.assignment import ORDERS, assign
from jaxpipe.errors import ConfigError

TENSORS = (1, 2, 4)


def nodes_of(assignment):
    """[data, pipe] -> node, where every tensor group is checked to stand in one."""
    nodes = assignment.gpus // assignment.gpus_per_node
    assert (nodes == nodes[:, :, :1]).all()
    return nodes[:, :, 0]


def num_crossings(nodes):
    return int((nodes[:, 1:] != nodes[:, :-1]).sum())


def fewest_crossings(data: int, pipe: int, places: int) -> float:
    """By trying every way to put pairs into nodes of `places` devices, the mesh filling them from the first; inf: none.

    Each copy in turn puts its pairs, from the outer one inwards, and then its middle device into nodes with room.
    """
    num_full, rest = divmod(data * pipe, places)
    units = [2] * (pipe // 2) + [1] * (pipe % 2)

    @cache
    def fewest(copy: int, unit: int, room: tuple[int, ...], last: int) -> float:
        if unit == len(units):
            copy, unit, last = copy + 1, 0, -1
        if copy == data:
            return 0
        costs = [float("inf")]
        for node in range(len(room)):
            if room[node] >= units[unit]:
                left = (*room[:node], room[node] - units[unit], *room[node + 1 :])
                hops = 2 * (last not in (-1, node))  # there, and back to the partners
                costs.append(hops + fewest(copy, unit + 1, left, node))
        return min(costs)

    return fewest(0, 0, (places,) * num_full + (rest,) * (rest > 0), -1)


def fewest_by_formula(data: int, pipe: int, places: int) -> int:
    """Two for every node boundary that does not fall between two copies."""
    return 2 * sum(boundary % pipe != 0 for boundary in range(places, data * pipe, places))


def is_legal(data: int, pipe: int, places: int) -> bool:
    """Each node with an odd number of devices needs a middle one of its own."""
    sizes = [min(places, data * pipe - first) for first in range(0, data * pipe, places)]
    return len(sizes) == 1 or sum(size % 2 for size in sizes) <= data * (pipe % 2)


def test_the_published_case():
    assignment = assign(pipe=16, gpus_per_node=8)
    nodes = nodes_of(assignment)[0]
    assert np.flatnonzero(nodes == 0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert assignment.crossings == ((0, 3), (0, 11))
    assert assignment.split_pairs == ()


@pytest.mark.parametrize("places", range(1, 7))
@pytest.mark.parametrize("data", [1, 2, 3])
def test_no_other_order_of_pairs_has_fewer_crossings(data, places):
    for pipe in range(1, 8):
        fewest = fewest_crossings(data, pipe, places)
        if data * pipe <= places:
            continue  # one node: the plain order, which crosses nothing
        if fewest == float("inf"):
            with pytest.raises(ConfigError, match="rule pair-adjacent"):
                assign(data=data, pipe=pipe, gpus_per_node=places)
        else:
            assignment = assign(data=data, pipe=pipe, gpus_per_node=places)
            assert num_crossings(nodes_of(assignment)) == len(assignment.crossings) == fewest


@pytest.mark.parametrize("gpus_per_node", [2, 3, 4, 5, 6, 8, 16, 72])
@pytest.mark.parametrize("tensor", TENSORS)
def test_every_pair_of_every_copy_stands_in_one_node(tensor, gpus_per_node):
    if gpus_per_node % tensor:
        return  # refused below
    places = gpus_per_node // tensor
    for pipe, data in product([*range(1, 18), 32, 33, 64], [1, 2, 3, 5, 8]):
        if not is_legal(data, pipe, places):
            with pytest.raises(ConfigError, match="rule pair-adjacent"):
                assign(data=data, pipe=pipe, tensor=tensor, gpus_per_node=gpus_per_node)
            continue
        assignment = assign(data=data, pipe=pipe, tensor=tensor, gpus_per_node=gpus_per_node)
        nodes = nodes_of(assignment)
        assert (nodes == nodes[:, ::-1]).all()
        assert sorted(assignment.gpus.ravel()) == list(range(data * pipe * tensor))
        assert num_crossings(nodes) == fewest_by_formula(data, pipe, places)


@pytest.mark.parametrize("places", range(1, 17))
@pytest.mark.parametrize("data", [1, 2, 3])
def test_replicas_together_stand_in_one_node_and_no_other_way_has_fewer_crossings(data, places):
    for pipe in range(2, 9):
        if data * pipe <= places:
            continue
        # All copies of a pair move as one, so that a node has room for places / data devices of one pipeline.
        fewest = float("inf") if places % data else data * fewest_crossings(1, pipe, places // data)
        if places % (2 * data):
            assert pipe % 2 or fewest == float("inf")  # of odd pipes those with half a group in node 0 are refused too
            with pytest.raises(ConfigError, match="rule replicas-together"):
                assign("replicas_together", data=data, pipe=pipe, gpus_per_node=places)
            continue
        assignment = assign("replicas_together", data=data, pipe=pipe, gpus_per_node=places)
        nodes = nodes_of(assignment)
        for device in range(pipe):
            holders = [device, pipe - 1 - device]
            assert len(np.unique(nodes[:, holders])) == 1
            assert not assignment.is_scattered(holders)
        assert sorted(assignment.gpus.ravel()) == list(range(data * pipe))
        assert num_crossings(nodes) == len(assignment.crossings) == fewest


def test_two_copies_of_eight_devices_on_two_nodes():
    """Each node holds two pairs of both copies: the outer ones, then the inner ones."""
    assignment = assign("replicas_together", data=2, pipe=8, gpus_per_node=8)
    for copy in nodes_of(assignment):
        assert np.flatnonzero(copy == 0).tolist() == [0, 1, 6, 7]
    assert assignment.crossings == tuple((copy, device) for copy in range(2) for device in (1, 5))
    apart = assign("pair_adjacent", data=2, pipe=8, gpus_per_node=8)
    assert apart.crossings == ()
    assert apart.is_scattered([0, 7])
    assert not apart.is_scattered([])


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("pipe", [4, 7, 16, 33])
def test_one_copy_with_its_replicas_together_is_pair_adjacent(pipe, tensor):
    together = assign("replicas_together", pipe=pipe, tensor=tensor, gpus_per_node=8)
    assert together.gpus.tolist() == assign("pair_adjacent", pipe=pipe, tensor=tensor, gpus_per_node=8).gpus.tolist()


def test_tensor_groups_stay_together_beside_replicas():
    assignment = assign("replicas_together", data=2, pipe=4, tensor=2, gpus_per_node=8)
    assert nodes_of(assignment).tolist() == [[0, 1, 1, 0]] * 2
    assert (np.diff(assignment.gpus, axis=-1) == 1).all()


def test_a_tensor_group_over_nodes_is_not_by_itself_a_sum_over_nodes():
    """Gradients are summed by GPUs that hold the same slice."""
    assignment = assign("contiguous", data=1, pipe=2, tensor=4, gpus_per_node=2)
    assert not assignment.is_scattered([0])
    assert assignment.is_scattered([0, 1])


def test_tensor_is_innermost():
    gpus = assign(data=2, pipe=8, tensor=4, gpus_per_node=8).gpus
    assert (np.diff(gpus, axis=-1) == 1).all()
    assert (gpus[..., 0] % 4 == 0).all()


@pytest.mark.parametrize("order", ORDERS)
def test_a_mesh_of_one_node_is_in_plain_order(order):
    gpus = assign(order, data=2, pipe=3, tensor=2, gpus_per_node=16).gpus
    assert gpus.ravel().tolist() == list(range(12))


def test_contiguous_order_takes_gpus_as_they_come():
    assignment = assign("contiguous", pipe=16, gpus_per_node=8)
    assert assignment.gpus.ravel().tolist() == list(range(16))
    assert assignment.crossings == ((0, 7),)
    assert assignment.split_pairs == tuple((0, device) for device in range(8))


@pytest.mark.parametrize(("tensor", "nearest"), [(3, 2), (5, 4), (7, 8), (16, 8)])
def test_a_tensor_group_of_two_nodes_is_refused(tensor, nearest):
    with pytest.raises(ConfigError, match=rf"tensor={tensor} does not divide the 8 GPUs(?s:.*)set tensor={nearest},"):
        assign(pipe=8, tensor=tensor, gpus_per_node=8)


def test_repairs_are_legal():
    with pytest.raises(ConfigError, match=r"repair: set pipe=5 or tensor=2,"):
        assign(data=8, pipe=6, tensor=4, gpus_per_node=28)
    assign(data=8, pipe=5, tensor=4, gpus_per_node=28)
    assign(data=8, pipe=6, tensor=2, gpus_per_node=28)


@pytest.mark.parametrize(
    ("mesh", "repair"),
    [
        ({"data": 3, "pipe": 8}, "set data=2 or order='pair_adjacent', where"),
        ({"data": 4, "pipe": 8, "tensor": 2}, "set data=2 or tensor=1 or order='pair_adjacent'"),
        ({"data": 1, "pipe": 8, "tensor": 8}, "set tensor=4 or order='contiguous'"),
        ({"data": 16, "pipe": 4}, "set data=4 or order='pair_adjacent'"),
    ],
)
def test_replicas_that_fill_no_node(mesh, repair):
    with pytest.raises(ConfigError, match=rf"does not divide 8\n  repair: {repair}"):
        assign("replicas_together", **mesh, gpus_per_node=8)
    sizes = {"tensor": 1, **mesh}
    for name, value in [pair.split("=") for pair in repair.removeprefix("set ").split() if pair[-1].isdigit()]:
        assign("replicas_together", **{**sizes, name: int(value)}, gpus_per_node=8)


def test_unknown_order():
    with pytest.raises(ConfigError, match=r"Did you mean 'pair_adjacent'\?"):
        assign("pairs_adjacent", pipe=4, gpus_per_node=8)
