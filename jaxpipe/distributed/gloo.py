"""Makes gloo quick, over which processes on CPUs exchange arrays; neither setting is an option of its (jax 0.10.2).

Its connections have send buffers of 64 KiB. Of a larger message the rest waits until the receiver has acknowledged
the first part, which Linux puts off by up to 40 ms: of a step of BitPipe with messages of 64 KiB, two processes, that
took 2.0 s of 2.1.

Its thread that receives asks for the lock of a connection again and again while the thread that computes has it. If
it has taken that thread's core, as Linux lets a thread that wakes up do, it asks in vain until its turn ends. Of a step
of ZB-H1, two processes of one core each, messages took 1.0 %; where no thread takes another's core they take 0.6 %
(docs/measured.md).
"""

from __future__ import annotations

import os
import socket

import jax

NUM_BYTES = 4 << 20
_OPEN_FILES = "/proc/self/fd"
_THREADS = "/proc/self/task"


def tune_gloo() -> None:
    """Makes exchanges between processes on CPUs quick; call it after the first one, which makes the connections.

    Does nothing on GPUs, nor where the system is not Linux.
    """
    if jax.default_backend() == "cpu":
        widen_send_buffers()
        let_threads_end_their_turns()


def widen_send_buffers(num_bytes: int = NUM_BYTES) -> int:
    """Gives this process's TCP connections send buffers of `num_bytes`; returns how many connections had less.

    The kernel's bound, net.core.wmem_max, stays in force.
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


def let_threads_end_their_turns() -> int:
    """Makes this process's threads wait for a core until its thread's turn ends; returns how many did not.

    The threads get the policy SCHED_BATCH, and so do all that they start. Threads with a policy of their own keep it.
    """
    num_changed = 0
    for name in os.listdir(_THREADS) if os.path.isdir(_THREADS) else ():
        try:
            if os.sched_getscheduler(int(name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(name), os.SCHED_BATCH, os.sched_param(0))
                num_changed += 1
        except OSError:  # ended meanwhile, or not allowed
            continue
    return num_changed
