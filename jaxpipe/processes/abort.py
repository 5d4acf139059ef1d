"""The last word before the C++ runtime ends this process.

jax aborts a process the moment that the coordination service, which process 0 holds, is gone, and says so in terms of
its own. What an abort says first is set here.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept = []  # the C side holds no reference


def at_abort(call: Callable[[], None]) -> None:
    """Runs `call` when this process aborts, in the thread that does; where it returns, the abort goes on.

    A handler of Python's `signal` would wait for the main thread, which an abort never lets run again.
    """
    handler = _HANDLER(lambda number: call())
    _kept.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)
