"""What the host's memory would be worth as a remedy: 1F1B whose pages leave for it, against layers computed again.

python experiments/032_remedies/host.py    # half a minute; nothing is run or compiled
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import remedies

from jaxpipe.estimate import Setting, TimeSource, estimate, memory
from jaxpipe.estimate.plan import MEMORY_MARGIN, bytes_within

MICROBATCH_SIZES = (2, 4, 8)
# Bytes a second one way over PCIe x16, of which 0.8 are assumed to be reached. Sources: PCI-SIG, 4.0 and 5.0; NVIDIA's
# data sheets of A100 80GB SXM and H100 SXM.
PCIE_BYTES_PER_S = {"a100-80g": 0.8 * 31.5e9, "h100-80g": 0.8 * 63e9}
WHOLE = 2  # microbatches of a device that have all of their pages at home: the one that leaves and the one that comes


@dataclass(frozen=True)
class OnTheHost:
    """1F1B whose first stage parks as few pages of each microbatch as make it fit.

    Attributes:
        plain: 1F1B with all pages on the device.
        excess: bytes that it has too many.
        num_pages: pages of a microbatch that leave, of `num_layers`.
        copy_s, forward_s, backward_s: of them, and of the actions behind which they leave and come back.
    """

    plain: remedies.Cell
    excess: int
    num_pages: int
    num_layers: int
    copy_s: float
    forward_s: float
    backward_s: float

    @property
    def fits(self) -> bool:
        """Whether there are as many pages."""
        return self.num_pages <= self.num_layers

    @property
    def step_s(self) -> float:
        """Seconds of its step: what of a copy is longer than its action holds the first stage up."""
        late_s = max(0.0, self.copy_s - self.forward_s) + max(0.0, self.copy_s - self.backward_s)
        return self.plain.estimate.step_s + self.plain.setting.num_microbatches * late_s


def on_the_host(setting: Setting, source: TimeSource) -> OnTheHost:
    """A setting of 1F1B that does not fit, with pages on the host."""
    plain = remedies.Cell(estimate(setting, source), memory(setting))
    times = plain.estimate.times
    excess = plain.held.total - bytes_within(setting, margin=MEMORY_MARGIN)
    num_slots = min(setting.pipe, setting.num_microbatches)  # of the first stage
    num_layers = setting.layers_per_stage[0]
    page_bytes = plain.held.slots / (num_slots * num_layers)
    num_pages = math.ceil(excess / ((num_slots - WHOLE) * page_bytes))
    copy_s = num_pages * page_bytes / PCIE_BYTES_PER_S[setting.topology.hardware.name]
    layer_s = times.layer_forward_s, times.layer_backward_s
    return OnTheHost(plain, excess, num_pages, num_layers, copy_s, *(num_layers * seconds for seconds in layer_s))


def line(model: int, microbatch_size: int) -> str | None:
    """A row of the table; None where 1F1B fits, or where no layers by stage make it fit."""
    names = [remedy.name for remedy in remedies.REMEDIES]
    plain, by_stage = (remedies.cell(model, microbatch_size, names.index(name)) for name in ("1F1B", "by stage"))
    if plain.fits or not by_stage.fits:
        return None
    of, one_f_one_b = remedies.MODELS[model], remedies.REMEDIES[names.index("1F1B")]
    tried = [
        on_the_host(setting, remedies.source(of)) for setting in remedies.settings(of, microbatch_size, one_f_one_b)
    ]
    best = min(tried, key=lambda host: (not host.fits, host.step_s))
    cells = (
        of.preset,
        microbatch_size,
        f"{best.excess / 2**30:.1f}",
        f"{best.num_pages} of {best.num_layers}",
        *(f"{1000 * seconds:.0f}" for seconds in (best.copy_s, best.forward_s, best.backward_s)),
        f"{best.step_s:.2f}" if best.fits else "does not fit",
        f"{by_stage.estimate.step_s:.2f}",
        f"{by_stage.estimate.step_s / best.step_s:.3f}" if best.fits else "",
    )
    return f"| {' | '.join(map(str, cells))} |"


HEADS = (
    *("model", "b", "GiB too many", "pages that leave", "ms of their copy", "ms of F", "ms of B"),
    *("host, s", "by stage, s", "by stage / host"),
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
