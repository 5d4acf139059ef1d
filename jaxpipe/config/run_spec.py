"""What a run does, as one value that nobody writes: all that is decided before its first step.

`jaxpipe.estimate.resolve` makes it of a checked config and the GPUs. Goes in: its parts. Comes out: what follows from
them, and its lines for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxpipe.cluster.axes import describe_mesh
from jaxpipe.config.base import RunConfig
from jaxpipe.config.costs import head_share
from jaxpipe.config.data import num_predicted_of
from jaxpipe.config.optimizers import OPTIMIZERS, Optimizer
from jaxpipe.config.recompute import Recomputed, recomputed_of
from jaxpipe.models import ModelConfig
from jaxpipe.schedules import Costs, Schedule
from jaxpipe.schedules.spec import ScheduleSpec
from jaxpipe.sharding import NOTHING_KEPT, KeptChunks


@dataclass(frozen=True)
class RunSpec:
    """What a run does.

    Attributes:
        config: its config with all that was decided, as config.json records it.
        schedule_spec: what its schedule is built from.
        costs: expected times of a mean stage's actions, in forwards.
        costs_source: where these are from, for people.
        model: the model's sizes and choices; None of a model given in Python.
        layers_per_stage: [stage] number of layers.
        kept: of what devices share, what each keeps whole.
    """

    config: RunConfig
    schedule_spec: ScheduleSpec
    costs: Costs
    costs_source: str
    model: ModelConfig | None
    layers_per_stage: tuple[int, ...]
    kept: KeptChunks = NOTHING_KEPT

    @cached_property
    def recomputed(self) -> Recomputed | None:
        """The layers of each stage that backward computes again; None if all layers are alike."""
        return recomputed_of(self.config)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule; without flush it is of several batches."""
        return self.schedule_spec.build(self.config.pipeline.num_microbatches)

    @property
    def optimizer(self) -> Optimizer:
        """The row of the optimizer."""
        return OPTIMIZERS[self.config.optimizer.name]

    @cached_property
    def stage_costs(self) -> Costs:
        """The expected costs of the stages, by their layers, and of S and T if the schedule has any."""
        costs = self.costs.of_layers(self.layers_per_stage, self.recomputed.more if self.recomputed else ())
        if not self.schedule.has_head_actions:
            return costs
        assert self.model is not None  # a head given in Python is one function
        share = head_share(self.model, self.config.data.seq_len, num_predicted_of(self.config))
        return costs.with_head(share * self.schedule.placement.num_chunks)

    def lines(self, places: str, *, optimizer_is_given: bool = False) -> list[str]:
        """What the run does that no other line of its report says.

        Args:
            places: where the devices of the mesh stand, for people.
            optimizer_is_given: whether its optimizer is one given in Python, not the config's.
        """
        config = self.config
        model = config.model
        fields = config.optimizer
        head = ", embedding and head over pipe" if config.pipeline.vocab_over_pipe == "true" else ""
        # Only a family's model has a kind of attention, and reads sequences of `data.seq_len`.
        attention = "" if self.model is None else f"attention {model.attention}, "
        length = "" if self.model is None else f" of {config.data.seq_len} tokens"
        of_config = f"{fields.name}, {fields.schedule} from {fields.learning_rate:g}, decay {fields.weight_decay:g}"
        average = f", average of the weights by {fields.average_decay:g}" if fields.average_decay else ""
        kept = f", keeps {self.kept.weights} gathered chunks" if self.kept.weights else ""
        kept += f", keeps sums of {self.kept.sums} chunks" if self.kept.sums else ""
        return [
            f"compute    {model.dtype}, {attention}recompute {model.recompute}",
            f"mesh       {describe_mesh(config.mesh.axes)}, shard {config.mesh.shard}{kept}, {places}{head}",
            f"batch      {config.data.batch_size} sequences{length}; a microbatch has {config.microbatch_size} of them"
            " on each device",
            f"optimizer  {'given in Python' if optimizer_is_given else of_config}, gradients clipped at norm"
            f" {fields.max_grad_norm:g}{average}; {config.train.steps} steps",
        ]
