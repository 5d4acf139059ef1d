"""How long a step of the paper's implementation takes: messages block, and only the exchange of gradients is hidden.

Our own program hides its messages (`jaxpipe.estimate` has its times); here a device that sends computes nothing
meanwhile, as the paper's Table 6 counts: 2N + 2(D-1) messages of 1F1B's step are waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from machine import Machine, exchange_s, head_forward_s, layer_forward_s, message_s, reduce_s, update_s
from runs import Run

from jaxpipe.schedules import Costs, simulate

_TICK_S = 1e-9  # what a message adds for its receiver; an exchange of gradients is a multiple of it


@dataclass(frozen=True)
class Step:
    """Seconds of a step.

    Attributes:
        pipeline_s: makespan, exchange of gradients between the two replicas included.
        reduce_s: gradients over the pipelines, and those of the table of words.
        update_s: optimizer.
    """

    pipeline_s: float
    reduce_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """All of it, one after the other."""
        return self.pipeline_s + self.reduce_s + self.update_s


def step_of(machine: Machine, run: Run) -> Step:
    """The step of `run`."""
    pipeline_s = simulate(run.schedule, _costs(machine, run)).makespan
    return Step(pipeline_s, reduce_s(machine, run), update_s(run))


def samples_per_s(machine: Machine, run: Run) -> float:
    """The rate of training."""
    return run.num_samples / step_of(machine, run).total_s


def _costs(machine: Machine, run: Run) -> Costs:
    placement, model = run.schedule.placement, run.model
    num_stages, devices = placement.num_stages, placement.devices[0]
    chunk_s = model.num_layers / num_stages * layer_forward_s(machine, model, run.microbatch_size)
    forward, backward = [], []
    for stage, device in enumerate(devices):
        here_s = chunk_s
        if stage == num_stages - 1:
            here_s += head_forward_s(machine, model, run.microbatch_size)
        onward = devices[stage + 1] if stage + 1 < num_stages else device
        back = devices[stage - 1] if stage else device
        forward.append(here_s + message_s(machine, run, device, onward))
        backward.append(2 * here_s + message_s(machine, run, device, back))
    gradient_bytes = 2 * 12 * model.hidden**2 * model.num_layers / num_stages
    exchanged_s = exchange_s(machine, run, 0, run.pipe - 1, gradient_bytes)
    return Costs(tuple(forward), tuple(backward), transfer=_TICK_S, gradient_messages=exchanged_s / _TICK_S)
