"""Training steps compiled for GPUs that are not there: bytes as predicted, transfers behind actions."""

import functools
import json
import os
import subprocess
import sys

import pytest
from compiling import AS_A_USER, ROOT, compiled, peak_host_bytes, run

from jaxpipe.lowering import lower
from jaxpipe.schedules import build

pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")

# Sizes at which buffers of a few KB do not matter; nothing of them is made. In each of the three another part of an
# action needs most: the head, a layer's backward, the embedding's.
GPT = (
    "--config=configs/quickstart.py",
    "--config.model.num_layers=64",  # eight a stage: a loop, so their number costs no time
    "--config.model.hidden=2048",
    "--config.model.num_heads=16",
    "--config.model.vocab_size=32768",
    "--config.model.dtype=bfloat16",
    "--config.model.recompute=attention",
    "--config.data.seq_len=1024",
    "--config.data.batch_size=32",
)
LLAMA = (
    "--config=configs/llama_7b.py",
    "--config.model.num_layers=7",
    "--config.data.batch_size=32",
    "--config.pipeline.num_microbatches=16",
    "--config.mesh.data=1",
    "--config.mesh.pipe=4",
    "--config.mesh.tensor=2",
)
DATA_PARALLEL = (
    "--config=configs/quickstart.py",
    "--config.model.num_layers=6",
    "--config.model.hidden=1024",
    "--config.model.num_heads=16",
    "--config.model.hidden_dropout=0.1",
    "--config.model.vocab_size=32768",
    "--config.data.seq_len=1024",
    "--config.mesh.data=2",
    "--config.mesh.pipe=3",
)
CASES = {
    "gpt": (*GPT, "--topology=a100-80g:1x8"),
    "gpt, bpipe": (*GPT, "--config.pipeline.schedule=bpipe", "--topology=a100-80g:1x8"),
    "gpt, host": (
        *(*GPT, "--config.pipeline.schedule=bpipe", "--config.pipeline.options=to=host"),
        "--topology=h100-80g:1x8",
    ),
    "gpt, bitpipe": (*GPT, "--config.pipeline.schedule=bitpipe", "--topology=a100-80g:1x8"),
    "llama, two nodes, uneven stages": (*LLAMA, "--topology=a100-80g:2x4"),
    "data parallel, dropout, another GPU": (*DATA_PARALLEL, "--topology=h100-80g:1x6"),
}


@functools.cache
def report(case):
    return compiled(*CASES[case])


LONG = (
    "llama, two nodes, uneven stages",
    "data parallel, dropout, another GPU",
    "gpt, bpipe",
    "gpt, host",
    "gpt, bitpipe",
)


@pytest.fixture(
    params=[pytest.param(case, marks=pytest.mark.slow if case in LONG else pytest.mark.ci) for case in CASES]
)
def numbers(request):
    return report(request.param)


def test_prediction_is_what_is_compiled(numbers):
    assert numbers["predicted_bytes"] == pytest.approx(numbers["total_bytes"], rel=0.05)
    assert numbers["predicted_bytes"] == sum(numbers["predicted"].values())
    temporaries = sum(size for kind, size in numbers["predicted"].items() if kind not in ("state", "batch"))
    assert temporaries == pytest.approx(numbers["temp_bytes"], rel=0.05)
    assert numbers["predicted"]["workspace"] == max(numbers["workspace"].values())


def test_the_whole_state_is_updated_in_place(numbers):
    # Metrics come out besides, four numbers and where they lie; tokens and targets go in.
    assert numbers["alias_bytes"] == numbers["predicted"]["state"]
    assert 0 < numbers["output_bytes"] - numbers["alias_bytes"] < 1024
    assert numbers["argument_bytes"] - numbers["alias_bytes"] == numbers["predicted"]["batch"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case in LONG else pytest.mark.ci)
        for case in CASES
        if "pipe" not in case
    ],
)
def test_every_message_is_behind_an_action(case):
    numbers = report(case)
    # But those of rounds in which no device computes, as at the end of the step.
    assert 4 <= numbers["overlapped_permutes"] <= numbers["permutes"]
    assert numbers["evict_load_permutes"] == numbers["exchange_permutes"] == 0


@pytest.mark.slow
def test_compiling_makes_no_constant_as_large_as_the_saved_activations():
    """XLA's collective-pipeliner-forward does, 3 GiB here, and more than a host has of whole models."""
    sizes = ("model.num_layers=4", "model.vocab_size=4096", "data.seq_len=2048", "data.batch_size=64")
    mesh = ("mesh.data=4", "mesh.pipe=2", "mesh.tensor=1", "pipeline.num_microbatches=16", "pipeline.schedule=zb_v")
    fields = (f"--config.{field}" for field in (*sizes, *mesh))
    assert peak_host_bytes("--config=configs/llama3_8b.py", "--topology=h100-80g:1x8", *fields) < 1.5 * 2**30


