"""A port of this machine that no program uses."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port at which processes of this machine can meet: free now, and not kept."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
