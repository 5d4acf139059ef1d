"""From a schedule to the integers that the SPMD program executes, and their clock. No JAX here."""

from jaxpipe.lowering.lower import lower
from jaxpipe.lowering.replay import Replay, replay
from jaxpipe.lowering.storage import Storage
from jaxpipe.lowering.table import IDLE, RoundTable, Segment

__all__ = ["IDLE", "Replay", "RoundTable", "Segment", "Storage", "lower", "replay"]
