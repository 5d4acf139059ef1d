"""A small table of texts that all processes of a run read and write.

It is jax's own coordination service, which process 0 holds; jax offers no public way to it, so this file is the only
one that knows the private one. With one process it is a dict.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed

PREFIX = "jaxpipe/"
FIRST_WITHIN_MS = 300_000


class Store:
    """Keys and texts of one run."""

    def __init__(self) -> None:
        """The store of the processes that have joined, or of this one alone."""
        self._client: Any = distributed.global_state.client
        self._own: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        """Writes `text`; returns when every process can read it."""
        if self._client is None:
            self._own[key] = text
        else:
            self._client.key_value_set(PREFIX + key, text, allow_overwrite=True)

    def word_of_first(self, key: str, text: str, *, is_first: bool) -> str:
        """`text` of process 0, the same in all processes; waits until it is there."""
        if is_first:
            self.set(key, text)
            return text
        return self._client.blocking_key_value_get(PREFIX + key, FIRST_WITHIN_MS)

    def under(self, folder: str) -> dict[str, str]:
        """All that stands under `folder`, without it in the keys."""
        if self._client is None:
            return {key.removeprefix(folder): text for key, text in self._own.items() if key.startswith(folder)}
        found = self._client.key_value_dir_get(PREFIX + folder)
        return {key.partition(folder)[2]: text for key, text in found}
