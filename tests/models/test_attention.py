"""Each form of attention against plain formulas: values, gradients, masks, and what it saves."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import printed
from plain_attention import (
    CAUSAL,
    FIRST_HEAD,
    FIRST_SEQUENCE,
    NUM_HEADS,
    RATE,
    kept,
    new_arrays,
    new_dropout,
    new_padding_mask,
    plain_attention,
    value_and_grads,
)
from small_models import assert_near, in_tiers, normal

from jaxpipe.errors import ConfigError
from jaxpipe.models import attention_chunked
from jaxpipe.models.attention import ATTENTION, AttentionDropout, Visible, check_cudnn, chunked, cudnn, xla
from jaxpipe.models.attention_chunked import blocks
from jaxpipe.models.choices import attend_normed_of

SIZES = [(1, 2), (7, 4), (7, 1), (129, 4), (300, 2)]  # tokens, key-value heads
FORMS = pytest.mark.parametrize("form", [xla, chunked])


def _saved(fn, *arguments) -> tuple[list, list]:
    """Shapes and dtypes of what is saved, and shapes of the arguments that backward is given again."""

    def trace(*arguments):
        _, vjp = jax.vjp(fn, *arguments)
        return [
            [leaf for leaf in jax.tree.leaves(part) if hasattr(leaf, "shape")]
            for part in (vjp.opaque_residuals, vjp.args_res)
        ]

    opaque, again = jax.eval_shape(trace, *arguments)
    return [(leaf.shape, str(leaf.dtype)) for leaf in opaque], [leaf.shape for leaf in again]


@pytest.mark.parametrize(
    ("form", "seq", "num_kv_heads", "has_dropout"),
    in_tiers(
        ((form, *sizes, dropout) for form in (xla, chunked) for sizes in SIZES for dropout in (False, True)),
        default=[(xla, 7, 1, True), (chunked, 300, 2, True)],
    ),
)
def test_values_and_gradients_are_those_of_the_plain_formula(form, seq, num_kv_heads, has_dropout):
    arrays = new_arrays(seq=seq, num_kv_heads=num_kv_heads)
    ours = value_and_grads(partial(form, visible=CAUSAL, dropout=new_dropout() if has_dropout else None), *arrays)
    reference = value_and_grads(lambda *a: plain_attention(*a, keep=kept(2, 4, seq) if has_dropout else None), *arrays)
    # Float32 sums of a few hundred terms, some of them cancelling.
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("seq", "num_kv_heads", "window", "has_dropout"),
    in_tiers(
        [(7, 1, None, False), (300, 2, 128, True), (129, 4, 3, False), (300, 2, None, False)],
        default=[(300, 2, 128, True)],
    ),
)
@pytest.mark.parametrize("by_tiles", [False, True])
def test_sinks_are_a_further_term_of_each_softmax(monkeypatch, by_tiles, seq, num_kv_heads, window, has_dropout):
    monkeypatch.setattr(attention_chunked, "MOST_IN_ROW", 6 if by_tiles else 8192)
    query, key, value, weight = new_arrays(seq=seq, num_kv_heads=num_kv_heads)
    sinks = normal(4)
    visible = Visible(window=window)
    dropout = new_dropout() if has_dropout else None
    keep = kept(2, 4, seq) if has_dropout else None

    def results(form):
        def objective(*arrays):
            output = form(*arrays)
            return (output * weight).sum(), output

        gradients, output = jax.jit(jax.grad(objective, (0, 1, 2, 3), has_aux=True))(query, key, value, sinks)
        return output, gradients

    ours = results(lambda q, k, v, s: chunked(q, k, v, visible=visible, dropout=dropout, sinks=s))
    plain = results(lambda q, k, v, s: plain_attention(q, k, v, keep=keep, visible=visible, sinks=s))
    assert_near(ours, plain, tolerance=2e-5)
    without = jax.jit(partial(chunked, visible=visible, dropout=dropout))(query, key, value)
    assert np.abs(ours[0] - without).max() > 0.1


@FORMS
def test_low_precision_is_near(form):
    *arrays, _ = new_arrays(seq=200, num_kv_heads=2)
    low = [array.astype(jnp.bfloat16) for array in arrays]
    output = jax.jit(partial(form, visible=CAUSAL, dropout=None))(*low)
    assert output.dtype == jnp.bfloat16
    reference = plain_attention(*(array.astype(jnp.float32) for array in low))
    np.testing.assert_allclose(output.astype(jnp.float32), reference, atol=0.04)


@pytest.mark.parametrize("form", [xla, chunked, cudnn])
def test_dropout_of_rate_0_is_none(form, monkeypatch):
    _run_cudnn_as_xla(monkeypatch)
    query, key, value, _ = new_arrays(seq=6, num_kv_heads=2)
    none, rate_0 = (jax.jit(partial(form, visible=CAUSAL, dropout=d)) for d in (None, new_dropout()._replace(rate=0.0)))
    np.testing.assert_array_equal(rate_0(query, key, value), none(query, key, value))


@FORMS
def test_a_device_drops_what_the_whole_drops_in_its_heads(form):
    query, key, value, _ = new_arrays(seq=9, num_kv_heads=2)
    whole = jax.jit(lambda *arrays: form(*arrays, visible=CAUSAL, dropout=new_dropout()))(query, key, value)

    @jax.jit
    def part(first_head, first_sequence, *arrays):
        return form(*arrays, visible=CAUSAL, dropout=new_dropout(first_sequence=first_sequence, first_head=first_head))

    local = query[1:, :, 2:], key[1:, :, 1:], value[1:, :, 1:]
    here = (FIRST_HEAD + 2, FIRST_SEQUENCE + 1)
    np.testing.assert_allclose(part(*here, *local), whole[1:, :, 2:], rtol=1e-5, atol=1e-6)
    for elsewhere in ((FIRST_HEAD, FIRST_SEQUENCE + 1), (FIRST_HEAD + 2, FIRST_SEQUENCE)):
        assert not np.allclose(part(*elsewhere, *local), whole[1:, :, 2:], atol=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize(
    ("form", "own"),
    [
        (xla, lambda dtype: [((2, 2, 2 * 150, 150), dtype)]),  # probabilities
        (chunked, lambda dtype: [((2, 150, 4, 8), dtype), ((2, 2, 2, 150), "float32")]),  # output, log-sum-exp
    ],
)
@pytest.mark.parametrize("has_padding", [False, True], ids=["", "padding"])
def test_backward_saves_this_and_raw_arguments_alone(form, own, has_padding, has_dropout, dtype):
    query, key, value, _ = (array.astype(dtype) for array in new_arrays(seq=150, num_kv_heads=2))
    padding_mask = new_padding_mask(150, at_end=True) if has_padding else None
    # Backward of probabilities that are kept does not ask which keys are seen.
    is_used = {form: has_padding and form is chunked, "again": has_padding}

    def arguments(name):
        of_mask = [padding_mask.shape] if is_used[name] else []
        return [query.shape, key.shape, value.shape, *([(2,), ()] if has_dropout else []), *of_mask]

    def apply(form, query, key, value, random, padding_mask):
        # As a tensor-parallel layer would: the index of its first head is made where it is used.
        dropout = AttentionDropout(random, RATE, lambda: 2 * 2, NUM_HEADS) if has_dropout else None
        visible = Visible(causal=not has_padding, padding_mask=padding_mask)
        return form(query, key, value, visible=visible, dropout=dropout)

    given = query, key, value, new_dropout().random, padding_mask
    assert _saved(partial(apply, form), *given) == (own(dtype), arguments(form))
    recomputed = partial(apply, jax.checkpoint(form, prevent_cse=False))
    assert _saved(recomputed, *given) == ([], arguments("again"))


@pytest.mark.parametrize("form", in_tiers([xla, chunked], default=[xla]))
def test_recomputation_changes_no_gradient(form):
    arrays = new_arrays(seq=130, num_kv_heads=2)
    plain = value_and_grads(partial(form, visible=CAUSAL, dropout=new_dropout()), *arrays)
    again = value_and_grads(
        partial(jax.checkpoint(form, prevent_cse=False), visible=CAUSAL, dropout=new_dropout()), *arrays
    )
    for a, b in zip(plain, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_array_as_first_head_is_saved_a_number_or_a_function_is_not():
    query, key, value, _ = new_arrays(seq=4, num_kv_heads=2)

    def saved(first_head):
        def apply(query, random):
            head = first_head(random)
            return xla(query, key, value, visible=CAUSAL, dropout=AttentionDropout(random, RATE, head, NUM_HEADS))

        return [shape for shape, dtype in _saved(apply, query, new_dropout().random)[0] if dtype == "int32"]

    assert saved(lambda random: random.first_sequence + 1) == [()]
    assert saved(lambda random: 1) == []
    assert saved(lambda random: lambda: 1) == []


@pytest.mark.parametrize("seq", [1, 2, 127, 128, 129, 1000, 1024, 1025, 2048, 5000])
def test_blocks_cover_every_query_once(seq):
    cut = blocks(seq, CAUSAL)
    assert [position for block in cut for position in range(block.first_query, block.end_query)] == list(range(seq))
    assert len(cut) <= 8
    assert len({block.num_queries for block in cut[:-1]}) <= 1


@pytest.mark.ci
def test_chunked_never_holds_all_scores():
    shapes = {}
    for form in (xla, chunked):
        arrays = new_arrays(seq=1024, num_kv_heads=1, num_heads=2, batch=1)
        apply = jax.jit(
            jax.grad(lambda *a, form=form: form(*a, visible=CAUSAL, dropout=new_dropout()).sum(), (0, 1, 2))
        )
        text = apply.lower(*arrays[:3]).compile().as_text()
        shapes[form] = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)]
    largest = {form: max(np.prod(shape) for shape in found) for form, found in shapes.items()}
    assert largest[xla] >= 2 * 1024 * 1024  # the test would see them
    assert largest[chunked] == 2 * 128 * 1024  # the last block's
    assert not [shape for shape in shapes[chunked] if shape[-2:] == (1024, 1024)]


def _run_cudnn_as_xla(monkeypatch):
    original = jax.nn.dot_product_attention

    def on_any_platform(*arrays, implementation, **options):
        assert implementation == "cudnn"
        return original(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_any_platform)


@pytest.mark.parametrize(
    "name", in_tiers(["causal", "all", "window", "padding at the end"], default=["window", "padding at the end"])
)
def test_cudnn_is_asked_for_what_is_seen_in_our_layout(monkeypatch, name):
    """What cuDNN computes needs a GPU; here the interface of jax.nn, with its other implementation."""
    _run_cudnn_as_xla(monkeypatch)
    query, key, value, _ = new_arrays(seq=12, num_kv_heads=2)
    visible = {
        "causal": CAUSAL,
        "all": Visible(causal=False),
        "window": Visible(window=5),
        "padding at the end": Visible(causal=False, padding_mask=new_padding_mask(12, at_end=True)),
    }[name]
    ours = jax.jit(partial(cudnn, visible=visible, dropout=None))(query, key, value)
    np.testing.assert_allclose(ours, plain_attention(query, key, value, visible=visible), rtol=1e-4, atol=1e-5)


def test_what_prepares_queries_and_keys_has_the_same_gradients_around_each_form(monkeypatch):
    """Backward prepares them again, from what it saved before."""
    _run_cudnn_as_xla(monkeypatch)
    query, key, value, dy = new_arrays(seq=12, num_kv_heads=2)
    norms = normal(2, query.shape[-1], seed=3)

    def gradients(attention):
        attend = attend_normed_of(attention, "none")

        def loss(query, key, value, norms):
            attended = attend(lambda x, norm: jnp.sin(x) * norm, query, key, value, tuple(norms), CAUSAL, None)
            return (attended * dy).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(query, key, value, norms)

    assert_near(gradients("cudnn"), gradients("xla"))
    assert_near(gradients("chunked"), gradients("xla"))


def test_cudnn_refuses_dropout():
    query, key, value, _ = new_arrays(seq=12, num_kv_heads=2)
    with pytest.raises(ConfigError, match=r"attention_dropout=0\.3"):
        cudnn(query, key, value, visible=CAUSAL, dropout=new_dropout())


GOOD = {"platform": "gpu", "dtype": "bfloat16", "head_dim": 128, "attention_dropout": 0.0}


@pytest.mark.parametrize("change", [{}, {"head_dim": 64}, {"head_dim": 256}])
def test_what_cudnn_can_is_accepted(change):
    check_cudnn(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "platform='cpu'"),
        ({"dtype": "float32"}, "dtype='float32'"),
        ({"head_dim": 100}, "head_dim=100"),
        ({"head_dim": 264}, "head_dim=264"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_what_cudnn_cannot_is_refused_with_reason_and_repair(change, reason):
    with pytest.raises(ConfigError) as error:
        check_cudnn(**{**GOOD, **change})
    where, rule, *picture, repair = str(error.value).splitlines()
    assert "model.attention='cudnn'" in where
    assert rule.startswith("  rule attention-cudnn: ")
    assert len(picture) == 1
    assert reason in picture[0]
    assert repair.startswith("  repair: set model.attention='chunked'")


def test_cudnn_gives_all_reasons_at_once():
    with pytest.raises(ConfigError) as error:
        check_cudnn(platform="cpu", dtype="float32", head_dim=4, attention_dropout=0.5)
    assert len(str(error.value).splitlines()) == 2 + 4 + 1


def test_every_form_has_a_name():
    assert {"xla": xla, "chunked": chunked, "cudnn": cudnn} == ATTENTION


COMPILE = """
import json, re
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.gpus import absent_gpus

