"""Both clocks at measured times: rows as soon as inputs are there, and the rounds that the program executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxpipe.config import base_config, expected_costs
from jaxpipe.estimate import Times, stage_costs
from jaxpipe.lowering import lower, replay
from jaxpipe.schedules import REGISTRY, Costs, Schedule, build, simulate

SIZES = ((4, 16), (8, 8))  # devices, microbatches
NUM_LONG_STAGES = 3  # the first ones have three layers, the others two
MESSAGE = 0.03  # of a layer's forward; a layer's page and its gradients are as many messages as `Costs` has by default
HEADS = ("even stages", "uneven stages", "laid out for these times", "and with messages")


def ratios(name: str, num_devices: int, num_microbatches: int, times: Times) -> list[float]:
    """[one of `HEADS`] makespan of a registered schedule on the asynchronous clock by that of the program's rounds."""
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    even = [2] * schedule.num_stages
    uneven = [2 + (stage < NUM_LONG_STAGES) for stage in range(schedule.num_stages)]
    expected, costs = expected_costs(base_config()), costs_of(uneven, times)
    with_messages = costs_of(uneven, times, transfer_s=MESSAGE * times.layer_forward_s)
    return [
        _ratio(schedule, even, costs_of(even, times), expected),
        _ratio(schedule, uneven, costs, expected.of_layers(uneven)),
        _ratio(schedule, uneven, costs, costs),
        _ratio(schedule, uneven, with_messages, costs),
    ]


def costs_of(layers: Sequence[int], times: Times, *, transfer_s: float = 0.0) -> Costs:
    """What stages of so many layers cost, the first with the embedding, the last with the head."""
    one_layer, num_layers = Costs(), min(layers)
    return replace(
        stage_costs(times, layers),
        transfer=transfer_s,
        slot_messages=num_layers * one_layer.slot_messages,
        gradient_messages=num_layers * one_layer.gradient_messages,
    )


def _ratio(schedule: Schedule, layers: Sequence[int], costs: Costs, laid_out_for: Costs) -> float:
    table = lower(schedule, layers_per_stage=layers, costs=laid_out_for)
    return simulate(schedule, costs).makespan / replay(table, costs).makespan


def rows(times: Times, *, quick: bool) -> tuple[list[str], list[list[str]]]:
    """Heads and cells, a row for each registered schedule; `quick` has the first size alone."""
    sizes = SIZES[:1] if quick else SIZES
    cells = [
        [name, f"D={num_devices}, N={num}", *(f"{ratio:.3f}" for ratio in ratios(name, num_devices, num, times))]
        for name in REGISTRY
        for num_devices, num in sizes
    ]
    return ["asynchronous / SPMD", "size", *HEADS], cells
