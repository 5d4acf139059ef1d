"""What was run: the paper's two models, its methods as our schedules, and one way to train as a value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from jaxpipe.schedules import Action, Kind, Schedule, build
from jaxpipe.schedules.placement import looped

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Model:
    """A model of the paper's Table 3.

    Attributes:
        num_layers, hidden, num_heads, seq_len: as published.
        vocab_size: not published: of BERT's and GPT-2's tokenizers, up to a multiple of 128 as Megatron-LM has it.
        microbatch_size: sequences, as in the paper's runs on one node.
        samples_per_gpu: mini-batch / GPUs, of Table 7.
    """

    num_layers: int
    hidden: int
    num_heads: int
    seq_len: int
    vocab_size: int
    microbatch_size: int
    samples_per_gpu: int


MODELS = {
    "BERT-64": Model(64, 2560, 64, 512, 30_592, microbatch_size=4, samples_per_gpu=4),
    "GPT-96": Model(96, 3072, 32, 1024, 50_304, microbatch_size=1, samples_per_gpu=1),
}


@dataclass(frozen=True)
class Method:
    """A method of the paper.

    Attributes:
        schedule: its name here.
        options: of the schedule.
        is_bidirectional: whether it has two replicas, laid so that the devices d and D-1-d are neighbours.
    """

    schedule: str
    options: tuple[tuple[str, object], ...] = ()
    is_bidirectional: bool = False


# Exchange of gradients during the step is BitPipe's own contribution; the others' stands behind the last backward.
_LAZY = ("eager_sync", False)
METHODS = {
    "DAPPLE": Method("1f1b"),
    "1F1B-Int": Method("interleaved_1f1b"),
    "Chimera": Method("chimera", (_LAZY,), is_bidirectional=True),
    "MixPipe": Method("mixpipe", (_LAZY,), is_bidirectional=True),
    "BitPipe": Method("bitpipe", is_bidirectional=True),
    "BitPipe, v=4": Method("bitpipe", (("num_chunks", 4),), is_bidirectional=True),
    "without V": Method("bitpipe", (("v_shape", False),), is_bidirectional=True),
    "without eager sync": Method("bitpipe", (_LAZY,), is_bidirectional=True),
}


@dataclass(frozen=True)
class Run:
    """One way to train.

    Attributes:
        model: of the paper's two.
        method: of the paper's.
        data: W, pipelines.
        pipe: D, devices of one.
        microbatch_size: B, sequences.
        num_microbatches: N, of one pipeline in a step.
    """

    model: Model
    method: Method
    data: int
    pipe: int
    microbatch_size: int
    num_microbatches: int

    @property
    def num_samples(self) -> int:
        """The mini-batch."""
        return self.data * self.microbatch_size * self.num_microbatches

    @property
    def schedule(self) -> Schedule:
        """Of one pipeline."""
        return _schedule(self.method, self.pipe, self.num_microbatches)


def run_of(model: str, method: str, *, data: int, pipe: int, microbatch_size: int = 0, num_samples: int = 0) -> Run:
    """A way to train; without `microbatch_size` and `num_samples` (the mini-batch) those of Table 7.

    Example:
        >>> run_of("BERT-64", "DAPPLE", data=4, pipe=8).num_microbatches
        8
    """
    what = MODELS[model]
    size = microbatch_size or what.microbatch_size
    num_samples = num_samples or what.samples_per_gpu * data * pipe
    return Run(what, METHODS[method], data, pipe, size, num_samples // (data * size))


@cache
def _schedule(method: Method, num_devices: int, num_microbatches: int) -> Schedule:
    if method.schedule == "interleaved_1f1b" and num_microbatches == num_devices:
        return _all_forwards_first(num_devices)
    return build(method.schedule, num_devices=num_devices, num_microbatches=num_microbatches, **dict(method.options))


def _all_forwards_first(num_devices: int) -> Schedule:
    """1F1B-Int with N = D in Megatron-LM, from which the paper's code starts: all is warm-up."""
    rows = tuple(
        tuple(
            Action(kind, num_devices * chunk + device, microbatch)
            for kind, chunks in ((Kind.F, (0, 1)), (Kind.B, (1, 0)))
            for chunk in chunks
            for microbatch in range(num_devices)
        )
        for device in range(num_devices)
    )
    return Schedule("interleaved_1f1b", looped(num_devices, 2), num_devices, rows)
