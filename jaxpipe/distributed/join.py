"""Joins the processes of a run: by flags, or as JAX detects SLURM, Kubernetes and Open MPI.

Join before JAX starts its backends. A process alone joins nothing. Only this file and `absent` use JAX's private
modules.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import clusters, distributed

from jaxpipe.errors import ConfigError, LostProcess

_COUNT_IN_ENVIRONMENT = ("slurm", "ompi")  # launchers whose number of processes needs no request
REACHED_WITHIN_S = 2.0
# JAX measures the silence of a process by the wall clock, and aborts all processes when that is set forward by more
# than its limit, or back to before they joined. So its limit is the largest that it takes, 68 years, and `Watch`
# notices lost processes, by a clock that nobody sets.
_NEVER_S = 2**31 - 1


@dataclass(frozen=True)
class Rank:
    """The rank of this process among all processes of a run."""

    index: int  # number of this process; process 0 prints, and writes the files that exist once
    count: int

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0


def check_flags(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Raises ConfigError if only some of the three flags are given, or if they contradict each other."""
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    written = " ".join(f"--{name}={value}" for name, value in given.items() if value is not None)
    repair = "give all three, or none and let jax find SLURM, Kubernetes or Open MPI; on one machine, jaxpipe.launch"
    if missing:
        raise ConfigError(
            f"{', '.join(f'--{name}' for name in missing)} missing beside {written}",
            rule="processes: address of process 0, number of processes and own number belong together",
            repair=repair,
        )
    if ":" not in str(coordinator_address) or process_id not in range(num_processes or 0):
        raise ConfigError(
            f"{written} name no process of a run",
            rule="processes: --coordinator_address=HOST:PORT, and --process_id is 0 .. --num_processes - 1",
            repair=repair,
        )


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Rank:
    """Joins the other processes of a run; returns when all have joined.

    Args:
        coordinator_address: HOST:PORT of process 0; with None for all three jax looks for a cluster.

    Raises:
        ConfigError: the flags do not belong together.
        LostProcess: not all processes have joined in time.
    """
    check_flags(coordinator_address, num_processes, process_id)
    if coordinator_address is None and not has_others():
        return Rank(0, 1)
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id, heartbeat_timeout_seconds=_NEVER_S)
    except (RuntimeError, ValueError) as error:
        raise LostProcess(
            f"the processes did not find each other: {str(error).splitlines()[0]}",
            rule="processes: all processes start within five minutes and reach process 0",
            picture=(
                f"--coordinator_address={coordinator_address} --num_processes={num_processes} --process_id={process_id}"
            ),
            repair="start as many as --num_processes says, with an address of process 0 that all of them reach",
        ) from error
    return Rank(distributed.global_state.process_id, distributed.global_state.num_processes or 1)


def has_others() -> bool:
    """Whether JAX detects a cluster's launcher, and that has not started this process alone.

    JAX gives a process under SLURM or Open MPI one GPU; the only one, as in an interactive shell of srun, takes all.
    """
    kinds = clusters.ClusterEnv._cluster_types
    launcher = next((kind for kind in kinds if not kind.opt_in_only_method and kind.is_env_present()), None)
    return launcher is not None and not (launcher.name in _COUNT_IN_ENVIRONMENT and launcher.get_process_count() == 1)


def reaches_first() -> bool:
    """Whether the address of process 0 accepts connections."""
    # From the right: an address of IPv6 has colons itself, in brackets.
    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_WITHIN_S):
            return True
    except OSError:
        return False


def exit_now(status: int) -> None:
    """Exits at once, without the barrier at which JAX would wait for missing processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---- The key-value store that all processes of a run read and write: JAX's own coordination service, held by
# process 0. JAX has no public way to it, so only this file uses the private one. With one process it is a dict.

PREFIX = "jaxpipe/"
FIRST_WITHIN_MS = 300_000
ALL_WITHIN_MS = 86_400_000  # a day: the watch ends the wait for a process that is lost


class Store:
    """A key-value store of strings, shared by the processes of one run."""

    def __init__(self) -> None:
        """Opens the store of the joined processes, or one of this process alone."""
        self._client: Any = distributed.global_state.client
        self._own: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        """Writes `text` under `key`; returns when every process can read it."""
        if self._client is None:
            self._own[key] = text
        else:
            self._client.key_value_set(PREFIX + key, text, allow_overwrite=True)

    def broadcast_from_first(self, key: str, text: str, *, is_first: bool) -> str:
        """Returns, in all processes, the `text` that process 0 passes; waits until it is written."""
        if is_first:
            self.set(key, text)
            return text
        return self._client.blocking_key_value_get(PREFIX + key, FIRST_WITHIN_MS)

    def wait_for_all(self, key: str) -> None:
        """Returns when all processes have called it with the same `key`, each once."""
        if self._client is not None:
            self._client.wait_at_barrier(PREFIX + key, ALL_WITHIN_MS)

    def under(self, folder: str) -> dict[str, str]:
        """The entries whose keys begin with `folder`, with that prefix removed."""
        if self._client is None:
            return {key.removeprefix(folder): text for key, text in self._own.items() if key.startswith(folder)}
        entries = self._client.key_value_dir_get(PREFIX + folder)
        return {key.partition(folder)[2]: text for key, text in entries}
