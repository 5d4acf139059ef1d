"""`show --placement`: where stages stand on a cluster, in both orders, and what crosses nodes."""

import json

import pytest

from jaxpipe.show import main

SIXTEEN = ["1f1b", "--num_devices=16", "--num_microbatches=32", "--placement", "--topology=a100-80g:2x8"]


def shown(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert "Traceback" not in output.err
    return output.err


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SIXTEEN[:3], "--placement"], "--placement needs a cluster"),
        ([*SIXTEEN[:3], "--topology=h200:2x8"], "--topology is for --placement"),
        ([*SIXTEEN[:3], "--data=2"], "--data is for --placement"),
        ([*SIXTEEN, "--tensor=0"], "--tensor=0: give 1 or more"),
        ([*SIXTEEN, "--format=svg"], "--format=svg does not show a placement"),
        ([*SIXTEEN, "--backward=3"], "--backward is a time, and --placement has none"),
        ([*SIXTEEN, "--tensor=2"], "rule topology-size"),
        ([*SIXTEEN[:4], "--topology=a100-80g:16x4", "--tensor=3"], "rule tensor-in-node"),
        ([*SIXTEEN[:4], "--topology=a100-80g:16x1"], "rule pair-adjacent"),
        ([*SIXTEEN[:4], "--topology=a100-80:2x8"], "Did you mean 'a100-80g'?"),
    ],
)
def test_mistakes_are_told_in_plain_text(capsys, arguments, message):
    assert message in refused(capsys, *arguments)