@pytest.mark.ci
def test_every_message_of_a_round_with_actions_is_behind_one():
    table, numbers = lower(build("1f1b", num_devices=8, num_microbatches=16), layers_per_stage=(8,) * 8), report("gpt")
    with_actions = sum(
        len(permutes) for permutes, kinds in zip(table.permutes["messages"], table.kinds, strict=True) if kinds
    )
    assert numbers["overlapped_permutes"] == with_actions
    assert numbers["permutes"] == sum(map(len, table.permutes["messages"]))


@pytest.mark.slow
def test_every_page_travels_behind_an_action():
    numbers = report("gpt, bpipe")
    # But one, of a round at the end of the step in which no device computes.
    assert numbers["overlapped_evict_load_permutes"] >= numbers["evict_load_permutes"] - 1 > 0
    assert numbers["permutes"] > numbers["evict_load_permutes"]


@pytest.mark.slow
def test_every_block_of_pages_is_copied_to_the_host_and_back_behind_actions():
    """Three microbatches and a block stay on the device, 1F1B's others on the host; XLA reports what it takes there."""
    numbers = report("gpt, host")
    assert numbers["overlapped_host_copies"] == numbers["host_copies"] > 0
    assert numbers["evict_load_permutes"] == 0
    # Five sixths of eight layers, rounded up; and seven places on the host: those of the first stage's, and one more.
    page_bytes = numbers["slot_bytes"] // 8
    assert numbers["num_slots"] == 3
    assert numbers["transit_bytes"] == 7 * page_bytes
    assert numbers["host_bytes"] == numbers["predicted_host_bytes"] == 7 * 7 * page_bytes
    assert numbers["predicted"]["pages"] == 3 * numbers["slot_bytes"]


@pytest.mark.slow
def test_gradients_of_two_replicas_travel_behind_actions():
    numbers = report("gpt, bitpipe")
    # But one, of rounds at the end of the step in which no device computes.
    assert numbers["overlapped_exchange_permutes"] == numbers["exchange_permutes"] - 1 > 0
    assert numbers["permutes"] > numbers["exchange_permutes"]


@pytest.mark.slow
def test_two_replicas_have_one_state_and_twice_the_weights():
    """Wu et al., BitPipe, Table 2: D Ma of activations as 1F1B, which are twice as many slots of half the layers."""
    bitpipe, plain = report("gpt, bitpipe"), report("gpt")
    assert bitpipe["alias_bytes"] == plain["alias_bytes"]
    assert bitpipe["num_slots"] * bitpipe["slot_bytes"] == plain["num_slots"] * plain["slot_bytes"]
    hidden, vocab_size, seq_len = 2048, 32768, 1024
    layers = 8 * (12 * hidden**2 + 13 * hidden)
    ends = (vocab_size + seq_len) * hidden + 2 * hidden
    assert plain["predicted"]["weights"] == 2 * (layers + ends)  # bfloat16
    assert bitpipe["predicted"]["weights"] == 2 * (2 * layers + ends)
    assert plain["predicted"]["gradients"] == 4 * (layers + ends)
    assert bitpipe["predicted"]["gradients"] == 4 * (2 * layers + ends)


@pytest.mark.slow
def test_bpipe_holds_half_a_slot_more_than_its_bound():
    """Kim et al., ICML 2023: ceil((D + 2) / 2) of 1F1B's D slots; what travels is held twice, half a slot at most."""
    bpipe, plain = report("gpt, bpipe"), report("gpt")
    assert bpipe["num_slots"] == 5
    assert bpipe["slot_bytes"] == plain["slot_bytes"]
    assert 0 < bpipe["transit_bytes"] <= bpipe["slot_bytes"] / 2
    assert bpipe["total_bytes"] <= plain["total_bytes"] - (8 - 5 - 0.5) * plain["slot_bytes"]


@pytest.mark.ci
def test_state_is_three_float32_copies_of_the_parameters():
    """AdamW's two moments beside the parameters; of a stage of eight layers, and an eighth of the embedding's."""
    hidden, vocab_size, seq_len = 2048, 32768, 1024
    layer = 12 * hidden**2 + 13 * hidden  # Narayanan et al., SC 2021, equation 2
    ends = (vocab_size + seq_len) * hidden + 2 * hidden
    assert report("gpt")["alias_bytes"] == pytest.approx(3 * 4 * (8 * layer + ends / 8), rel=1e-6)


@pytest.mark.ci
def test_slots_and_pages_are_1f1bs():
    numbers = report("gpt")
    assert numbers["num_slots"] == 8
    assert numbers["predicted"]["pages"] == 8 * numbers["slot_bytes"]
    assert numbers["transit_bytes"] == 0


