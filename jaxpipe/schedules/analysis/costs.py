"""From times of a device's share of the model to times of a stage: what makes placements comparable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.simulate import Cost, Costs
from jaxpipe.schedules.placement import Placement


def costs_of_stages(costs: Costs, placement: Placement) -> Costs:
    """Returns what a stage of `placement` costs, for `simulate` and `lower`.

    Every device does the same share of the work on a microbatch, in one stage or cut into num_chunks of them. A number
    is the time of that whole share, of which a stage takes 1/num_chunks. Several numbers are the model in order, cut
    into equal parts, of which a stage takes the sum of its own. A stage has 1/num_chunks of the share's activations
    and gradients too: `slot_messages` and `gradient_messages` shrink likewise. A message is as large for any cut.

    Args:
        costs: of a device's share.
        placement: of the stages.

    Raises:
        ScheduleError: several numbers, but no equal number for each stage.

    Example:
        >>> from jaxpipe.schedules.placement import linear, zig_zag
        >>> costs_of_stages(Costs(forward=1.0), zig_zag(4, 2)).forward
        0.5
        >>> costs_of_stages(Costs(forward=(1.0, 2.0, 3.0, 4.0)), linear(2)).forward
        (3.0, 7.0)
    """
    return replace(
        costs,
        forward=_of_stages(costs.forward, placement),
        backward=_of_stages(costs.backward, placement),
        input_gradient=_of_stages(costs.input_gradient, placement),
        weight_gradient=_of_stages(costs.weight_gradient, placement),
        slot_messages=costs.slot_messages / placement.num_chunks,
        gradient_messages=costs.gradient_messages / placement.num_chunks,
    )


def share_of(cost: Cost, num_devices: int) -> float:
    """The time of the mean device's share of the model: what generators that take one number are given."""
    return float(np.sum(cost)) / num_devices if isinstance(cost, tuple) else float(cost)


def _of_stages(cost: Cost, placement: Placement) -> Cost:
    if not isinstance(cost, tuple):
        return cost / placement.num_chunks
    num_stages = placement.num_stages
    if len(cost) % num_stages:
        nearest = num_stages * max(1, round(len(cost) / num_stages))
        raise ScheduleError(
            f"{len(cost)} costs for num_stages={num_stages} (num_devices={placement.num_devices}, "
            f"num_chunks={placement.num_chunks}).\n"
            "  rule cost-of-parts: a cost is one number, the time of a device's share of the model, or one number for "
            "each of equal parts of the model, as many for every stage\n"
            f"  repair: give one number or {nearest}, or a problem with only those placements whose stages divide "
            f"{len(cost)}"
        )
    size = len(cost) // num_stages
    return tuple(sum(cost[first : first + size]) for first in range(0, len(cost), size))