devices = absent_gpus(parse_topology("a100-80g:1x1"))
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxpipe.models.attention import Visible, chunked

place = NamedSharding(Mesh(np.array(devices), ("all",)), P())
x = jax.ShapeDtypeStruct((2, 384, 4, 64), jnp.bfloat16, sharding=place)

def gradients(query, key, value, d_output):
    output, vjp = jax.vjp(lambda *arrays: chunked(*arrays, visible=Visible(), dropout=None), query, key, value)
    return output, vjp(d_output)

text = jax.jit(gradients).lower(x, x, x, x).compile().as_text()
lines = re.findall(r"^ +(?:ROOT )?%(\\S+) = (.*)$", text[text.index("ENTRY") :], re.MULTILINE)
before, scores = {}, {}
for name, line in lines:
    found = [each for each in re.findall(r"%([\\w.-]+)", line) if each in before]
    before[name] = set(found).union(*(before[each] for each in found))
    scores |= {name: int(keys) for keys in re.findall(r"^[(]?f32.8,128,([0-9]+).", line)}
print(json.dumps(sorted(keys for name, keys in scores.items() if not before[name] & set(scores))))
"""


@pytest.mark.ci
def test_on_a_gpu_each_block_waits_for_the_one_before():
    """Of three blocks' products of scores, and gradients of these, only each pass's first waits for no other."""
    assert printed(COMPILE) == [128, 384]
