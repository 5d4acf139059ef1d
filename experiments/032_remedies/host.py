"""The host's memory as a remedy: 1F1B whose pages leave for it, `bpipe` with to=host, against layers computed again.

python experiments/032_remedies/host.py    # a minute; nothing is run or compiled
"""

from __future__ import annotations

import remedies

from jaxpipe.estimate import Setting, estimate, memory
from jaxpipe.estimate.plan import MEMORY_MARGIN, bytes_within

MICROBATCH_SIZES = (2, 4, 8)
LEAST_BOUND = 3  # slots, the least that a device can keep


def on_the_host(model: int, microbatch_size: int, bound: int) -> remedies.Cell:
    """The fastest setting of a bound that fits; if none does, the fastest."""
    of = remedies.MODELS[model]
    changes = {"pipeline.schedule": "bpipe", "pipeline.options": f"to=host,bound={bound}"}
    settings = remedies.settings(of, microbatch_size, remedies.Remedy("host", changes))
    cells = [remedies.Cell(estimate(setting, remedies.source(of)), memory(setting)) for setting in settings]
    return min(cells, key=_rank)


def _rank(cell: remedies.Cell) -> tuple[bool, float]:
    return not cell.fits, cell.estimate.step_s


def copy_s(setting: Setting, plain: remedies.Cell) -> float:
    """Seconds in which what the first stage parks of a microbatch is copied one way; `plain` is of 1F1B."""
    share = float(setting.schedule_spec.build(setting.num_microbatches).parked_of(0))
    num_slots = min(setting.pipe, setting.num_microbatches)
    num_layers = setting.layers_per_stage[0]
    # 1F1B's fullest device holds so many microbatches of the longest stage.
    page_bytes = plain.held.slots / (num_slots * plain.setting.layers_per_stage[0])
    return share * num_layers * page_bytes / setting.topology.hardware.host_copy_bytes_per_s


def line(model: int, microbatch_size: int) -> str | None:
    """A row of the table; None where 1F1B fits, or where no layers by stage make it fit."""
    names = [remedy.name for remedy in remedies.REMEDIES]
    plain, by_stage = (remedies.cell(model, microbatch_size, names.index(name)) for name in ("1F1B", "by stage"))
    if plain.fits or not by_stage.fits:
        return None
    bounds = range(LEAST_BOUND, min(plain.setting.pipe, plain.setting.num_microbatches))
    best = min((on_the_host(model, microbatch_size, bound) for bound in bounds), key=_rank)
    setting = best.setting
    times = best.estimate.times
    excess = plain.held.total - bytes_within(setting, margin=MEMORY_MARGIN)
    num_layers = setting.layers_per_stage[0]
    seconds = copy_s(setting, plain), num_layers * times.layer_forward_s, num_layers * times.layer_backward_s
    ratio = by_stage.estimate.step_s / best.estimate.step_s
    cells = (
        remedies.MODELS[model].preset,
        microbatch_size,
        f"{excess / 2**30:.1f}",
        setting.options.rpartition("=")[2],
        setting.schedule_spec.build(setting.num_microbatches).parked_of(0),
        *(f"{1000 * each:.0f}" for each in seconds),
        f"{best.held.total / 2**30:.1f}",
        f"{best.estimate.step_s:.2f}" if best.fits else "does not fit",
        f"{by_stage.estimate.step_s:.2f}",
        f"{ratio:.3f}" if best.fits else "",
    )
    return f"| {' | '.join(map(str, cells))} |"


HEADS = (
    *("model", "b", "GiB too many", "bound", "share that leaves", "ms of its copy", "ms of F", "ms of B"),
    *("GiB", "host, s", "by stage, s", "by stage / host"),
)


def main() -> None:
    """Prints the table."""
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for model in range(len(remedies.MODELS)):
        for microbatch_size in MICROBATCH_SIZES:
            if row := line(model, microbatch_size):
                print(row, flush=True)


if __name__ == "__main__":
    main()
