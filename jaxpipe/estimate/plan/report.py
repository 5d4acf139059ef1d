"""A plan as text and as JSON: the rows, why the first is the best, and the baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxpipe.cluster.axes import AXES, ROWS
from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.estimate import Bytes, Setting
from jaxpipe.estimate.parameters import num_kept_of, num_kept_sums_of
from jaxpipe.estimate.plan.breakdown import Baseline, Breakdown, best_against_second
from jaxpipe.estimate.plan.describe import describe_layers, describe_schedule, describe_setting, describe_shard
from jaxpipe.estimate.plan.exposure import Remedy
from jaxpipe.estimate.plan.rows import Plan, Row, largest_kind
from jaxpipe.sharding import Shard
from jaxpipe.units import gib

# Steps of two training runs are predicted within 3 % (docs/measured.md, "On a GPU"), so rows that differ by less may be
# in another order on the machine.
TIME_ERROR = 0.03
_HEADINGS = (
    "",
    "GPUs",
    "schedule",
    *AXES,
    "microbatches",
    "recompute",
    "order",
    "shard",
    "step s",
    "sequences/s",
    "MFU",
    "bubble",
    "GiB",
    "largest",
    "bound by",
    "largest overhead",
)


_EQUAL = "≈"  # in place of a table's rank: the prediction cannot tell the row from the first


# ---- Text ----


def to_text(
    plan: Plan, parts: Sequence[Breakdown], baselines: Sequence[Baseline], remedies: Sequence[Remedy] = ()
) -> str:
    """The plan as lines to print.

    Args:
        plan: the plan to print.
        parts: [row] breakdown of its step.
        baselines: to compare the best row with.
        remedies: of what is exposed of the best row.
    """
    lines = _searched(plan)
    if not plan.rows:
        return "\n".join(lines)
    lines += ["", *_table(plan, parts), ""]
    if any(_is_equal(plan, row) for row in plan.rows[1:]):
        lines.append(
            f"{_EQUAL}            within {TIME_ERROR:.0%} of row 1, the error of a predicted step: choose among these"
            " by memory, or time them; --write_config=FILE:2 writes row 2"
        )
    if len(parts) > 1:
        lines.append(f"best         {best_against_second(parts[0], parts[1])}")
    lines += [f"baseline     {baseline.sentence}" for baseline in baselines]
    lines += [_without_pipeline(plan), *_gathers_and_sums(plan.rows[0], parts[0])]
    lines += [f"exposed      {remedy.sentence}" for remedy in remedies]
    lines.append(f"layers       per stage of row 1: {describe_layers(plan.rows[0].setting.layers_per_stage)}")
    return "\n".join(lines)


def _searched(plan: Plan) -> list[str]:
    space = plan.space
    topology = space.topology
    others = ": the others are slower than every row" + (", or not measured" if plan.not_measured else "")
    lines = [
        f"searched     {space.num_candidates} ways to train on {topology}; {plan.num_evaluated} were evaluated"
        + (others if plan.num_evaluated < space.num_candidates else "")
    ]
    if space.num_gpus < topology.num_gpus:
        lines.append(f"GPUs         {space.num_gpus} of {topology.num_gpus}: no mesh of more divides model and batch")
    if plan.num_of_fewer:
        lines.append(f"fewer GPUs   {plan.num_of_fewer} ways were evaluated; those faster than all on more are rows")
    if plan.rows and plan.step_s < plan.of_all_s:
        longer = f"{plan.of_all_s:.3f} s" if plan.of_all_s < math.inf else "more memory than there is"
        lines.append(
            f"GPUs         row 1 takes {_gpus(plan.rows[0].setting)} of {topology.num_nodes}x{topology.gpus_per_node},"
            f" the others are idle: the fastest way on {space.num_gpus} takes {longer}"
        )
    if plan.tight is not None and plan.tight.step_s < plan.step_s:
        setting = plan.tight.setting
        held = plan.tight.held
        lines.append(
            f"tight        {plan.num_tight} are without a margin of {plan.margin:.0%} for the error of predicted bytes;"
            f" the fastest takes {plan.tight.step_s:.3f} s and {_gib(held.total)} GiB: {describe_setting(setting)};"
            " --memory_margin=0 ranks them, jaxpipe.compile counts their bytes"
        )
    if plan.too_large:
        told = ", ".join(f"{number} mostly by their {kind}" for kind, number in plan.too_large.most_common())
        lines.append(f"too large    {told}")
    if plan.not_measured:
        lines.append(f"not measured {plan.not_measured}, which the file of --costs does not cover")
    if space.illegal:
        lines.append("not legal    " + ", ".join(f"{number} {reason}" for reason, number in space.illegal.items()))
    if plan.exposed_fraction is not None:
        lines.append(f"collectives  {plan.exposed_fraction:.0%} of their time is assumed not to overlap with compute")
    return lines


def _without_pipeline(plan: Plan) -> str:
    """Whether a pipeline is needed, in a line."""
    best = plan.rows[0]
    if best.setting.pipe == 1:
        others = (rank for rank, row in enumerate(plan.rows, 1) if row.setting.pipe > 1)
        rank = next(others, None)
        longer = "none of these rows has one" if rank is None else f"row {rank} has the fastest one"
        return f"pipeline     row 1 needs none: {longer}"
    if plan.alone is None:
        return "no pipeline  no mesh with pipe 1 divides model and batch, or its times are not measured"
    if plan.alone.rows:
        (row,) = plan.alone.rows
        longer_s = row.step_s - best.step_s
        told = f"{longer_s:.3f} s ({longer_s / best.step_s:.1%}) longer, {_gib(row.held.total)} GiB"
        return f"no pipeline  {told}: {describe_setting(row.setting)}"
    tight = plan.alone.tight
    nearest = (tight.setting, tight.held) if tight else plan.alone.nearest
    assert nearest is not None  # else one fits, or the search has raised an error
    return f"no pipeline  none fits; the nearest takes {_gib(nearest[1].total)} GiB: {describe_setting(nearest[0])}"


def _gathers_and_sums(row: Row, parts: Breakdown) -> list[str]:
    """How long row 1 gathers compute copies and sums gradients over devices, in a line; none on one device."""
    seconds = row.estimate.over_data_s
    if not seconds:
        return []
    share = parts.reduction_s / row.step_s
    return [
        f"gather, sum  {seconds:.3f} s on a device in row 1, of which {parts.reduction_s:.3f} s, {share:.1%} of its"
        " step, are exposed"
    ]


def _table(plan: Plan, parts: Sequence[Breakdown]) -> list[str]:
    rows = [
        _cells(f"{rank} {_EQUAL}" if rank > 1 and _is_equal(plan, row) else str(rank), row, part)
        for rank, (row, part) in enumerate(zip(plan.rows, parts, strict=True), 1)
    ]
    settings = [row.setting for row in plan.rows]
    unused = {
        **{row.name: all(setting.axes[row.name] == 1 for setting in settings) for row in ROWS if row.for_some_models},
        "GPUs": all(_takes_all(plan, setting) for setting in settings),
        "shard": all(setting.shard is Shard.OPTIMIZER for setting in settings),
    }
    columns = [column for column in zip(_HEADINGS, *rows, strict=True) if not unused.get(column[0], False)]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def _is_equal(plan: Plan, row: Row) -> bool:
    """Whether the prediction cannot tell a row from the first."""
    return row.step_s <= plan.step_s * (1 + TIME_ERROR)


def _takes_all(plan: Plan, setting: Setting) -> bool:
    return (setting.topology, setting.num_gpus) == (plan.space.topology, plan.space.num_gpus)


def _gpus(setting: Setting) -> str:
    """The GPUs of a mesh as nodes x GPUs of a node, and how many of them if the last node is not used whole."""
    topology = setting.topology
    nodes = f"{topology.num_nodes}x{topology.gpus_per_node}"
    return nodes if setting.num_gpus == topology.num_gpus else f"{setting.num_gpus} of {nodes}"


def _cells(rank: str, row: Row, parts: Breakdown) -> tuple[str, ...]:
    setting = row.setting
    estimate = row.estimate
    overhead_s = getattr(parts, f"{parts.largest_overhead}_s")
    return (
        rank,
        _gpus(setting),
        ", ".join(map(describe_schedule, (setting, *row.equal))),
        *map(str, setting.axes.values()),
        f"{setting.num_microbatches} of {setting.microbatch_size}",
        setting.recompute,
        setting.order,
        describe_shard(setting),
        f"{estimate.step_s:.3f}",
        f"{estimate.samples_per_s:.2f}",
        f"{estimate.mfu:.1%}",
        f"{estimate.bubble_ratio:.3f}",
        f"{_gib(row.held.total)} of {_gib(setting.topology.hardware.memory_bytes)}",
        largest_kind(row.held),
        parts.bound_by,
        f"{parts.largest_overhead} {overhead_s / estimate.step_s:.1%}",
    )


def _gib(num_bytes: int) -> str:
    return gib(num_bytes, ".1f")


# ---- JSON ----


def to_json(
    plan: Plan, parts: Sequence[Breakdown], baselines: Sequence[Baseline], remedies: Sequence[Remedy] = ()
) -> dict[str, Any]:
    """The plan as a dictionary, with units in the names; `rows` the fastest first.

    Args:
        plan: the plan to convert.
        parts: [row] breakdown of its step.
        baselines: to compare the best row with.
        remedies: of what is exposed of the best row.
    """
    topology = plan.space.topology
    tight = plan.tight
    alone = plan.alone.rows[0] if plan.alone and plan.alone.rows else None
    return {
        "topology": str(topology),
        "num_gpus": plan.rows[0].setting.num_gpus if plan.rows else plan.space.num_gpus,
        "hardware_bytes": topology.hardware.memory_bytes,
        "reserve_bytes": RESERVE_BYTES,
        "num_candidates": plan.space.num_candidates,
        "num_evaluated": plan.num_evaluated,
        "num_evaluated_on_fewer": plan.num_of_fewer,
        "step_s_on_all": plan.of_all_s if plan.of_all_s < math.inf else None,
        "memory_margin_fraction": plan.margin,
        "time_error_fraction": TIME_ERROR,
        "num_tight": plan.num_tight,
        "tight": tight and {**_setting(tight.setting), "step_s": tight.step_s, **_bytes(tight.held)},
        "num_not_measured": plan.not_measured,
        "num_too_large": dict(plan.too_large),
        "num_illegal": dict(plan.space.illegal),
        "exposed_fraction": plan.exposed_fraction,
        "rows": [
            {**_row(row, part), "is_within_error": _is_equal(plan, row)}
            for row, part in zip(plan.rows, parts, strict=True)
        ],
        "baselines": [
            {
                "name": baseline.name,
                "fits": baseline.slower_s is not None,
                "over_bytes": baseline.over_bytes,
                "largest_kind": baseline.largest,
                "slower_s": baseline.slower_s,
            }
            for baseline in baselines
        ],
        "without_pipeline": alone and {**_setting(alone.setting), "step_s": alone.step_s, **_bytes(alone.held)},
        "remedies": [
            {
                "change": remedy.change,
                **_setting(remedy.estimate.setting),
                "step_s": remedy.estimate.step_s,
                "exposed_fraction": remedy.exposed_fraction,
            }
            for remedy in remedies
        ],
        # Of a plan with rows nobody asks, and its bytes would have to be counted.
        "nearest": None if plan.rows or not plan.nearest else {**_setting(plan.nearest[0]), **_bytes(plan.nearest[1])},
    }


def _row(row: Row, parts: Breakdown) -> dict[str, Any]:
    estimate = row.estimate
    return {
        **_setting(row.setting),
        "equal": [{"schedule": same.schedule_name, "options": same.options} for same in row.equal],
        "step_s": estimate.step_s,
        "samples_per_s": estimate.samples_per_s,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu_fraction": estimate.mfu,
        "bubble_ratio": estimate.bubble_ratio,
        "over_data_s": estimate.over_data_s,
        "exposed_s": parts.reduction_s,
        "parts_s": {name.removesuffix("_s"): seconds for name, seconds in vars(parts).items()},
        "bound_by": parts.bound_by,
        "largest_overhead": parts.largest_overhead,
        **_bytes(row.held),
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "schedule": setting.schedule_name,
        "options": setting.options,
        "num_microbatches": setting.num_microbatches,
        "microbatch_size": setting.microbatch_size,
        "layers_per_stage": list(setting.layers_per_stage),
        "topology": str(setting.topology),
        "num_gpus": setting.num_gpus,
        **setting.axes,
        "order": setting.order,
        "shard": setting.shard.value,
        "kept_gathered": num_kept_of(setting),
        "kept_sums": num_kept_sums_of(setting),
        "recompute": setting.recompute,
        "vocab_over_pipe": setting.vocab_over_pipe,
    }


def _bytes(held: Bytes) -> dict[str, Any]:
    return {"total_bytes": held.total, "bytes": dict(vars(held)), "largest_kind": largest_kind(held)}
