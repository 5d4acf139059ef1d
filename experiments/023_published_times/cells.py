"""The published cells as settings: two tables of step times on A100s, and what is predicted for each.

Goes in: published.json. Comes out: cells with published and predicted numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from their_step import A100, TheirStep

from jaxpipe.cluster import ORDERS, Topology
from jaxpipe.estimate import Estimate, Setting, Shard, costs_of, estimate
from jaxpipe.models import GPTConfig

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text())
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")  # named ZB-1p and ZB-2p there
GPUS_PER_NODE = 8
NUM_MICROBATCHES = 128  # of the second table
WORDS = 32_000  # of the first table: not published; with tied tables it gives all four names


@dataclass(frozen=True)
class Cell:
    """One published number.

    Attributes:
        name: what was run.
        schedule: with which schedule.
        published, predicted: samples a GPU and second, or MFU in %.
    """

    name: str
    schedule: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted / published."""
        return self.predicted / self.published


def zero_bubble(step: TheirStep) -> list[list[Cell]]:
    """Samples a GPU and second, a row for each model and number of microbatches."""
    rows = []
    for model, num_microbatches, *published in PUBLISHED["zero_bubble"]["rows"]:
        rows.append(
            [
                Cell(
                    f"{model}, N={num_microbatches}",
                    schedule,
                    number,
                    _run(of_zero_bubble(model, num_microbatches, schedule), step).samples_per_s / _pipe(model),
                )
                for schedule, number in zip(SCHEDULES, published, strict=False)
            ]
        )
    return rows


def stage_times(step: TheirStep) -> Iterator[tuple[str, list[float], list[float]]]:
    """For each row of the first table: its name, published milliseconds of F, I, W, and predicted ones.

    Means over the stages, of which the last has the head and first and last have a layer less.
    """
    for model, num_microbatches, *published in PUBLISHED["zero_bubble"]["rows"]:
        setting = of_zero_bubble(model, num_microbatches, "1f1b")
        times = step.times(setting)
        parts = (times.layer_forward_s, times.layer_input_gradient_s, times.layer_weight_gradient_s)
        means = [1e3 * (setting.model.num_layers * part + times.head_s / 3) / setting.pipe for part in parts]
        yield f"{model}, N={num_microbatches}", published[4:7], means


def profile(step: TheirStep) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """For each row of the profile: its name; published and predicted ms of its actions.

    F and B with the head on the last stage, F and B with a split head, B of the first device with the head on the last
    stage, S and T with the embedding, a message.
    """
    schedule, *sizes = next(row for row in PUBLISHED["vocabulary"]["rows"] if row[:2] == ["1f1b", 8])[:6]
    for seq_len, words, *numbers in PUBLISHED["profile"]["rows"]:
        sizes[1] = seq_len
        setting = of_vocabulary(schedule, *sizes, words, is_moved=False)
        base, split = step.times(setting), step.times(replace(setting, vocab_over_pipe=True))
        assert split.statistics_s is not None
        assert split.gradients_s is not None
        layers = setting.layers_per_stage[0]
        message_s = step.link(in_node=True).seconds(2 * seq_len * setting.anatomy.hidden)
        predicted = [
            layers * base.layer_forward_s,
            layers * base.layer_backward_s,
            layers * split.layer_forward_s,
            layers * split.layer_backward_s,
            layers * base.layer_backward_s + base.embed_backward_s,
            split.statistics_s + split.gradients_s,
            message_s,
        ]
        *before, head, embed, embed_back, message = numbers[3:]
        published = [*before, head + embed + embed_back, message]
        yield f"{seq_len} tokens, {words} words", list(zip(published, [1e3 * each for each in predicted], strict=True))


Ways = tuple[list[Cell], list[Cell], list[Cell]]


def vocabulary(step: TheirStep) -> list[Ways]:
    """MFU, a row for each model with a cell for each vocabulary.

    With the head on the last stage, with layers moved away from it, and with the head split over all devices.
    """
    rows = []
    for schedule, *sizes, base, moved, split in PUBLISHED["vocabulary"]["rows"]:
        pipe, seq_len, num_layers, _, hidden = sizes
        name = f"{pipe} GPUs, {num_layers} x {hidden}, {seq_len} tokens"
        found: list[list[Cell]] = []
        for published, is_moved in ((base, False), (moved, True), (split, False)):
            found.append([])
            for words, number in zip(PUBLISHED["vocabulary"]["vocab_sizes"], published, strict=False):
                setting = of_vocabulary(schedule, *sizes, words, is_moved=is_moved)
                setting = replace(setting, vocab_over_pipe=published is split)
                found[-1].append(Cell(f"{name}, {words} words", schedule, number, _mfu(_run(setting, step), step)))
        rows.append((found[0], found[1], found[2]))
    return rows


def _run(setting: Setting, step: TheirStep) -> Estimate:
    decided = replace(setting, costs=costs_of(step.times(setting)))
    return estimate(decided, step, step.program(setting.schedule_name))


