"""What travels between devices, one file for each kind: its payloads, permutes, rows, buffers and durations."""

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.lowering.transfers.messages import MESSAGES
from jaxpipe.lowering.transfers.sums_over_data import SUMS_OVER_DATA
from jaxpipe.schedules.schedule import Schedule

__all__ = ["TRANSFERS", "traffic_of"]

# Those that follow from a schedule, with flush and without; messages come first.
TRANSFERS: tuple[Transfer[RoundTable], ...] = (MESSAGES, SUMS_OVER_DATA)


def traffic_of(schedule: Schedule, *planned: Transfer[RoundTable]) -> tuple[Transfer[RoundTable], ...]:
    """What travels in a table of `schedule`: of `TRANSFERS` what it asks for, and what was `planned` in rounds."""
    first, *others = (transfer for transfer in TRANSFERS if transfer.is_asked_for(schedule))
    return first, *planned, *others
