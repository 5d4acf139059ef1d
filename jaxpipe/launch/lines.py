"""What a process prints, cut into whole lines with its number before each.

A progress bar ends its lines with a carriage return, so that the next one is written over it; they stay such lines.
Left to others: where they are written.
"""

from __future__ import annotations

import re

# After a line's end; of a carriage return that nothing follows yet, nobody knows whether a newline does.
_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


class Lines:
    """The lines of one stream of one process, from pieces that end anywhere."""

    def __init__(self, process: int):
        """Of the process with number `process`."""
        self._prefix = f"[{process}] ".encode()
        self._rest = b""
        self._shown = b""

    def feed(self, piece: bytes) -> bytes:
        """The lines that `piece` completes, and what has come of a progress bar."""
        *whole, self._rest = _ENDS.split(self._rest + piece)
        lines = [line for line in whole if line.strip() or line.endswith(b"\n")]
        if lines and lines[0] == self._shown:
            del lines[0]
        if whole:
            self._shown = b""
        # A bar returns before it writes, not after: to wait for its end is to be late by one.
        if whole and whole[-1].endswith(b"\r") and self._rest.strip():
            self._shown = self._rest.rstrip(b"\r") + b"\r"
            lines.append(self._shown)
        return b"".join(self._prefix + line for line in lines)

    def end(self) -> bytes:
        """What has no end when the stream has."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return self._prefix + rest + b"\n" if rest.strip() else b""
