"""The environment of processes that share a GPU: a part of its memory for each, and an NCCL that accepts them.

NCCL refuses two ranks on one GPU of one host. From 2.30 a variable allows them, and messages are copies within the
GPU's memory. Before that each process claims to be a host of its own, and messages travel through sockets. Nothing of
the machine is changed: the GPU gives its processes time slices in turn, so a message takes milliseconds.

Goes in: the number of a process and how many share a device. Comes out: environment variables. Left to others: which
of them the user has set (`jaxpipe.launch`). Imports no JAX, since the launcher does not.

Source: NCCL's user guide, "Environment Variables"; its src/misc/utils.cc for NCCL_HOSTID.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from jaxpipe.errors import ConfigError

Version = tuple[int, ...]

MOST_PROCESSES_PER_DEVICE = 16  # beyond, what CUDA and NCCL take leaves programs less than 2 % of the memory each
MEMORY_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
_OVERHEAD_FRACTION = 0.04  # of a GPU's memory, for CUDA and NCCL in each process: 3 GiB of 80


class _Since(NamedTuple):
    """What NCCL needs from a version on, until the next row."""

    version: Version
    variables: Mapping[str, str]  # PROCESS stands for the number of the process


PROCESS = "{process}"
NCCL_VARIABLES = (
    _Since(
        (2, 17),  # NCCL_MAX_CTAS; NCCL_HOSTID is older
        {
            "NCCL_HOSTID": PROCESS,
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
        },
    ),
    _Since((2, 30), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
)
# Too few multiprocessors for the blocks of all ranks would be a hang; NVLS knows no two ranks on one GPU.
EVERY_NCCL = {"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


def memory_fraction(num_processes: int = 1) -> str:
    """The fraction of a GPU's memory for the programs of each of `num_processes` that share it.

    Example:
        >>> [memory_fraction(number) for number in (1, 2, 4)]
        ['0.96', '0.46', '0.21']
    """
    return f"{1 / num_processes - _OVERHEAD_FRACTION:.3g}"


def variables(process: int, *, processes_per_device: int, nccl: Version | None) -> dict[str, str]:
    """The environment variables of a process that shares its device with others.

    Args:
        nccl: version of NCCL; None, not known, takes what every version accepts.

    Raises:
        ConfigError: NCCL is too old.
    """
    least, who = max((NCCL_VARIABLES[0].version, "a share of a GPU"), _asked_by_jax())
    if nccl is not None and nccl < least:
        raise ConfigError(
            f"NCCL {in_words(nccl)} is too old for --processes_per_device",
            rule=f"nccl-version: {who} needs NCCL {in_words(least)}",
            picture=f"{in_words(nccl)} < {in_words(least)}",
            repair="pip install -U nvidia-nccl-cu13, or -cu12 for CUDA 12",
        )
    rows = [row for row in NCCL_VARIABLES if nccl is None or row.version <= nccl]
    nccls = rows[0 if nccl is None else -1].variables
    return {
        "JAX_LOCAL_DEVICE_IDS": str(process // processes_per_device),
        MEMORY_VARIABLES[0]: memory_fraction(processes_per_device),
        **{name: str(process) if value == PROCESS else value for name, value in nccls.items()},
        **EVERY_NCCL,
    }


def given(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment`, in which a fraction of memory has the name that `variables` gives it.

    jaxlib reads the fraction under two names, and refuses both at once.
    """
    fractions = [environment[name] for name in MEMORY_VARIABLES if environment.get(name)]
    return {**environment, **({MEMORY_VARIABLES[0]: fractions[0]} if fractions else {})}


def installed_nccl() -> Version | None:
    """The version of the NCCL that JAX loads, as (2, 30, 7); None if none is there. Loads no CUDA and asks no GPU.

    JAX takes pip's library, else that of the system. The library itself is asked, and not the metadata of its package:
    those for CUDA 12 and 13 write the same file, so that the last one to be installed is there.
    """
    for library in (*_of_pip(), "libnccl.so.2"):
        number = ctypes.c_int()
        try:
            if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number)) == 0:
                # NCCL_VERSION_CODE: 2708 is 2.7.8, and from 2.9 on 23007 is 2.30.7.
                code = number.value
                large = 10_000 if code >= 10_000 else 1000
                return code // large, code % large // 100, code % 100
        except (OSError, AttributeError):  # there is none, or it is no NCCL
            continue
    return None


def in_words(version: Version) -> str:
    """As people write it: 2.30.7."""
    return ".".join(map(str, version))


def _of_pip() -> list[str]:
    try:
        spec = find_spec("nvidia.nccl")
    except ImportError:  # no package of NVIDIA's
        return []
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return [str(path) for folder in folders if (path := Path(folder) / "lib" / "libnccl.so.2").is_file()]


def _asked_by_jax() -> tuple[Version, str]:
    """The least version of NCCL that JAX's plugin asks pip for, and the plugin; no version without a plugin."""
    for plugin in ("jax-cuda13-plugin", "jax-cuda12-plugin"):  # in JAX's own order
        try:
            asked = requires(plugin) or []
        except PackageNotFoundError:
            continue
        for line in asked:
            if version := re.match(r"nvidia-nccl-cu\d+>=([\d.]+)", line):
                return tuple(map(int, version[1].split("."))), plugin
    return (), ""
