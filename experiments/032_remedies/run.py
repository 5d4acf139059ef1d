"""Which remedy is right where a microbatch does not fit: BPipe, recomputation, V-shaped schedules or a split head?

python experiments/032_remedies/run.py             # two minutes; prints the tables
python experiments/032_remedies/run.py --write     # puts them into README.md beside this file, draws remedies.png
python experiments/032_remedies/run.py --quick     # half a minute: GPT-3 96B and Llama 3 8B alone
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from picture import Panel, draw
from remedies import MODELS, REMEDIES, Cell, cell

from experiments.pages import markdown, page_parser, put_sections, write_files
from jaxpipe.estimate.plan import describe_schedule

FOLDER = Path(__file__).parent
README, PICTURE = FOLDER / "README.md", FOLDER / "remedies.png"
MICROBATCH_SIZES = (1, 2, 4, 8)
PLAIN = 0  # index of the remedy that is none
QUICK = (0, 3)
GIB = 2.0**30


def steps_table(models: Sequence[int]) -> str:
    """Seconds of a step of each remedy, and GiB where it does not fit."""
    lines = []
    for model in models:
        for size in MICROBATCH_SIZES:
            cells = [cell(model, size, remedy) for remedy in range(len(REMEDIES))]
            best_s = min((found.estimate.step_s for found in cells if found.fits), default=0.0)
            lines.append([MODELS[model].label, str(size), *(_step(found, best_s) for found in cells)])
    return markdown(["model and mesh", "b", *(remedy.name for remedy in REMEDIES)], lines)


def _step(found: Cell, best_s: float) -> str:
    if not found.fits:
        return f"({found.held.total / GIB:.1f} GiB)"
    step_s = found.estimate.step_s
    return f"**{step_s:.2f}**" if step_s == best_s else f"{step_s:.2f}"


def bytes_table(models: Sequence[int]) -> str:
    """GiB of the fullest device."""
    lines = [
        [
            MODELS[model].label,
            str(size),
            *(f"{cell(model, size, remedy).held.total / GIB:.1f}" for remedy in range(len(REMEDIES))),
        ]
        for model in models
        for size in MICROBATCH_SIZES
    ]
    return markdown(["model and mesh", "b", *(remedy.name for remedy in REMEDIES)], lines)


def answers_table(models: Sequence[int]) -> str:
    """What is fastest where the microbatch may be chosen, and where it may not."""
    lines = []
    for model in models:
        fastest = fastest_of(model, range(len(REMEDIES)))
        for asked, others in (
            ("1F1B", ["1F1B"]),
            ("BPipe", ["BPipe"]),
            ("recomputed", ["by stage", "full"]),
            ("any order, whole head", ["1F1B", "ZB-V", "V-Half", "V-Min"]),
        ):
            best = fastest_of(model, [place for place, each in enumerate(REMEDIES) if each.name in others])
            gain = "-" if best is None or fastest is None else f"{best.estimate.step_s / fastest.estimate.step_s:.3f}"
            lines.append([MODELS[model].preset, asked, *_described(best), gain])
    return markdown(["model", "of", "fastest that fits", "b", "s", "/ the fastest of all"], lines)


def fastest_of(model: int, remedies: Sequence[int]) -> Cell | None:
    """The fastest that fits, of any microbatch size; None if none does."""
    cells = [cell(model, size, remedy) for size in MICROBATCH_SIZES for remedy in remedies]
    return min((found for found in cells if found.fits), key=lambda found: found.estimate.step_s, default=None)


def _described(found: Cell | None) -> list[str]:
    if found is None:
        return ["none fits", "-", "-"]
    setting = found.setting
    again = "" if setting.recompute == "none" else f", recompute {setting.recompute}"
    return [f"{describe_schedule(setting)}{again}", str(setting.microbatch_size), f"{found.estimate.step_s:.2f}"]


def panels(models: Sequence[int]) -> list[Panel]:
    """The picture's: [microbatch size, remedy] a step over the fastest that fits there; None where it does not fit."""
    return [
        Panel(
            MODELS[model].preset,
            [
                [
                    round(found.estimate.step_s, 3) if (found := cell(model, size, remedy)).fits else None
                    for remedy in range(len(REMEDIES))
                ]
                for size in MICROBATCH_SIZES
            ],
        )
        for model in models
    ]


def main() -> None:
    """Prints the tables, and writes them to the page if that is asked for."""
    flags = page_parser(__doc__ or "", quick="GPT-3 96B and Llama 3 8B alone").parse_args()
    models = QUICK if flags.quick else range(len(MODELS))
    sections = {"steps": steps_table(models), "answers": answers_table(models), "bytes": bytes_table(models)}
    print("\n".join(sections.values()))
    if flags.write and not flags.quick:
        picture = draw(panels(models), MICROBATCH_SIZES, [remedy.name for remedy in REMEDIES])
        write_files({README: put_sections(sections, README.read_text()), PICTURE: picture})


if __name__ == "__main__":
    main()
