"""Does BPipe pay on GPT-3 96B and LLaMA 65B? The re-evaluation's statements beside predictions.

python experiments/020_reevaluation/run.py             # a few seconds; prints the tables
python experiments/020_reevaluation/run.py --write     # puts them into README.md beside this file, draws mfu.png
python experiments/020_reevaluation/run.py --quick     # the same as without: nothing is left out
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from picture import draw
from ways import KERNELS, MICROBATCH_SIZES, MODELS, largest_that_fits, setting

from experiments.megatron_kernels import heads_per_gpu, is_fused
from experiments.pages import markdown, page_parser, put_between, write_files
from experiments.reevaluation import Reevaluated, reevaluate, step_mfu
from jaxpipe.estimate import estimate

FOLDER = Path(__file__).parent
README, PICTURE = FOLDER / "README.md", FOLDER / "mfu.png"
PUBLISHED: dict[str, Any] = json.loads((FOLDER / "published.json").read_text())


@cache
def simulated_mfu(model: str, kernel: str, microbatch_size: int, schedule: str) -> float:
    """Of a step, by `jaxpipe.estimate`: the schedule on the clock, embedding, head, sums and update too."""
    return estimate(setting(model, kernel, microbatch_size, schedule), KERNELS[kernel].source).mfu


@cache
def reevaluated(model: str, kernel: str) -> dict[int, Reevaluated]:
    """Microbatch size -> MFU of a stage, and of a step by the re-evaluation's equation and simulated, under 1F1B."""
    way = KERNELS[kernel]
    found = reevaluate(setting(model, kernel, MICROBATCH_SIZES[0], "1f1b"), way.source, MICROBATCH_SIZES)
    return {each.microbatch_size: each for each in found}


def mfu_table() -> str:
    """Every model, kernel and microbatch size."""
    lines = []
    for model, name in MODELS.items():
        for kernel, way in KERNELS.items():
            for size in MICROBATCH_SIZES:
                found = setting(model, kernel, size, "1f1b")
                fused = ("one kernel" if is_fused(found) else "a chain") if kernel == "softmax" else "-"
                cells = [name, way.name, str(size), f"{size} x {heads_per_gpu(found)}", fused]
                each = reevaluated(model, kernel)[size]
                left = step_mfu(1.0, batch_size=found.batch_size, microbatch_size=size, pipe=found.pipe)
                simulated = [simulated_mfu(model, kernel, size, schedule) for schedule in ("1f1b", "bpipe")]
                values = [each.stage_mfu, left, each.formula_mfu, *simulated]
                lines.append([*cells, *(f"{value:.3f}" for value in values)])
    head = ["model", "attention", "b", "b x heads of a GPU", "softmax is", "MFU of a stage", "left by the bubble"]
    return markdown([*head, "MFU: equation", "MFU: simulated, 1f1b", "MFU: simulated, bpipe"], lines)


def gains(model: str, kernel: str, *, ours: bool) -> tuple[int, int, float, float]:
    """What BPipe brings: the largest b without and with it, and its gain by the equation and simulated."""
    without, balanced = (largest_that_fits(model, kernel, name, ours=ours) for name in ("1f1b", "bpipe"))
    found = reevaluated(model, kernel)
    by_equation = found[balanced].formula_mfu / found[without].formula_mfu
    simulated = simulated_mfu(model, kernel, balanced, "bpipe") / simulated_mfu(model, kernel, without, "1f1b")
    return without, balanced, by_equation - 1, simulated - 1


def gain_table() -> str:
    """The largest microbatch that fits with BPipe against the largest without, beside what was published."""
    lines = []
    for said in PUBLISHED["statements"]:
        model, kernel = said["model"], said["kernel"]
        without, balanced, by_equation, simulated = gains(model, kernel, ours=False)
        cells = [MODELS[model], KERNELS[kernel].name, f"{without} to {balanced}", said["says"]]
        lines.append([*cells, f"{by_equation:+.1%}", f"{simulated:+.1%}", "yes" if agrees(said, simulated) else "no"])
    head = ["model", "attention", "b without, with BPipe", "published", "gain: equation", "gain: simulated", "agrees"]
    return markdown(head, lines)


def agrees(said: dict[str, Any], gain: float) -> bool:
    """Whether a gain is as was said; what is no benefit or a negligible one is below a twentieth, by us."""
    least, most = said["least"], said["most"]
    return (least is None or gain >= least) and (most is None or gain <= most)


def own_table() -> str:
    """The same with jaxpipe's bytes."""
    lines = []
    for model, name in MODELS.items():
        for kernel in ("one", "flash"):
            without, balanced, by_equation, simulated = gains(model, kernel, ours=True)
            if without == balanced:
                lines.append([name, KERNELS[kernel].name, f"{without}, no larger one", "-", "-"])
                continue
            cells = [name, KERNELS[kernel].name, f"{without} to {balanced}"]
            lines.append([*cells, f"{by_equation:+.1%}", f"{simulated:+.1%}"])
    head = ["model", "attention", "b without, with BPipe in jaxpipe", "gain: equation", "gain: simulated"]
    return markdown(head, lines)


def panels() -> dict[str, dict[str, list[tuple[int, float, int]]]]:
    """What the picture shows; what fits is by Megatron-LM's bytes."""
    found = {}
    for model, name in MODELS.items():
        limits = [largest_that_fits(model, "softmax", schedule, ours=False) for schedule in ("1f1b", "bpipe")]
        found[name] = {
            way.name: [
                (size, round(simulated_mfu(model, kernel, size, "1f1b"), 5), sum(size > limit for limit in limits))
                for size in MICROBATCH_SIZES
            ]
            for kernel, way in KERNELS.items()
        }
    return found


def document() -> str:
    """What stands in the page."""
    return "\n".join(
        [
            "What BPipe brings, by Megatron-LM's bytes: the largest microbatch that fits with it against the largest "
            "without:\n",
            gain_table(),
            "The same by jaxpipe's bytes:\n",
            own_table(),
            "Where it comes from:\n",
            mfu_table(),
        ]
    )


def main() -> None:
    """Prints the tables; writes where asked."""
    flags = page_parser(
        "BPipe re-evaluated, as Markdown and PNG.", quick="in less than 30 s, as without: nothing is left out"
    ).parse_args()
    text = document()
    print(text, end="")
    if flags.write:
        write_files({README: put_between(text, README.read_text()), PICTURE: draw(panels())})


if __name__ == "__main__":
    main()
