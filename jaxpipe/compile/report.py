"""Report of a compiled training step: bytes per device, as compiled and as predicted, beside the hardware's memory.

Goes in: a compiled step and its hardware's memory. Comes out: the numbers that the command prints, and their text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.compile.hlo import (
    BY_DATA,
    ENDS_OVER_DATA,
    EXCHANGE,
    EXPERTS,
    HOST_COPY,
    OF_EXPERTS,
    OVER_DATA,
    PAGE_TRANSFER,
    overlapped_bytes,
    overlapped_in_pairs,
    overlapped_permutes,
)
from jaxpipe.compile.prediction import Prediction, predict
from jaxpipe.compile.step import CompiledStep
from jaxpipe.lowering.waits import waits_per_action
from jaxpipe.program.held_bytes import buffer_bytes, host_bytes, link_bytes
from jaxpipe.units import gib


@dataclass(frozen=True)
class Report:
    """Numbers of one compiled training step; bytes are per device, and equal on all devices."""

    argument_bytes: int  # train state and batch; this and the next three are XLA's counts
    temp_bytes: int
    output_bytes: int  # the new train state and the metrics
    alias_bytes: int  # outputs that are written in place of arguments: the whole train state
    hardware_bytes: int  # memory of one GPU
    # Number of (stage, microbatch) pairs whose residuals one device holds at once: own, parked and in transit.
    num_slots: float
    slot_bytes: int
    transit_bytes: int  # pages and gradients on their way between the two devices of a pair
    compile_s: float  # seconds for tracing, lowering and compiling the step
    waits_per_action: float  # times that the host waits for the device, by the round table
    # By kind, collectives in the program, and how many of these are asynchronous with an action between start and end.
    transfers: dict[str, tuple[int, int]]
    # Of layers, and of embedding and head: bytes of collectives over `data`, each action once, and those that overlap.
    data_bytes: dict[str, tuple[int, int]]
    # Of pairs: opcode -> bytes of collectives of layers, and of those with a matmul of the other half beside them.
    pair_bytes: dict[str, tuple[int, int]]
    link: tuple[int, int]  # the two devices of `pipe` between which the permutes carry most, source and target
    link_bytes_asked: int  # bytes of a step that the schedule asks to be carried there
    link_bytes_sent: int  # bytes that the permutes carry there, what nobody reads included
    prediction: Prediction
    reserve_bytes: int = RESERVE_BYTES
    host_bytes: int = 0  # of the host's memory, which are no device's
    predicted_host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the step, without the reserve."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def fits(self) -> bool:
        """Whether the step and the reserve fit into the hardware's memory."""
        return self.total_bytes + self.reserve_bytes <= self.hardware_bytes

    @property
    def _in_pairs(self) -> dict[str, tuple[int, int]]:
        return {opcode.replace("-", "_"): counts for opcode, counts in self.pair_bytes.items()}

    def to_json(self) -> dict[str, Any]:
        """The numbers by their names; `predicted` has the parts of `predicted_bytes`, `workspace` the parts of one."""
        numbers = asdict(self)
        del numbers["prediction"], numbers["transfers"], numbers["data_bytes"], numbers["pair_bytes"]
        return {
            **numbers,
            **{kind: num for kind, (num, _) in self.transfers.items()},
            **{f"overlapped_{kind}": num for kind, (_, num) in self.transfers.items()},
            **{f"{of}_data_bytes": num for of, (num, _) in self.data_bytes.items()},
            **{f"overlapped_{of}_data_bytes": num for of, (_, num) in self.data_bytes.items()},
            **{f"pair_{kind}_bytes": num for kind, (num, _) in self._in_pairs.items()},
            **{f"overlapped_pair_{kind}_bytes": num for kind, (_, num) in self._in_pairs.items()},
            "total_bytes": self.total_bytes,
            "fits": self.fits,
            "predicted_bytes": self.prediction.total_bytes,
            "predicted": self.prediction.parts,
            "workspace": self.prediction.workspace,
        }


def report(step: CompiledStep, *, hardware_bytes: int) -> Report:
    """The report of `step`; compiles the parts of its actions, for the prediction."""
    compiled = step.compiled
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    of_experts = [overlapped_permutes(text, scope=EXPERTS, opcode=opcode) for opcode in OF_EXPERTS]
    over_data = [overlapped_permutes(text, scope=OVER_DATA, opcode=opcode) for opcode in BY_DATA]
    shapes = compiled.shapes(step.state.params, step.batch)
    asked, sent = link_bytes(shapes)
    source, target = np.unravel_index(int(sent.argmax()), sent.shape)
    return Report(
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        hardware_bytes=hardware_bytes,
        num_slots=compiled.table.num_slots,
        slot_bytes=shapes.slot_bytes,
        transit_bytes=buffer_bytes(shapes).get("transit", 0),
        compile_s=step.compile_s,
        waits_per_action=waits_per_action(compiled.table, by_chunk=shapes.by_chunk, pattern=shapes.pattern),
        transfers={
            "permutes": overlapped_permutes(text),
            "evict_load_permutes": overlapped_permutes(text, scope=PAGE_TRANSFER),
            "host_copies": overlapped_permutes(text, scope=HOST_COPY, opcode="fusion"),
            "exchange_permutes": overlapped_permutes(text, scope=EXCHANGE),
            "expert_collectives": (sum(num for num, _ in of_experts), sum(num for _, num in of_experts)),
            "data_collectives": (sum(num for num, _ in over_data), sum(num for _, num in over_data)),
        },
        data_bytes={
            "layer": overlapped_bytes(text, scope=OVER_DATA, opcodes=BY_DATA),
            "ends": overlapped_bytes(text, scope=ENDS_OVER_DATA, opcodes=BY_DATA),
        },
        pair_bytes=overlapped_in_pairs(text),
        link=(int(source), int(target)),
        link_bytes_asked=int(asked[source, target]),
        link_bytes_sent=int(sent[source, target]),
        host_bytes=memory.host_temp_size_in_bytes,
        predicted_host_bytes=host_bytes(shapes),
        prediction=predict(compiled, step.state, step.batch, has_dropout=step.has_dropout),
    )


