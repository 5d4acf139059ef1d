"""Embedding and head split by rows over `pipe`: loss and every gradient are those of plain `jax.grad`.

The bound is that of `test_gradients`: 1e-5 of each parameter's norm in each layer. The companions show that a device's
largest logit left out, and a row counted twice, would be seen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import pytest
from tiers import tiers
from tiny_models import config_of, random_batch, random_params, relative_errors
from tiny_training import mean_loss_and_grads

from jaxpipe.errors import CompileError
from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel, ends_over_pipe, vocabulary_over_pipe
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.training.step import name_losses

LARGEST_ERROR = 1e-5


class Case(NamedTuple):
    schedule: str
    family: str
    pipe: int
    num_microbatches: int
    num_layers: int
    data: int = 1
    tensor: int = 1
    tied: bool = False
    dropout: float = 0.0
    vocab_multiple: int | None = None
    shard: str = "optimizer"
    deterministic: bool = False
    expert: int = 1
    blocking: bool = False
    context: int = 1

    def __str__(self) -> str:
        return "-".join(map(str, self))


ONE = Case("1f1b", "llama", 2, 3, 2)
BERT = Case("1f1b", "bert", 2, 3, 2, tied=True)  # 27 words in 32 rows
CASES = tiers(
    [],
    ci=[ONE],
    slow=[
        Case("interleaved_1f1b", "llama", 2, 4, 4, data=2, shard="weights"),
        Case("zb_h1", "gpt", 4, 3, 4, tied=True),
        Case("1f1b", "gpt", 2, 3, 2, tied=True, dropout=0.3, context=2),
        Case("zb_h1", "bert", 2, 3, 2, tensor=2, tied=True, dropout=0.3, context=2),
        Case("1f1b", "gpt", 4, 6, 4, tied=True, dropout=0.3),
        Case("bitpipe", "gpt", 2, 5, 4, tied=True),
        Case("zb_h1", "bert", 3, 2, 3, tied=True, dropout=0.3, vocab_multiple=12),
        Case("1f1b", "gpt", 2, 4, 2, data=2, tensor=2, tied=True, dropout=0.3),
        Case("interleaved_1f1b", "llama", 2, 5, 4, tied=True, blocking=True),
        Case("gpipe", "llama", 4, 3, 4),
        Case("1f1b", "gpt", 3, 2, 3, vocab_multiple=36),
        Case("1f1b", "llama", 4, 9, 4, data=2, tied=True, shard="gradients"),
        Case("zb_h1", "llama", 2, 4, 4, data=2, tensor=2, shard="weights"),
        Case("gpipe", "gpt", 2, 5, 4, data=2, tied=True, dropout=0.3, shard="none"),
        Case("interleaved_1f1b", "gpt", 4, 8, 8, tied=True, deterministic=True),
        Case("v_half", "qwen3", 4, 6, 8, tied=True),
        Case("zb_v", "qwen3", 2, 4, 4, tensor=2),
        Case("breadth_first", "llama", 2, 4, 4),
        Case("dualpipe_v", "gpt", 2, 4, 4, tied=True),
        Case("dualpipe_v", "gpt", 3, 7, 6, vocab_multiple=36, blocking=True),
        Case("hanayo", "llama", 4, 4, 8, vocab_multiple=64),
        Case("1f1b", "mixtral", 2, 4, 2, data=2, shard="weights"),
        Case("zb_h2", "qwen3_moe", 4, 8, 4),
        Case("1f1b", "mixtral", 2, 3, 2, expert=2),
        Case("1f1b", "gpt", 8, 5, 8, tied=True),
        Case("1f1b", "llama", 8, 16, 8, vocab_multiple=48),  # two devices have no tokens at all
        BERT,
        Case("zb_h1", "bert", 3, 2, 3, dropout=0.3, vocab_multiple=12),
        Case("1f1b", "bert", 8, 9, 8, tied=True),  # one has none
        Case("1f1b", "bert", 4, 3, 4, data=2),
        Case("gpipe", "bert", 3, 5, 3, tied=True, vocab_multiple=36),
        Case("gpipe", "bert", 2, 4, 2, data=2, tensor=2, dropout=0.3, deterministic=True),
        Case("interleaved_1f1b", "bert", 2, 5, 4, tensor=2, tied=True, blocking=True),
        Case("breadth_first", "bert", 2, 4, 4, data=2, tied=True, shard="none"),
        Case("hanayo", "bert", 4, 4, 8, tied=True, dropout=0.3),
        Case("zb_h1", "bert", 2, 4, 2, data=2, tensor=2, tied=True, shard="gradients"),
        Case("zb_h2", "bert", 4, 8, 4, data=2, shard="weights"),
        Case("zb_v", "bert", 3, 7, 6, tensor=2, vocab_multiple=6),
        Case("v_half", "bert", 4, 2, 8, tied=True, dropout=0.3),
        Case("v_min", "bert", 2, 4, 4, data=2, shard="weights"),
        Case("dualpipe_v", "bert", 4, 8, 8, tensor=2, tied=True),
        Case("interleaved_1f1b", "bert", 8, 8, 16),
        Case("chimera", "bert", 4, 6, 4, data=2, shard="weights"),
        Case("chimera", "llama", 8, 8, 8, tied=True),
        Case("gems", "gpt", 2, 3, 2, data=2, tensor=2, tied=True, dropout=0.3, shard="gradients"),
        Case("mixpipe", "llama", 4, 12, 4, tensor=2),
        Case("bitpipe", "bert", 4, 3, 8, tied=True, dropout=0.3),
        Case("bitpipe", "gpt", 4, 8, 8, blocking=True),
        Case("dualpipe", "gpt", 4, 9, 4, data=2, tied=True, deterministic=True),
        Case("dualpipe", "bert", 2, 4, 2, shard="none"),
    ],
)


def config_of_case(case: Case) -> Any:
    choices: dict[str, Any] = {"tie_embeddings": case.tied}
    choices |= {"vocab_multiple": case.vocab_multiple} if case.vocab_multiple else {}
    choices |= {"num_experts": 4} if case.expert > 1 else {}
    choices |= {"attention": "chunked"} if case.context > 1 else {}
    return config_of(case.family, num_layers=case.num_layers, dropout=case.dropout, **choices)


def pipeline_of_case(case: Case) -> Pipeline:
    schedule = vocabulary(build(case.schedule, num_devices=case.pipe, num_microbatches=case.num_microbatches))
    model = LanguageModel(
        config_of_case(case),
        TensorAxis.of(
            deterministic=case.deterministic,
            num_pipe=case.pipe,
            data=case.data,
            expert=case.expert,
            tensor=case.tensor,
            context=case.context,
        ),
    )
    return Pipeline(
        schedule,
        make_mesh(data=case.data, expert=case.expert, pipe=case.pipe, tensor=case.tensor, context=case.context),
        StageFunctions.of(model),
        num_layers=case.num_layers,
        shard=case.shard,
        deterministic=case.deterministic,
        blocking=case.blocking,
    )


def errors_of(case: Case) -> dict[str, float]:
    """Relative errors of the gradients, and of the loss."""
    config, pipeline = config_of_case(case), pipeline_of_case(case)
    params, batch = random_params(config), random_batch(case.num_microbatches, seed=0, family=case.family)
    staged = jax.jit(pipeline.to_stages, out_shardings=pipeline.shardings(jax.eval_shape(pipeline.to_stages, params)))
    key = jax.random.key(3) if case.dropout else None
    factor = jax.tree.map(lambda number: 1 / number, LanguageModel(config).num_losses(batch))
    losses, grads = pipeline.loss_and_grads(staged(params), batch, factor, key)
    wanted_loss, wanted = mean_loss_and_grads(config, params, batch, key)
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted)
    loss = name_losses(losses)["loss"]
    errors["loss"] = abs(loss / float(wanted_loss) - 1)
    if key is None:
        alone = name_losses(pipeline.loss(staged(params), batch, factor))["loss"]
        errors["loss alone"] = abs(alone / float(wanted_loss) - 1)
    return errors


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_every_gradient_are_those_of_plain_grad(case):
    errors = errors_of(case)
    assert max(errors.values()) <= LARGEST_ERROR, errors


def without_the_largest_of_a_part(monkeypatch) -> None:
    whole = vocabulary_over_pipe._whole

    def lost(parts):
        return whole(parts._replace(largest=parts.largest.at[1].set(parts.largest[0])))

    monkeypatch.setattr(vocabulary_over_pipe, "_whole", lost)


def with_rows_twice(monkeypatch) -> None:
    monkeypatch.setattr(TensorAxis, "vocab_index", lambda self: 0)


def with_a_loss_of_its_own(monkeypatch) -> None:
    """As if no statistics were exchanged."""
    monkeypatch.setattr(
        vocabulary_over_pipe, "_whole", lambda parts: jax.tree.map(lambda leaf: leaf[jax.lax.axis_index("pipe")], parts)
    )


def with_the_order_on_every_device(monkeypatch) -> None:
    monkeypatch.setattr(ends_over_pipe, "only_on_the_first", lambda scale, axis: scale)


def without_the_gradient_of_bias(monkeypatch) -> None:
    add = vocabulary_over_pipe.with_gradients
    monkeypatch.setattr(
        vocabulary_over_pipe, "with_gradients", lambda sums, *given: add(sums, *given)._replace(bias=sums.bias)
    )


LOSS, TABLE, KERNEL, BIAS = "loss", "shared['embedding']['token']", "shared['head']['kernel']", "shared['head']['bias']"
TRANSFORM, ORDER = (f"shared['head']['{name}']['kernel']" for name in ("transform", "sentence_order"))


class Spoiled(NamedTuple):
    spoil: Callable[[pytest.MonkeyPatch], None]
    case: Case
    shown: tuple[str, ...]  # the errors that are large then

    def __str__(self) -> str:
        return f"{self.spoil.__name__}-{self.case.family}"


SPOILED = tiers(
    [],
    ci=[
        Spoiled(with_a_loss_of_its_own, ONE, (LOSS, KERNEL)),
    ],
    slow=[
        Spoiled(without_the_largest_of_a_part, ONE, (LOSS, KERNEL)),
        Spoiled(with_rows_twice, ONE, (LOSS, KERNEL)),
        Spoiled(with_the_order_on_every_device, BERT, (ORDER, TABLE)),
        Spoiled(without_the_largest_of_a_part, BERT, (LOSS, BIAS, TABLE, TRANSFORM)),
        Spoiled(with_rows_twice, BERT, (LOSS, BIAS, TABLE)),
        Spoiled(with_a_loss_of_its_own, BERT, (LOSS, BIAS, TABLE)),
        Spoiled(without_the_gradient_of_bias, BERT, (BIAS,)),
    ],
)


@pytest.mark.parametrize("spoiled", SPOILED, ids=str)
def test_the_bounds_would_show_what_is_lost(spoiled, monkeypatch):
    spoiled.spoil(monkeypatch)
    errors = errors_of(spoiled.case)
    assert all(errors[name] > 100 * LARGEST_ERROR for name in spoiled.shown), errors


def test_every_device_has_its_rows_of_table_and_kernel():
    pipeline = pipeline_of_case(ONE)
    params = pipeline.to_stages(random_params(config_of_case(ONE)))
    shardings = pipeline.shardings(params)["shared"]
    for owner, name in (("embedding", "token"), ("head", "kernel")):
        shape = params["shared"][owner][name].shape
        assert shardings[owner][name].shard_shape(shape) == (shape[0] // 2, shape[1])
    copies = pipeline.shapes(params, random_batch(3, seed=0), random=False).copies["shared"]
    assert copies["head"]["kernel"].shape == (16, 16)  # compute copies, and float32 sums of gradients like them


def test_head_and_schedule_go_together():
    case, mesh = ONE, make_mesh(pipe=2)
    plain = build("1f1b", num_devices=2, num_microbatches=3)
    split = StageFunctions.of(LanguageModel(config_of_case(case), TensorAxis(num_pipe=2)))
    whole = StageFunctions.of(LanguageModel(config_of_case(case)))
    for schedule, functions in ((plain, split), (vocabulary(plain), whole)):
        with pytest.raises(CompileError, match="split-head"):
            Pipeline(schedule, mesh, functions, num_layers=2)


def test_rows_that_do_not_divide_are_told_before_compilation():
    pipeline = pipeline_of_case(Case("1f1b", "gpt", 3, 2, 3))  # 32 rows
    params = random_params(config_of_case(Case("1f1b", "gpt", 3, 2, 3)))
    with pytest.raises(CompileError, match=r"tensor=1 x pipe=3"):
        pipeline.shapes(pipeline.to_stages(params), random_batch(2, seed=0))
