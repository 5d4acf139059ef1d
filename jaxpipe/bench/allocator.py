"""Keeps the memory that one step frees for the next, as JAX does on GPUs.

By default glibc gives big buffers back to the system, which then clears every page of them once more in every step:
several per cent of the processor time, more the more memory a step holds. That says nothing of the program.
"""

from __future__ import annotations

import ctypes
import sys

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MOST = 2**31 - 1


def keep_freed_memory() -> None:
    """Tells glibc's allocator to return nothing to the system; elsewhere it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((_M_TRIM_THRESHOLD, _MOST), (_M_MMAP_MAX, 0), (_M_ARENA_MAX, 1)):
            mallopt(option, value)
