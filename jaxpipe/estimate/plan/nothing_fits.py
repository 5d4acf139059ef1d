"""The error of a plan without a row: what is large in the way to train that comes nearest, and what makes it fit.

Goes in: such a plan. Comes out: a ConfigError whose repairs were each tried on that way. Left to others: the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Bytes, Setting
from jaxpipe.estimate.memory import fits
from jaxpipe.estimate.plan.bounds import may_fit
from jaxpipe.estimate.plan.describe import describe_setting
from jaxpipe.estimate.plan.rows import Plan
from jaxpipe.estimate.plan.space import on_nodes
from jaxpipe.units import GIB, gib

# The kinds of `Bytes` by the names that users know.
_NAMES = {
    "masters and optimizer state": ("optimizer",),
    "compute copies and gradients": ("weights", "gradients"),
    "activations": ("slots", "weight_slots", "transit", "inboxes"),
    "logits": ("logits", "exponentials"),
    "workspace of a layer": ("workspace",),
    "tokens of the batch": ("batch",),
}
_MOST_NODES = 4096  # of a repair


def nothing_fits(plan: Plan) -> ConfigError:
    """The error that names the largest part of the bytes and the changes that make the nearest way to train fit."""
    topology = plan.space.topology
    margin = plan.margin
    rule = (
        f"plan-fits: the predicted bytes, {margin:.0%} more as a margin for their error, and a reserve of"
        f" {gib(RESERVE_BYTES, '.1f')} GiB fit into the {gib(topology.hardware.memory_bytes, '.1f')} GiB of a GPU"
    )
    if plan.tight is not None:
        return ConfigError(
            f"no way to train on {topology} leaves a margin of memory",
            rule=rule,
            picture=f"{describe_setting(plan.tight.setting)}\n{parts_of(plan.tight.held)}",
            repair=f"give --memory_margin=0 for the {plan.num_tight} that fit if the prediction is exact, and ask"
            " jaxpipe.compile whether it is; or give more GPUs",
        )
    assert plan.nearest is not None  # else a candidate fits, or the search has raised an error
    setting, held = plan.nearest
    largest = max(_NAMES, key=lambda name: _sum(held, name))
    repairs = [f"set {text}" for text, changed in _changes(setting, margin) if fits(changed, margin=margin)]
    if fits(setting, replace(held, optimizer=0, weights=0, gradients=0), margin=margin):
        repairs.append(_more_gpus(plan))  # all else is of one microbatch, and the same on any number of them
    return ConfigError(
        f"no way to train fits {topology}: the nearest takes {gib(held.total, '.1f')} GiB, mostly {largest},"
        f" {gib(_sum(held, largest), '.1f')} GiB",
        rule=rule,
        picture=f"{describe_setting(setting)}\n{parts_of(held)}",
        repair=", or ".join(repairs or ["set a smaller data.seq_len, or take a smaller model"]),
    )


def parts_of(held: Bytes) -> str:
    """The parts of `held` in GiB, the largest first, without those below a twentieth."""
    sizes = {name: _sum(held, name) for name in _NAMES}
    told = [f"{name} {gib(size, '.1f')}" for name, size in sorted(sizes.items(), key=lambda item: -item[1])]
    shown = [text for text, size in zip(told, sorted(sizes.values(), reverse=True), strict=True) if size >= GIB // 20]
    return f"{gib(held.total, '.1f')} GiB: {', '.join(shown)}"


def _sum(held: Bytes, name: str) -> int:
    return sum(getattr(held, kind) for kind in _NAMES[name])


def _changes(setting: Setting, margin: float) -> Iterator[tuple[str, Setting]]:
    """The fields that could be changed, as text, and `setting` with each."""
    if setting.dtype == "float32" and setting.topology.hardware.bf16_flops_per_s:
        yield "model.dtype='bfloat16'", replace(setting, dtype="bfloat16")
    if setting.model.attention == "xla" and setting.model.recompute != "attention":
        yield "model.attention='chunked'", replace(setting, model=replace(setting.model, attention="chunked"))
    if setting.optimizer == "adamw":
        yield "optimizer.name='lion', with one moment", replace(setting, optimizer="lion")
    if setting.keeps_average:
        yield "optimizer.average_decay=0.0, without an average", replace(setting, keeps_average=False)
    shorter = _of_length(setting, setting.seq_len // 2)
    while shorter.seq_len % setting.num_token_parts == 0 and shorter.seq_len > 1 and not fits(shorter, margin=margin):
        shorter = _of_length(setting, shorter.seq_len // 2)
    if shorter.seq_len % setting.num_token_parts == 0 and shorter.seq_len:
        yield f"data.seq_len={shorter.seq_len}", shorter


def _of_length(setting: Setting, seq_len: int) -> Setting:
    """`setting` with shorter sequences, and as many fewer positions where the model has learned ones."""
    positions = {"num_positions": seq_len} if getattr(setting.model, "num_positions", None) == setting.seq_len else {}
    return replace(setting, seq_len=seq_len, model=replace(setting.model, **positions))


def _more_gpus(plan: Plan) -> str:
    """The nodes, doubled, on which the parameters alone fit: fewer are never enough."""
    num_nodes = 2 * plan.space.topology.num_nodes
    while num_nodes <= _MOST_NODES:
        space = on_nodes(plan.space, num_nodes)
        if space and any(map(may_fit, space.groups)):
            return f"give more GPUs, {space.topology} at least"
        num_nodes *= 2
    return "take a smaller model"
