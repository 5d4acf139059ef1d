"""Lowers a schedule to the integers that the SPMD program executes, and times them. No JAX here."""

from jaxpipe.lowering.cells import IDLE
from jaxpipe.lowering.lower import lower, spmd_makespan
from jaxpipe.lowering.pages import Pages
from jaxpipe.lowering.replay import Replay, replay
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.lowering.transfers.messages import Inbox

__all__ = ["IDLE", "Inbox", "Pages", "Replay", "RoundTable", "Transfer", "lower", "replay", "spmd_makespan"]
