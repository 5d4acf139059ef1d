"""An array in a file, of which only what is indexed is read: a file may be of any size.

The file is read, and not mapped to memory: where a mapped file is cut short under a run, or its disk fails, the system
ends the process without a word (SIGBUS).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxpipe.errors import DataError


@dataclass(frozen=True, eq=False)
class StoredArray:
    """The `num` numbers of a file that follow its first bytes; safe to use from several threads."""

    path: Path  # path of the file, for messages; a file that takes its name later changes nothing
    file: BinaryIO
    dtype: np.dtype
    first_byte: int  # where they begin
    num: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, positions: np.ndarray | slice, /) -> np.ndarray:
        """The numbers at `positions`, of their shape, or of a slice of step 1; DataError if the file is shorter now."""
        if isinstance(positions, slice):
            first, end, _ = positions.indices(self.num)
            numbers = np.empty(max(0, end - first), self.dtype)
            self._read(numbers, first)
            return numbers
        flat = positions.ravel()
        numbers = np.empty(flat.size, self.dtype)
        # Windows of text are runs of neighbours, each of which is read at once.
        # + 1: a border stands before the number that does not follow its neighbour.
        borders = np.concatenate([[0], np.flatnonzero(np.diff(flat) != 1) + 1, [flat.size]])
        for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            if begin < end:
                self._read(numbers[begin:end], int(flat[begin]))
        return numbers.reshape(positions.shape)

    def _read(self, numbers: np.ndarray, first: int) -> None:
        """Fills `numbers` with the numbers from position `first` on."""
        if not 0 <= first <= first + len(numbers) <= self.num:
            raise IndexError(f"positions {first} .. {first + len(numbers) - 1} of {self.num} numbers of {self.path}")
        left = numbers.view(np.uint8).data
        offset = self.first_byte + first * self.dtype.itemsize
        while left:
            # Again until all is there: the system may return fewer bytes than asked for.
            try:
                num_read = os.preadv(self.file.fileno(), [left], offset)
            except OSError as error:
                raise self._changed(f"cannot be read: {error.strerror}") from error
            if num_read == 0:
                raise self._changed("has become shorter since the run began")
            left = left[num_read:]
            offset += num_read

    def _changed(self, what: str) -> DataError:
        needed = self.first_byte + self.num * self.dtype.itemsize
        return DataError(
            f"{self.path} {what}",
            rule="data-stays: the files of data.files stay as they are while a run reads them",
            picture=f"needed {needed} bytes\nfound  {os.fstat(self.file.fileno()).st_size} bytes",
            repair="bring the file back as it was, and run the same command: it resumes from its newest checkpoint",
        )
