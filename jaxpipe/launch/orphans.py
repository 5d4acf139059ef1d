"""A process that ends with the one that started it, however that one ends, be it by SIGKILL.

Linux alone can do so (prctl(2), PR_SET_PDEATHSIG); elsewhere a launcher that is killed leaves its processes behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent() -> Callable[[], None] | None:
    """What a new process is to call before it becomes another program; None where there is no such call.

    The signal comes when the thread ends that started the process: start it from one that lives as long as its process.
    Nothing else may run in threads then, as in every process that is forked.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up here: a forked process should do little

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # it has ended in between, and no signal will come
            os._exit(1)

    return call
