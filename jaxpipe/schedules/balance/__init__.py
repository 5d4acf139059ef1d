"""BPipe as a pass on any schedule: what a device stores beyond a bound, it parks with its partner."""

from jaxpipe.schedules.balance.balancing import POLICIES, UNITS, balance, check_options, least_bound, row_peaks

__all__ = ["POLICIES", "UNITS", "balance", "check_options", "least_bound", "row_peaks"]
