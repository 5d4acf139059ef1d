"""Send buffers of the connections over which processes on CPUs exchange arrays.

gloo's connections have 64 KiB (jax 0.10.2). Of a larger message the rest waits until the receiver has acknowledged
the first part, which Linux puts off by up to 40 ms: of a step of BitPipe with messages of 64 KiB, two processes, that
took 2.0 s of 2.1. gloo has no option for it.
"""

from __future__ import annotations

import os
import socket

NUM_BYTES = 4 << 20
_OPEN_FILES = "/proc/self/fd"


def widen_send_buffers(num_bytes: int = NUM_BYTES) -> int:
    """Gives this process's TCP connections send buffers of `num_bytes`; returns how many connections had less.

    Call it after the first exchange, which makes the connections. The kernel's bound, net.core.wmem_max, stays in
    force. Does nothing where the system is not Linux.
    """
    num_widened = 0
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        try:
            connection = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        if (
            connection.family in (socket.AF_INET, socket.AF_INET6)
            and connection.type == socket.SOCK_STREAM
            and connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < num_bytes
        ):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)
            num_widened += 1
        connection.detach()  # whoever opened it keeps it
    return num_widened
