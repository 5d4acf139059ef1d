"""A report as text: GiB of one device, what was predicted beside what was compiled, and what hides the transfers."""

from __future__ import annotations

from jaxpipe.compile.report import Report


def to_text(report: Report) -> str:
    """Lines to print, without what was compiled for what."""
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
        + f" {abs(spare_bytes) / 2**30:.2f}",
        "predicted    from the schedule and the model:",
        *_rows(report.prediction.parts),
        f"{'total':14}{_gibibytes(report.prediction.total_bytes)}  {ratio:.4f} x compiled",
        f"slots        {report.num_slots} of{_gibibytes(report.slot_bytes)}, in transit"
        f"{_gibibytes(report.transit_bytes)}",
        f"permutes     {report.permutes}, {report.overlapped_permutes} behind an action",
        f"evict, load  {report.evict_load_permutes} of these, {report.overlapped_evict_load_permutes} behind an action",
        f"exchange     {report.exchange_permutes} of these, {report.overlapped_exchange_permutes} behind an action",
    ]
    return "\n".join(lines)


def _rows(sizes: dict[str, int]) -> list[str]:
    return [f"  {name:12}{_gibibytes(size)}" for name, size in sizes.items()]


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:9.3f}"
