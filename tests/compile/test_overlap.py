"""Which permutes of a scheduled program an action hides, counted in small programs written by hand."""

import os
import subprocess
import sys

import pytest
from collectives_of_programs import permute_pairs
from compiling import AS_A_USER, ROOT

from jaxpipe.compile.hlo import (
    BY_DATA,
    ENDS_OVER_DATA,
    EXCHANGE,
    EXPERTS,
    MESSAGE,
    OVER_DATA,
    PAGE_TRANSFER,
    overlapped_bytes,
    overlapped_in_pairs,
    overlapped_permutes,
)

PERMUTES = """
%product (a: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2] parameter(0)
  ROOT %gemm = (f32[2,2], s8[4]) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul"
}
%action (a: f32[2,2]) -> f32[2,2] {
  %a.1 = f32[2,2] parameter(0)
  ROOT %inner = f32[2,2] while(%a.1), condition=%always, body=%product
}
%fused (a: f32[2,2]) -> f32[2,2] {
  %a.3 = f32[2,2] parameter(0)
  ROOT %gemm.1 = (f32[2,2], s8[4]) custom-call(%a.3, %a.3), custom_call_target="__cublas$lt$matmul"
}
%in_place (a: f32[2,2]) -> f32[2,2] {
  %a.4 = f32[2,2] parameter(0)
  ROOT %fusion = f32[2,2] fusion(%a.4), kind=kCustom, calls=%fused
}
%copies (a: f32[2,2]) -> f32[2,2] {
  %a.2 = f32[2,2] parameter(0)
  ROOT %copy = f32[2,2] copy(%a.2)
}
ENTRY %main (a: f32[2,2]) -> f32[2,2] {
  %x = f32[2,2] parameter(0)
  %start = (f32[2,2], f32[2,2]) collective-permute-start(%x), source_target_pairs={{0,1}}, SCOPEATTRIBUTES
FIRST
  %done = f32[2,2] collective-permute-done(%start)
  ROOT %last = f32[2,2] while(%done), condition=%always, body=%action
}
"""
BEHIND = "  %w = f32[2,2] while(%x), condition=%always, body=%action"
SYNCHRONOUS = ', backend_config={"collective_backend_config":{"is_sync":true}}'


def program(first=BEHIND, *, scope="position0_permute0", attributes=""):
    scope = f'metadata={{op_name="jit(step)/while/body/{scope}/ppermute"}}'
    return PERMUTES.replace("FIRST", first).replace("SCOPE", scope).replace("ATTRIBUTES", attributes)


@pytest.mark.parametrize(
    ("first", "attributes", "hidden"),
    [
        (BEHIND, "", 1),
        (BEHIND, SYNCHRONOUS, 0),
        ("  %w = f32[2,2] while(%x), condition=%always, body=%in_place", "", 1),
        ("  %w = f32[2,2] while(%x), condition=%always, body=%copies", "", 0),
        ("  %w = f32[2,2] copy(%x)", "", 0),
    ],
    ids=[
        "behind an action",
        "synchronous",
        "behind a product that reads a stack in place",
        "behind copies",
        "nothing between",
    ],
)
def test_a_permute_is_hidden_by_an_action_between_its_start_and_its_end(first, attributes, hidden):
    assert overlapped_permutes(program(first, attributes=attributes)) == (1, hidden)


def test_a_permute_that_was_never_made_asynchronous_is_not_hidden():
    text = program().replace("collective-permute-start(%x)", "collective-permute(%x)")
    text = text.replace("collective-permute-done(%start)", "copy(%start)")
    assert overlapped_permutes(text) == (1, 0)


def test_a_collective_inside_a_layer_is_hidden_by_a_matmul_without_a_loop():
    product = '  %w = (f32[2,2], s8[4]) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"'
    for first, hidden in ((product, 1), (product.replace("__cublas$lt$matmul", "sort"), 0)):
        text = program(first, scope="layer_over_expert").replace("collective-permute", "all-to-all")
        assert overlapped_permutes(text, scope=EXPERTS, opcode="all-to-all") == (1, hidden)
        assert overlapped_permutes(text) == (0, 0)


@pytest.mark.parametrize(
    ("scope", "kind"),
    [
        ("type12_permute1", MESSAGE),
        ("type3_transfer", PAGE_TRANSFER),
        ("type6_exchange0", EXCHANGE),
        ("layer_over_expert", EXPERTS),
    ],
)
def test_messages_pages_gradients_and_rows_of_experts_are_told_apart_by_their_scopes(scope, kind):
    text = program(scope=scope)
    assert overlapped_permutes(text) == (1, 1)
    for other in (MESSAGE, PAGE_TRANSFER, EXCHANGE, EXPERTS):
        assert overlapped_permutes(text, scope=other) == ((1, 1) if other is kind else (0, 0))
        assert permute_pairs(text, scope=other) == ({scope: {(0, 1)}} if other is kind else {})


