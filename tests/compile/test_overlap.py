"""Which permutes of a scheduled program an action hides, counted in small programs written by hand."""

import pytest

from jaxpipe.compile.hlo import EXCHANGE, MESSAGE, PAGE_TRANSFER, overlapped_permutes, permute_pairs

PERMUTES = """
%product (a: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2] parameter(0)
  ROOT %gemm = (f32[2,2], s8[4]) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul"
}
%action (a: f32[2,2]) -> f32[2,2] {
  %a.1 = f32[2,2] parameter(0)
  ROOT %inner = f32[2,2] while(%a.1), condition=%always, body=%product
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
        ("  %w = f32[2,2] while(%x), condition=%always, body=%copies", "", 0),
        ("  %w = f32[2,2] copy(%x)", "", 0),
    ],
    ids=["behind an action", "synchronous", "behind copies", "nothing between"],
)
def test_a_permute_is_hidden_by_an_action_between_its_start_and_its_end(first, attributes, hidden):
    assert overlapped_permutes(program(first, attributes=attributes)) == (1, hidden)


def test_a_permute_that_was_never_made_asynchronous_is_not_hidden():
    text = program().replace("collective-permute-start(%x)", "collective-permute(%x)")
    text = text.replace("collective-permute-done(%start)", "copy(%start)")
    assert overlapped_permutes(text) == (1, 0)


@pytest.mark.parametrize(
    ("scope", "kind"),
    [("type12_permute1", MESSAGE), ("type3_transfer", PAGE_TRANSFER), ("type6_exchange0", EXCHANGE)],
)
def test_messages_pages_and_gradients_are_told_apart_by_their_scopes(scope, kind):
    text = program(scope=scope)
    assert overlapped_permutes(text) == (1, 1)
    for other in (MESSAGE, PAGE_TRANSFER, EXCHANGE):
        assert overlapped_permutes(text, scope=other) == ((1, 1) if other is kind else (0, 0))
        assert permute_pairs(text, scope=other) == ({scope: {(0, 1)}} if other is kind else {})
