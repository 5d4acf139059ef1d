"""How much longer is a step on the clock of the program than on the asynchronous one, over many sizes and costs?

python experiments/008_all_schedules/slowdowns.py    # ten minutes; prints the table of the page, compiles nothing

Goes in: every method with the options that the planner tries, at costs of a device's share of the model. Comes out: of
each method the worst ratio, with rounds laid out for the costs, and what its program sends over what the schedule asks
for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from experiments.pages import markdown
from jaxpipe.lowering import lower, replay
from jaxpipe.schedules import REGISTRY, Costs, Method, Schedule, costs_of_stages, simulate

NUMS_DEVICES = (4, 8)
WHOLE = tuple(Costs(backward=b, input_gradient=b / 2, weight_gradient=b / 2) for b in (1.0, 2.0, 3.0))
HALVES = tuple(Costs(input_gradient=i, weight_gradient=2.0 - i) for i in (1.2, 0.8))
HEADS = ("schedule", "messages at no cost", "of 0.02 forward", "of 0.1 forward", "a tenth off", "sent", "blocking")


def schedules(method: Method, costs: Costs) -> Iterator[Schedule]:
    """Those of the grid, made for `costs` where the method's orders are made for times."""
    times = {name: getattr(costs, name) for name in ("forward", "input_gradient", "weight_gradient")}
    for num_devices in NUMS_DEVICES:
        for options in method.planner_options():
            given = {**options, **times} if method.is_made_for_times else options
            if method.takes(num_devices, **given):
                for num_microbatches in (num_devices, 2 * num_devices + 1, 4 * num_devices):
                    yield method.build(num_devices=num_devices, num_microbatches=num_microbatches, **given)


def ratios(schedule: Schedule, costs: Costs) -> list[float]:
    """As `HEADS` names them; sent over asked is that of N = 4 D, else 0."""
    costs = replace(
        costs_of_stages(costs, schedule.placement), gradient_messages=0.0
    )  # the exchange of gradients apart

    def slowdown(of: Costs, *, blocking: bool = False) -> float:
        table = lower(schedule, costs=costs, blocking=True) if blocking else whole
        return replay(table, of, blocking=blocking).makespan / simulate(table.schedule, of).makespan

    whole = lower(schedule, costs=costs)
    backward, input_gradient = float(np.mean(costs.backward)), float(np.mean(costs.input_gradient))
    off = [replace(costs, backward=by * backward, input_gradient=by * input_gradient) for by in (0.9, 1.1)]
    return [
        *(slowdown(replace(costs, transfer=transfer)) for transfer in (0.0, 0.02, 0.1)),
        max(map(slowdown, off)),
        whole.sent_over_asked if schedule.num_microbatches == 4 * schedule.num_devices else 0.0,
        slowdown(costs, blocking=True),
    ]


def main() -> None:
    """Prints the table."""
    rows = []
    for name, method in REGISTRY.items():
        all_costs = (*WHOLE, *HALVES) if method.has_split_backward else WHOLE
        found = [ratios(schedule, costs) for costs in all_costs for schedule in schedules(method, costs)]
        rows.append([name, *(f"{worst:.3f}" for worst in np.max(found, axis=0))])
        print(rows[-1], file=sys.stderr)
    print(markdown(HEADS, rows))


if __name__ == "__main__":
    main()
