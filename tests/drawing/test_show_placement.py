"""`show --placement`: where stages stand on a cluster, in each order, and what crosses nodes."""

import json

import pytest
from showing import refused, shown

SIXTEEN = ["1f1b", "--num_devices=16", "--num_microbatches=32", "--placement", "--topology=a100-80g:2x8"]


def test_the_published_case(capsys):
    assert shown(capsys, *SIXTEEN) == (
        "a100-80g:2x8, 16 of 16 GPUs: data 1 x pipe 16 x tensor 1\n"
        "to another GPU of the node 300 GB/s, to another node 25 GB/s (peaks, one way)\n"
        "\n"
        "pair_adjacent\n"
        "  node 0  GPU     0  1  2  3  4  5  6  7\n"
        "          stage   0  1  2  3 12 13 14 15\n"
        "  node 1  GPU     8  9 10 11 12 13 14 15\n"
        "          stage   4  5  6  7  8  9 10 11\n"
        "  hops that cross nodes:   2 (3->4, 11->12)\n"
        "  pairs that cross nodes:  0\n"
        "\n"
        "contiguous\n"
        "  node 0  GPU    0 1 2 3 4 5 6 7\n"
        "          stage  0 1 2 3 4 5 6 7\n"
        "  node 1  GPU     8  9 10 11 12 13 14 15\n"
        "          stage   8  9 10 11 12 13 14 15\n"
        "  hops that cross nodes:   1 (7->8)\n"
        "  pairs that cross nodes:  8 (0<->15, 1<->14, 2<->13, 3<->12, 4<->11, 5<->10, 6<->9, 7<->8)\n"
    )


def test_json(capsys):
    values = json.loads(shown(capsys, *SIXTEEN, "--format=json"))
    assert set(values) == {"schedule", "topology", "data", "pipe", "tensor", "pair_adjacent", "contiguous"}
    assert (values["schedule"], values["topology"]) == ("1f1b", "a100-80g:2x8")
    paired = values["pair_adjacent"]
    assert paired["gpus"][0] == [[gpu] for gpu in [0, 1, 2, 3, *range(8, 16), 4, 5, 6, 7]]
    assert paired["nodes"][0] == [[0]] * 4 + [[1]] * 8 + [[0]] * 4
    assert paired["crossing_hops"] == [{"data": 0, "hop": "3->4"}, {"data": 0, "hop": "11->12"}]
    assert paired["crossing_pairs"] == []
    plain = values["contiguous"]
    assert plain["crossing_hops"] == [{"data": 0, "hop": "7->8"}]
    assert plain["crossing_pairs"] == [{"data": 0, "devices": [device, 15 - device]} for device in range(8)]


def test_copies_tensor_groups_and_gpus_left_over(capsys):
    small = ["1f1b", "--num_devices=3", "--num_microbatches=3", "--placement", "--topology=h200:3x4"]
    lines = shown(capsys, *small, "--data=2", "--tensor=1").splitlines()
    assert lines[0] == "h200:3x4, 6 of 12 GPUs: data 2 x pipe 3 x tensor 1"
    # A node boundary at place 4 leaves copy 1 one place in node 0: its middle device, so it is turned round.
    assert lines[4:10] == [
        "  node 0  GPU    0 1 2 3",
        "          data   0 0 0 1",
        "          stage  0 1 2 1",
        "  node 1  GPU    4 5",
        "          data   1 1",
        "          stage  0 2",
    ]
    assert lines[10] == "  hops that cross nodes:   2 (0->1 of copy 1, 1->2 of copy 1)"
    lines = shown(capsys, *small, "--tensor=2").splitlines()
    assert lines[4:8] == [
        "  node 0  GPU    0 1 2 3",
        "          stage  0 0 2 2",
        "  node 1  GPU    4 5",
        "          stage  1 1",
    ]


BITPIPE = ["bitpipe", "--num_devices=4", "--num_microbatches=4", "--placement", "--data=2"]