def _pipe(model: str) -> int:
    return PUBLISHED["zero_bubble"]["models"][model]["pipe"]


def of_zero_bubble(model: str, num_microbatches: int, schedule: str) -> Setting:
    """Attention keeps its scores, dropout 0.1: Megatron-LM's defaults, which the authors' script leaves as they are."""
    sizes = PUBLISHED["zero_bubble"]["models"][model]
    pipe, of_device = sizes["pipe"], (sizes["num_layers"] + 2) // sizes["pipe"]
    num_chunks = of_device if schedule == "interleaved_1f1b" else 1  # one layer a chunk
    layers = [of_device // num_chunks] * pipe * num_chunks
    layers[0] -= 1
    layers[-1] -= 1
    return _setting(
        GPTConfig(
            num_layers=sizes["num_layers"],
            hidden=sizes["hidden"],
            num_heads=sizes["num_heads"],
            vocab_size=WORDS,
            num_positions=sizes["seq_len"],
            attention="xla",
            recompute="none",
            embedding_dropout=0.1,
            attention_dropout=0.1,
            hidden_dropout=0.1,
        ),
        schedule,
        f"num_chunks={num_chunks}" if num_chunks > 1 else "",
        layers,
        pipe=pipe,
        microbatch_size=sizes["microbatch_size"],
        num_microbatches=num_microbatches,
    )


def of_vocabulary(
    schedule: str, pipe: int, seq_len: int, num_layers: int, num_heads: int, hidden: int, words: int, *, is_moved: bool
) -> Setting:
    """Attention in one kernel, no dropout, microbatches of one sequence."""
    num_stages = 2 * pipe if schedule == "v_half" else pipe
    layers = [num_layers // num_stages] * num_stages
    model = GPTConfig(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        vocab_size=words,
        num_positions=seq_len,
        attention="cudnn",
        recompute="none",
        tie_embeddings=False,
        embedding_dropout=0.0,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    if is_moved:
        known = PUBLISHED["profile"]["redis_layers_of_last_stage"].get(str(pipe))
        last = known and known[PUBLISHED["vocabulary"]["vocab_sizes"].index(words)]
        layers = moved_from_head(num_layers, pipe, hidden, seq_len, words, last=last)
    return _setting(model, schedule, "", layers, pipe=pipe, microbatch_size=1, num_microbatches=NUM_MICROBATCHES)


def moved_from_head(
    num_layers: int, pipe: int, hidden: int, seq_len: int, words: int, *, last: int | None = None
) -> list[int]:
    """Layers of the stages whose largest has the fewest FLOPs, as few of them moved from the last stage as that takes.

    Args:
        num_layers, pipe, hidden, seq_len, words: sizes.
        last: layers of the last stage, if they are known.

    Example:
        >>> moved_from_head(32, 8, hidden=3072, seq_len=2048, words=128000)
        [4, 4, 4, 4, 5, 5, 5, 1]
        >>> moved_from_head(32, 8, hidden=3072, seq_len=2048, words=128000, last=2)
        [4, 4, 4, 4, 4, 5, 5, 2]
    """
    layer, head = 24 * hidden**2 + 4 * seq_len * hidden, 2 * hidden * words
    found: list[tuple[int, list[int]]] = []
    for of_last in range(num_layers // pipe, -1, -1) if last is None else (last,):
        each, more = divmod(num_layers - of_last, pipe - 1)
        layers = [each + (stage >= pipe - 1 - more) for stage in range(pipe - 1)]  # as their profile has them
        found.append((max(layers[-1] * layer, of_last * layer + head), [*layers, of_last]))
    return min(found, key=lambda one: one[0])[1]


def _setting(
    model: GPTConfig,
    schedule: str,
    options: str,
    layers: list[int],
    *,
    pipe: int,
    microbatch_size: int,
    num_microbatches: int,
) -> Setting:
    return Setting(
        model=model,
        dtype="bfloat16",
        seq_len=model.num_positions,
        batch_size=microbatch_size * num_microbatches,
        num_predicted=None,
        schedule_name=schedule,
        options=options,
        num_microbatches=num_microbatches,
        layers_per_stage=tuple(layers),
        data=1,
        pipe=pipe,
        tensor=1,
        order=next(iter(ORDERS)),
        shard=Shard.NONE,
        topology=Topology(A100, -(-pipe // GPUS_PER_NODE), GPUS_PER_NODE),
    )


def _mfu(found: Estimate, step: TheirStep) -> float:
    """In %, by the count of FLOPs that the paper uses: Narayanan et al., SC 2021, equation 3, without recomputation."""
    of, hidden = found.setting, found.setting.anatomy.hidden
    layers = 72 * of.model.num_layers * hidden**2 * (1 + of.seq_len / (6 * hidden))
    per_token = layers + 6 * hidden * of.anatomy.vocab_size
    return (
        100 * per_token * of.batch_size * of.seq_len / (found.step_s * found.setting.num_gpus * step.peak_flops_per_s)
    )
