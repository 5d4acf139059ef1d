"""What a layer keeps, as estimates trace it without devices, against what the program itself keeps."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tiers import tiers

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.traced import Subject, trace_layer, traced_layer
from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import BertConfig, GPTConfig, LanguageModel, LlamaConfig, MixtureConfig, ModelConfig
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.storage import Storage
from jaxpipe.schedules import build
from jaxpipe.sharding import Shard

# No two of them are equal, nor twice another: a wrong name shows.
HIDDEN, WIDTH, SEQ_LEN, MICROBATCH_SIZE, NUM_MICROBATCHES, NUM_PREDICTED = 24, 56, 136, 3, 2, 5
SIZES: dict[str, Any] = {"num_layers": 1, "hidden": HIDDEN, "num_heads": 4, "vocab_size": 40, "feed_forward": WIDTH}
KEEPS = (("xla", "none"), ("xla", "attention"), ("xla", "full"), ("chunked", "none"), ("chunked", "full"))


def model_of(
    family: str, attention: str, recompute: str, *, dropout: float = 0.0, dispatch: str = "dropless"
) -> ModelConfig:
    choices: dict[str, Any] = {**SIZES, "attention": attention, "recompute": recompute}
    if family in ("llama", "qwen3"):
        return LlamaConfig(**choices, num_kv_heads=2, head_size=10, query_key_norm=family == "qwen3")
    if family == "mixtral":
        choices |= {"num_experts": 6, "balance_loss": 0.1, "dispatch": dispatch}
        return MixtureConfig(**choices, num_kv_heads=2, head_size=10)
    rates = dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), dropout)
    return {"gpt": GPTConfig, "bert": BertConfig}[family](**choices, **rates, num_positions=SEQ_LEN)


def setting(model: ModelConfig, schedule: str, dtype: str, tensor: int, expert: int = 1, context: int = 1) -> Setting:
    return Setting(
        model=model,
        dtype=dtype,
        seq_len=SEQ_LEN,
        batch_size=NUM_MICROBATCHES * MICROBATCH_SIZE * expert,
        num_predicted=NUM_PREDICTED if isinstance(model, BertConfig) else None,
        schedule_name=schedule,
        options="",
        num_microbatches=NUM_MICROBATCHES,
        layers_per_stage=(1,),
        data=1,
        pipe=1,
        tensor=tensor,
        order="contiguous",
        shard=Shard.OPTIMIZER,
        topology=parse_topology("a100-80g:1x8"),
        expert=expert,
        context=context,
    )


def storage(of: Setting) -> Storage:
    """What the program itself would keep."""
    model = LanguageModel(of.model, TensorAxis.of(tensor=of.tensor, expert=of.expert, context=of.context))
    pipeline = Pipeline(
        build(of.schedule_name, num_devices=1, num_microbatches=NUM_MICROBATCHES),
        make_mesh(data=1, pipe=1, expert=of.expert, tensor=of.tensor, context=of.context),
        StageFunctions.of(model),
        num_layers=1,
        dtype=of.dtype,
    )
    params = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))
    shapes = {"tokens": (SEQ_LEN,), "targets": (SEQ_LEN,)}
    if isinstance(of.model, BertConfig):
        words = dict.fromkeys(("predicted", "targets"), (NUM_PREDICTED,))
        shapes |= {**dict.fromkeys(("token_types", "padding_mask"), (SEQ_LEN,)), **words, "sentence_order": ()}
    batch = {
        name: jax.ShapeDtypeStruct((NUM_MICROBATCHES, MICROBATCH_SIZE * of.expert, *shape), np.int32)
        for name, shape in shapes.items()
    }
    return pipeline.shapes(params, batch, random=of.anatomy.has_dropout).storage


OF_EXPERTS = (
    ("dropless", 3, 2, "none"),
    ("capacity", 2, 1, "full"),
    ("dropless", 2, 1, "full"),
    ("capacity", 1, 2, "full"),
    ("capacity", 1, 1, "none"),
)


def _tier(i: int, k: int) -> list[pytest.MarkDecorator]:
    if (i + k) % len(KEEPS):
        return [pytest.mark.slow]
    return [pytest.mark.ci] if i % 4 else []


def cases():
    """Each family and each way to keep in a case of its own; all pairs of them with the slow ones."""
    families = [
        ("gpt", 0.0, "bfloat16", 1),
        ("gpt", 0.1, "float32", 2),
        ("bert", 0.1, "bfloat16", 2),
        ("llama", 0.0, "bfloat16", 2),
        ("llama", 0.0, "float32", 1),
        ("qwen3", 0.0, "bfloat16", 2),
        ("mixtral", 0.0, "bfloat16", 2),
    ]
    for i, family in enumerate(families):
        for k, keeps in enumerate(KEEPS):
            yield pytest.param(*family, *keeps, marks=_tier(i, k))


@pytest.mark.parametrize(("family", "dropout", "dtype", "tensor", "attention", "recompute"), list(cases()))
def test_a_layer_keeps_what_its_vjp_keeps(family, dropout, dtype, tensor, attention, recompute):
    check_storage(setting(model_of(family, attention, recompute, dropout=dropout), "zb_h1", dtype, tensor))


@pytest.mark.parametrize(
    "case", tiers([], ci=[("mixtral", 1, 2)], slow=[("mixtral", 2, 1), ("bert", 2, 1), ("llama", 1, 1)]), ids=str
)
def test_a_layer_of_split_sequences_keeps_what_its_vjp_keeps(case):
    family, tensor, expert = case
    check_storage(setting(model_of(family, "chunked", "none"), "zb_h1", "bfloat16", tensor, expert, context=2))


@pytest.mark.parametrize(
    ("dispatch", "expert", "tensor", "recompute"),
    [
        ("capacity", 3, 2, "none"),
        *(
            pytest.param(*case, marks=pytest.mark.slow if i % 2 else pytest.mark.ci)
            for i, case in enumerate(OF_EXPERTS)
        ),
    ],
)
def test_a_layer_of_experts_keeps_what_its_vjp_keeps(dispatch, expert, tensor, recompute):
    model = model_of("mixtral", "chunked", recompute, dispatch=dispatch)
    check_storage(setting(model, "zb_h1", "bfloat16", tensor, expert))


def sizes(arrays: Any) -> list[tuple[int, str]]:
    return [(array.size, array.dtype.name) for array in arrays]


def check_storage(of: Setting) -> None:
    found, layer = storage(of), traced_layer(of)
    assert sizes(layer.saved.residuals) == sizes(found.saved.residuals)
    assert sizes(layer.saved.deferred) == sizes(found.saved.deferred)
    assert layer.saved.shared_with_w == found.saved.shared_with_w
    assert layer.page_bytes == found.pools[0].page_bytes
    assert layer.apart_bytes == sum(pool.page_bytes for pool in found.pools[1:])


@pytest.mark.parametrize("microbatch_size", tiers([7], ci=[64], slow=[1]))
@pytest.mark.parametrize(
    ("dispatch", "dtype", "tensor", "expert"),
    [
        ("dropless", "bfloat16", 1, 2),
        ("dropless", "float32", 2, 1),
        ("capacity", "bfloat16", 2, 2),
        (None, "bfloat16", 2, 1),
    ],
)
def test_one_trace_tells_all_microbatch_sizes(dispatch, dtype, tensor, expert, microbatch_size):
    """Of a dense layer as of experts, whose tiles grow in steps: as if it were traced at each size."""
    model = model_of("mixtral", "chunked", "none", dispatch=dispatch) if dispatch else model_of("llama", "xla", "full")
    of = setting(model, "zb_h1", dtype, tensor, expert)
    of = replace(of, batch_size=microbatch_size * expert * NUM_MICROBATCHES)
    told, subject = traced_layer(of), Subject.of(of, model)
    traced = trace_layer(subject, microbatch_size)
    assert sizes(told.saved.residuals) == sizes(traced.saved.residuals)
    assert sizes(told.saved.deferred) == sizes(traced.saved.deferred)
    for part in ("forward", "input_gradient", "weight_gradient"):
        assert getattr(told, part) == getattr(traced, part)


def test_bytes_of_a_layer_of_gpt3():
    """Korthikanti et al., MLSys 2023, equation 4, without what is computed again here: 34 s b h / t is theirs.

    Theirs less the two norms' outputs (4), masks of dropout (2), what follows the activation (8): 20 s b h / t.
    """
    model = GPTConfig(num_layers=96, hidden=12288, num_heads=96, vocab_size=51200, num_positions=2048)
    large = setting(model, "1f1b", "bfloat16", 8)
    sbh_of_a_device = MICROBATCH_SIZE * SEQ_LEN * 12288 // 8
    of_scores = 2 * MICROBATCH_SIZE * 96 * SEQ_LEN**2 // 8
    assert traced_layer(large).page_bytes == 20 * sbh_of_a_device + of_scores


@pytest.mark.parametrize(("attention", "num_more"), [("chunked", 0), ("cudnn", 1)])
def test_norms_of_queries_and_keys_keep_what_they_read(attention, num_more):
    """What cuDNN reads is kept itself, so that queries and keys are there before and after norm and rotation."""
    plain, normed = (
        traced_layer(setting(model_of(family, attention, "none"), "1f1b", "bfloat16", 1)).page_bytes
        for family in ("llama", "qwen3")
    )
    queries_and_keys = MICROBATCH_SIZE * SEQ_LEN * (4 + 2) * 10  # heads of 10
    assert normed - plain == num_more * 2 * queries_and_keys