def test_two_replicas_of_two_copies(capsys):
    """BitPipe's stages as in the paper (arXiv 2410.19367, Figure 3), here from 0: device 0 has 0, 7 down, 3, 4 up."""
    assert shown(capsys, *BITPIPE, "--topology=a800-80g:2x4") == (
        "a800-80g:2x4, 8 of 8 GPUs: data 2 x pipe 4 x tensor 1\n"
        "to another GPU of the node 200 GB/s, to another node 25 GB/s (peaks, one way)\n"
        "\n"
        "pair_adjacent\n"
        "  node 0  GPU      0   1   2   3\n"
        "          data     0   0   0   0\n"
        "          down   0,7 1,6 2,5 3,4\n"
        "          up     3,4 2,5 1,6 0,7\n"
        "  node 1  GPU      4   5   6   7\n"
        "          data     1   1   1   1\n"
        "          down   0,7 1,6 2,5 3,4\n"
        "          up     3,4 2,5 1,6 0,7\n"
        "  hops that cross nodes:   0\n"
        "  pairs that cross nodes:  0\n"
        "  sums that cross nodes:   8 (stage 0, stage 1, stage 2, stage 3, stage 4, stage 5, stage 6, stage 7)\n"
        "\n"
        "replicas_together\n"
        "  node 0  GPU      0   1   2   3\n"
        "          data     0   0   1   1\n"
        "          down   0,7 3,4 0,7 3,4\n"
        "          up     3,4 0,7 3,4 0,7\n"
        "  node 1  GPU      4   5   6   7\n"
        "          data     0   0   1   1\n"
        "          down   1,6 2,5 1,6 2,5\n"
        "          up     2,5 1,6 2,5 1,6\n"
        "  hops that cross nodes:   16 (0@0->1@0 of copy 0, 2@0->3@0 of copy 0, 4@0->5@0 of copy 0,"
        " 6@0->7@0 of copy 0, 0@1->1@1 of copy 0, 2@1->3@1 of copy 0, 4@1->5@1 of copy 0, 6@1->7@1 of copy 0,"
        " and 8 more)\n"
        "  pairs that cross nodes:  0\n"
        "  sums that cross nodes:   0\n"
        "\n"
        "contiguous\n"
        "  node 0  GPU      0   1   2   3\n"
        "          data     0   0   0   0\n"
        "          down   0,7 1,6 2,5 3,4\n"
        "          up     3,4 2,5 1,6 0,7\n"
        "  node 1  GPU      4   5   6   7\n"
        "          data     1   1   1   1\n"
        "          down   0,7 1,6 2,5 3,4\n"
        "          up     3,4 2,5 1,6 0,7\n"
        "  hops that cross nodes:   0\n"
        "  pairs that cross nodes:  0\n"
        "  sums that cross nodes:   8 (stage 0, stage 1, stage 2, stage 3, stage 4, stage 5, stage 6, stage 7)\n"
    )


def test_an_order_of_replicas_that_fits_no_node_is_told_beside_the_others(capsys):
    arguments = [*BITPIPE, "--topology=h200:4x2"]
    lines = shown(capsys, *arguments).splitlines()
    assert "contiguous" in lines
    assert lines[-6:-3] == [
        "",
        "replicas_together",
        "  pipe=4, data=2, tensor=1 cannot be laid on nodes of 2 GPUs with all replicas of a stage together",
    ]
    assert lines[-1].startswith("  repair: set data=1 or")
    values = json.loads(shown(capsys, *arguments, "--format=json"))
    assert "rule replicas-together" in values["replicas_together"]["refused"]
    assert values["contiguous"]["crossing_sums"] == [f"stage {stage}" for stage in range(8)]


def test_copies_of_one_replica_sum_too(capsys):
    arguments = ["1f1b", *BITPIPE[1:], "--topology=h200:2x4", "--format=json"]
    values = json.loads(shown(capsys, *arguments))
    assert values["pair_adjacent"]["crossing_sums"] == [f"stage {stage}" for stage in range(4)]
    assert values["replicas_together"]["crossing_sums"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SIXTEEN[:3], "--placement"], "--topology is missing"),
        ([*SIXTEEN[:3], "--topology=h200:2x8"], "--topology=h200:2x8 has no effect: it needs --placement"),
        ([*SIXTEEN[:3], "--data=2"], "--data=2 has no effect: it needs --placement"),
        ([*SIXTEEN, "--tensor=0"], "--tensor=0: 0 is not a positive integer"),
        ([*SIXTEEN, "--format=svg"], "--format=svg has no effect: --placement is shown as text or json"),
        ([*SIXTEEN, "--backward=3"], "--backward=3.0 has no effect: --placement shows no times"),
        ([*SIXTEEN, "--gradient_messages=3"], "--gradient_messages=3.0 has no effect: --placement shows no times"),
        ([*SIXTEEN, "--tensor=2"], "rule topology-size"),
        ([*SIXTEEN[:4], "--topology=a100-80g:16x4", "--tensor=3"], "rule tensor-in-node"),
        ([*SIXTEEN[:4], "--topology=a100-80g:16x1"], "rule pair-adjacent"),
        ([*SIXTEEN[:4], "--topology=a100-80:2x8"], "Did you mean 'a100-80g'?"),
    ],
)
def test_mistakes_are_told_in_plain_text(capsys, arguments, message):
    assert message in refused(capsys, *arguments)
