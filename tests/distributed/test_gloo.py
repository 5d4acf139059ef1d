"""Narrow TCP connections get larger send buffers, threads another policy; all others are left as they are."""

import contextlib
import os
import queue
import socket
import threading

from jaxpipe.distributed.gloo import let_threads_end_their_turns, widen_send_buffers

NARROW, WIDE = 2**15, 2**17  # below net.core.wmem_max everywhere


def send_buffer(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_narrow_connections_are_wider_and_stay_open(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
        (tmp_path / "file").open("w") as file,
    ):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NARROW)
        of_far = send_buffer(far)
        assert send_buffer(near) < WIDE <= of_far
        assert widen_send_buffers(WIDE) >= 1
        assert send_buffer(near) >= WIDE
        assert send_buffer(far) == of_far
        near.sendall(b"whole")
        assert far.recv(5) == b"whole"
        file.write("open")


def test_sockets_of_other_kinds_are_left_alone():
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NARROW)
        before = send_buffer(near)
        widen_send_buffers(WIDE)
        assert send_buffer(near) == before < WIDE


def test_threads_end_their_turns_unless_they_have_a_policy_of_their_own():
    ordinary, idle, end = queue.Queue(), queue.Queue(), threading.Event()

    def run(policy: int, found: queue.Queue) -> None:
        os.sched_setscheduler(0, policy, os.sched_param(0))
        found.put(None)
        end.wait()
        found.put(os.sched_getscheduler(0))

    threads = [threading.Thread(target=run, args=pair) for pair in ((os.SCHED_OTHER, ordinary), (os.SCHED_IDLE, idle))]
    mine = os.sched_getscheduler(0)
    try:
        for thread, found in zip(threads, (ordinary, idle), strict=True):
            thread.start()
            found.get()
        assert let_threads_end_their_turns() >= 1
        end.set()
        assert (ordinary.get(), idle.get()) == (os.SCHED_BATCH, os.SCHED_IDLE)
        assert let_threads_end_their_turns() == 0
    finally:
        end.set()
        for thread in threads:
            thread.join()
        for name in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # a thread of another test, which has ended meanwhile
                os.sched_setscheduler(int(name), mine, os.sched_param(0))