def to_text(report: Report) -> str:
    """The report as lines to print: GiB per device, compiled beside predicted, and how many transfers overlap."""
    spare_bytes = report.hardware_bytes - report.total_bytes - report.reserve_bytes
    ratio = report.prediction.total_bytes / report.total_bytes
    lines = [
        f"compiled     in {report.compile_s:.1f} s; GiB of each device:",
        *_rows(
            {
                "arguments": report.argument_bytes,
                "temporaries": report.temp_bytes,
                "outputs": report.output_bytes,
                "in place": -report.alias_bytes,
            }
        ),
        f"{'total':14}{_gibibytes(report.total_bytes)}",
        f"{'reserve':14}{_gibibytes(report.reserve_bytes)}  CUDA context, NCCL, fragmentation",
        f"{'hardware':14}{_gibibytes(report.hardware_bytes)}  "
        + ("fits, spare" if report.fits else "does not fit, too much")
        + f" {gib(abs(spare_bytes))}",
        "predicted    from the schedule and the model:",
        *_rows(report.prediction.parts),
        f"{'total':14}{_gibibytes(report.prediction.total_bytes)}  {ratio:.4f} x compiled",
        f"slots        {report.num_slots} on each device, each{_gibibytes(report.slot_bytes)}: what a stage keeps of a"
        " microbatch for its backward"
        + (f"; in transit{_gibibytes(report.transit_bytes)}" if report.transit_bytes else ""),
        *_on_host(report),
        f"host waits   {report.waits_per_action:.1f} an action: loops and guards that ask the device, about 10 us each",
        *_transfers(report),
    ]
    return "\n".join(lines)


# By kind of transfer, its line: how many there are, and how many of them overlap.
_TRANSFERS = {
    "permutes": "permutes     {}; {} travel while an action computes",
    "evict_load_permutes": "evict, load  {} of these; {} travel while an action computes",
    "host_copies": "host copies  {} of blocks of pages; {} travel while an action computes",
    "exchange_permutes": "gradients    {} of these carry them to the stage's owner; {} travel while an action computes",
    "data_collectives": "data         {} gather layers and sum their gradients; {} travel while a matmul computes",
    "expert_collectives": "experts      {} collectives bring rows to them and back; {} travel while a matmul computes",
}


def _on_host(report: Report) -> list[str]:
    """The line on the host's memory; none where pages do not go there."""
    if not report.host_bytes:
        return []
    predicted = _gibibytes(report.predicted_host_bytes)
    return [f"on the host {_gibibytes(report.host_bytes)}  of pages of each device, pinned; predicted{predicted}"]


_OF_BYTES = {"layer": "of layers over data, in each traced action once", "ends": "of embedding and head"}


def _transfers(report: Report) -> list[str]:
    """Lines of what travels; a kind of transfer that the program does not have has no line."""
    lines = [_TRANSFERS[kind].format(*counts) for kind, counts in report.transfers.items() if counts[0]]
    for of, (num_bytes, num_hidden) in report.data_bytes.items():
        if num_bytes:
            lines.append(
                f"data bytes  {_gibibytes(num_bytes)}  {_OF_BYTES[of]}; {num_hidden / num_bytes:.1%} of these travel"
                " while a matmul computes"
            )
    for opcode, (num_bytes, num_hidden) in report.pair_bytes.items():
        lines.append(
            f"pair bytes  {_gibibytes(num_bytes)}  of {opcode} in layers, in each traced pair once;"
            f" {num_hidden / num_bytes:.1%} of these travel while the other half multiplies matrices"
        )
    if report.link_bytes_sent:
        lines.append(
            f"link        {_gibibytes(report.link_bytes_sent)}  a step from device {report.link[0]} of pipe to"
            f" {report.link[1]}, where most is sent; the schedule asks for{_gibibytes(report.link_bytes_asked)}"
        )
    return lines


def _rows(sizes: dict[str, int]) -> list[str]:
    return [f"  {name:12}{_gibibytes(size)}" for name, size in sizes.items() if size]


def _gibibytes(num_bytes: int) -> str:
    return gib(num_bytes, "9.3f")
