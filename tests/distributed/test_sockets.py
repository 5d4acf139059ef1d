"""Narrow TCP connections get larger send buffers; all other files are left as they are."""

import socket

from jaxpipe.distributed.sockets import widen_send_buffers

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