LAYERS_OVER_DATA = """
%action (p: (bf16[8,4])) -> (bf16[8,4]) {
  %p = (bf16[8,4]) parameter(0)
  %own = bf16[4,4] get-tuple-element(%p), index=0
  %grads = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %gather = ((bf16[4,4]{1,0}), (bf16[8,4]{1,0})) all-gather-start(%own), op_name="layer/gather_over_data/a"
  %w = (f32[2,2], s8[4]) custom-call(%own), custom_call_target="__cublas$lt$matmul"
  %gathered = bf16[8,4] all-gather-done(%gather)
  %sum = f32[4,4]{1,0} reduce-scatter(%grads), op_name="layer/sum_over_data/b"
  ROOT %t = (bf16[8,4]) tuple(%gathered)
}
%guard (g: (bf16[8,4])) -> (bf16[8,4]) {
  %g = (bf16[8,4]) parameter(0)
  ROOT %layers = (bf16[8,4]) while(%g), condition=%c, body=%action, backend_config={"known_trip_count":{"n":"3"}}
}
%rounds (r: (bf16[8,4])) -> (bf16[8,4]) {
  %r = (bf16[8,4]) parameter(0)
  ROOT %guarded = (bf16[8,4]) while(%r), condition=%c, body=%guard
}
ENTRY %main (a: (bf16[8,4])) -> (bf16[8,4]) {
  %a = (bf16[8,4]) parameter(0)
  %x = f32[2,4] get-tuple-element(%a), index=0
  %ends = f32[2,4] all-reduce-start(%x), to_apply=%add, op_name="ends_over_data/c"
  %ended = f32[2,4] all-reduce-done(%ends)
  ROOT %turns = (bf16[8,4]) while(%a), condition=%c, body=%rounds, backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_bytes_over_data_are_whole_layers_by_the_turns_of_an_action():
    """Three layers: of a gather 64 bytes each, all behind a product, of a sum 128; and no turns of the rounds."""
    of_layers = overlapped_bytes(LAYERS_OVER_DATA, scope=OVER_DATA, opcodes=BY_DATA)
    assert of_layers == (3 * (64 + 128), 3 * 64)
    assert overlapped_bytes(LAYERS_OVER_DATA, scope=ENDS_OVER_DATA, opcodes=BY_DATA) == (2 * 4 * 4, 0)
    alone = LAYERS_OVER_DATA.replace("__cublas$lt$matmul", "sort")
    assert overlapped_bytes(alone, scope=OVER_DATA, opcodes=BY_DATA) == (3 * (64 + 128), 0)


PAIR = """
%products (g: bf16[8,4]) -> bf16[8,4] {
  %g = bf16[8,4] parameter(0)
  ROOT %w.1 = (bf16[8,4], s8[4]) custom-call(%g), custom_call_target="__cublas$lt$matmul", op_name="pair_backward/dot"
}
ENTRY %main (a: bf16[4,4]) -> bf16[8,4] {
  %a = bf16[4,4] parameter(0)
  %gather = (bf16[4,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%a), op_name="pair_forward/jvp(layer_over_tensor)/g"
  %w = bf16[8,4] fusion(%a), kind=kCustom, calls=%products
  %gathered = bf16[8,4] all-gather-done(%gather)
  %sum = (bf16[8,4]{1,0}, bf16[4,4]{1,0}) reduce-scatter-start(%gathered), op_name="pair_backward/layer_over_expert/s"
  %v = bf16[8,4] fusion(%a), kind=kCustom, calls=%products
  %summed = bf16[4,4] reduce-scatter-done(%sum)
  %alone = bf16[8,4] all-gather(%a), op_name="body/layer_over_tensor/g"
  ROOT %done = bf16[8,4] copy(%w)
}
"""


def test_collectives_of_a_pair_hide_behind_products_of_the_other_half():
    """The forward's gather does; the backward's sum has products of its own half beside it."""
    assert overlapped_in_pairs(PAIR) == {"all-gather": (64, 64), "reduce-scatter": (64, 0)}
    of_forward = PAIR.replace('op_name="pair_backward/dot"', 'op_name="pair_forward/dot"')
    assert overlapped_in_pairs(of_forward) == {"all-gather": (64, 0), "reduce-scatter": (64, 64)}
    assert overlapped_in_pairs(PAIR.replace("pair_", "")) == {}


SPLIT_HEAD = """
import re
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import compile_step
from jaxpipe.compile.gpus import absent_gpus
from jaxpipe.compile.hlo import overlapped_permutes
from jaxpipe.config import base_config, check

config = base_config("llama")
config.model.update(num_layers=8, hidden=2048, num_heads=16, num_kv_heads=16, feed_forward=5632, dtype="bfloat16")
config.model.update(vocab_size=32768, attention="chunked")
config.data.update(seq_len=2048, batch_size=16)
config.mesh.update(pipe=4, platform="gpu")
config.pipeline.update(num_microbatches=16, vocab_over_pipe="true")
check(config)
step = compile_step(config, absent_gpus(parse_topology("h100-80g:1x4")), gpus_per_node=4)
num_entries = step.pipeline.table.transfers["split_head"].num_entries + 1
text, entries = step.compiled.as_text(), f"bf16[{num_entries},1,2048,2048]"
print([overlapped_permutes(text, opcode=opcode)[1] for opcode in ("all-reduce", "all-gather")])
print(entries in text, len(re.findall(rf"= {re.escape(entries)}[^ ]* copy[(]", text)))
"""


@pytest.mark.slow
def test_collectives_of_a_split_head_travel_behind_the_actions_of_their_rounds():
    """And what waits for them is written in place. Rounds in which no device computes expose theirs."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    ran = subprocess.run(
        [sys.executable, "-c", SPLIT_HEAD],
        cwd=ROOT,
        env={**os.environ, **AS_A_USER},
        capture_output=True,
        text=True,
        check=False,
    )
    # XLA makes one of the sums of a round.
    assert ran.stdout.splitlines() == ["[4, 3]", "True 0"], ran.stderr