@pytest.mark.ci
def test_fields_are_those_that_the_readme_promises():
    numbers = report("gpt")
    kinds = ("argument", "temp", "output", "alias", "total", "reserve", "hardware", "slot", "transit", "predicted")
    permutes = [
        f"{overlapped}{kind}permutes" for overlapped in ("", "overlapped_") for kind in ("", "evict_load_", "exchange_")
    ]
    whole = ["num_slots", *(f"{kind}_bytes" for kind in kinds), *permutes]
    assert {name: type(numbers[name]) for name in whole} == dict.fromkeys(whole, int)
    assert type(numbers["fits"]) is bool
    assert type(numbers["compile_s"]) is float


@pytest.mark.slow
def test_text_says_the_same_in_gibibytes():
    small = ("--config=configs/quickstart.py", "--config.model.num_layers=1", "--config.mesh.pipe=1")
    result = run(*small, "--topology=h200:1x1")
    assert result.returncode == 0, result.stderr
    assert "h200:1x1: 1 x NVIDIA H200" in result.stdout
    assert "\nhardware        139.801  fits, spare 136." in result.stdout  # 143156 MiB


@pytest.mark.slow
def test_layers_are_gathered_and_summed_over_data_behind_products():
    """In the loops of the first F and the last B, once in each: XLA combines the collectives of a layer."""
    sizes = ("model.num_layers=4", "model.vocab_size=4096", "model.attention=chunked", "data.seq_len=2048")
    mesh = ("mesh.data=2", "mesh.pipe=2", "mesh.tensor=1", "pipeline.num_microbatches=4", "data.batch_size=8")
    fields = (f"--config.{field}" for field in (*sizes, *mesh))
    numbers = compiled("--config=configs/llama3_8b.py", "--topology=h100-80g:1x4", *fields)
    # What stands alone: the layers before any action, the rest of device 1 behind its last message, the last layer.
    assert (numbers["overlapped_data_collectives"], numbers["data_collectives"]) == (2, 5)
    # Two layers a stage, gathered in 16 bits and summed in 32; loops that stand alone have no known number of turns.
    layer = 2 * (4096 * (4096 + 6144 + 2 * 14336) + 14336 * 4096 + 2 * 4096)
    assert numbers["overlapped_layer_data_bytes"] == 2 * (1 + 2) * layer
    assert numbers["layer_data_bytes"] == numbers["overlapped_layer_data_bytes"] + (1 + 2 * 2) * layer
    assert numbers["ends_data_bytes"] > 0 == numbers["overlapped_ends_data_bytes"]


EXPERTS = """
import json, re, sys
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import absent_gpus, compile_step
from jaxpipe.config import base_config, check

config = base_config("mixtral")
config.model.update(num_layers=3, hidden=64, num_heads=4, num_kv_heads=2, feed_forward=96, num_experts=4)
config.model.update(dtype="bfloat16", attention="chunked", vocab_size=512)
config.data.update(seq_len=128, batch_size=8)
config.mesh.pipe = 1
devices = absent_gpus(parse_topology("h100-80g:1x1"))
config.pipeline.update(schedule=sys.argv[1], num_microbatches=4)
check(config)
text = compile_step(config, devices, gpus_per_node=1).compiled.as_text()
kernels = re.findall(r"= (\\S+\\[\\S*4,(?:64,96|96,64)\\])\\S* (?!parameter|get-tuple|bitcast)([\\w-]+)\\(", text)
print(json.dumps(sorted({f"{shape} {opcode}" for shape, opcode in kernels})))
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_kernels_of_experts_are_neither_copied_nor_added_by_others(schedule):
    """Of one layer's kernels and their gradients there is no array: all have the three layers in front."""
    done = subprocess.run(
        [sys.executable, "-c", EXPERTS, schedule],
        cwd=ROOT,
        env={**os.environ, **AS_A_USER},
        capture_output=True,
        text=True,
        check=True,
    )
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert "bf16[1,1,3,4,64,96] convert" in kernels  # the test would see them
    assert [kernel for kernel in kernels if "3,4," not in kernel] == []


@pytest.mark.slow
def test_a_turn_over_two_kinds_holds_the_gradients_of_one_layer():
    """Without an order of the layers of a unit those of both are held: 0.968, and not 0.985."""
    model = ("num_layers=11", "hidden=1024", "num_heads=16", "num_kv_heads=16", "feed_forward=2816", "vocab_size=4096")
    kinds = ("sliding_window=256", "full_every=2", "attention=chunked", "recompute=none", "dtype=bfloat16")
    pipeline = ("schedule=1f1b", "num_microbatches=16", "layers_per_stage=3,2,3,3")
    fields = [f"--config.model.{field}" for field in (*model, *kinds)]
    fields += [f"--config.pipeline.{field}" for field in pipeline]
    fields += [f"--config.mesh.{field}" for field in ("data=1", "pipe=4", "tensor=1")]
    fields += ["--config.data.seq_len=1024", "--config.data.batch_size=16"]
    numbers = compiled("--config=configs/llama_7b.py", "--topology=h100-80g:1x4", *fields)
    assert 0.975 <= numbers["predicted_bytes"] / numbers["total_bytes"] <= 1.025
