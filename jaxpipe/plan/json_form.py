"""A plan as JSON, with units in the names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpipe.estimate import Bytes, Setting
from jaxpipe.mesh.hardware import RESERVE_BYTES
from jaxpipe.plan.reasons import Plain
from jaxpipe.plan.search import Plan, Row, largest_kind
from jaxpipe.plan.shares import Shares


def to_json(plan: Plan, shares: Sequence[Shares], plains: Sequence[Plain]) -> dict[str, Any]:
    """Numbers by their names; `rows` the fastest first.

    Args:
        plan: what was found.
        shares: [row].
        plains: what one would try first, beside the best row.
    """
    topology = plan.space.groups[0].topology
    return {
        "topology": str(topology),
        "num_gpus": plan.space.num_gpus,
        "hardware_bytes": topology.hardware.memory_bytes,
        "reserve_bytes": RESERVE_BYTES,
        "num_candidates": plan.space.num_candidates,
        "num_looked_at": plan.num_looked_at,
        "num_not_measured": plan.not_measured,
        "num_too_large": dict(plan.too_large),
        "num_illegal": dict(plan.space.illegal),
        "rows": [_row(row, parts) for row, parts in zip(plan.rows, shares, strict=True)],
        "plain": [
            {
                "words": plain.words,
                "fits": plain.slower_s is not None,
                "over_bytes": plain.over_bytes,
                "largest_kind": plain.largest,
                "slower_s": plain.slower_s,
            }
            for plain in plains
        ],
        "nearest": plan.nearest and {**_setting(plan.nearest[0]), **_bytes(plan.nearest[1])},
    }


def _row(row: Row, parts: Shares) -> dict[str, Any]:
    estimate = row.estimate
    return {
        **_setting(row.setting),
        "step_s": estimate.step_s,
        "samples_per_s": estimate.samples_per_s,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu_fraction": estimate.mfu,
        "bubble_ratio": estimate.bubble_ratio,
        "parts_s": {name.removesuffix("_s"): seconds for name, seconds in vars(parts).items()},
        "bound_by": parts.bound_by,
        "lost_to": parts.lost_to,
        **_bytes(row.held),
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "schedule": setting.schedule_name,
        "options": setting.options,
        "num_microbatches": setting.num_microbatches,
        "microbatch_size": setting.microbatch_size,
        "layers_per_stage": list(setting.layers_per_stage),
        "data": setting.data,
        "pipe": setting.pipe,
        "tensor": setting.tensor,
        "order": setting.order,
        "recompute": setting.model.recompute,
    }


def _bytes(held: Bytes) -> dict[str, Any]:
    return {"total_bytes": held.total, "bytes": dict(vars(held)), "largest_kind": largest_kind(held)}
