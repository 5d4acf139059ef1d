"""The XLA flags that jaxpipe sets, each with its reason, and how they get into XLA_FLAGS.

Flags that the user has set there are kept. XLA ends the process at an unknown flag, so flags that the installed jaxlib
or its GPU plugin lack are left out, with a warning.

Not set, since nothing has been measured on GPUs that send: pipelined sends and receives, loop double buffering, larger
thresholds for combining reductions and gathers.
"""

from __future__ import annotations

import mmap
import os
import re
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jaxlib


class Flag(NamedTuple):
    """An XLA flag with its value and the reason for setting it."""

    name: str
    value: str
    reason: str  # completes "without it, ..."


_OVERLAP = (
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        "true",
        "permutes may wait for compute, and compute for permutes: it is the default on some GPUs and programs only",
    ),
    Flag(
        "xla_disable_hlo_passes",
        "collective-permute-motion,collective-pipeliner-forward",
        "the first pass may move a round's permutes behind the action that they should travel during; the second may "
        "make constants as large as the saved activations: compiling Llama 3 8B on data 4 x pipe 2 takes over 20 GiB",
    ),
    Flag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "4",
        "one collective at a time overlaps compute, and a round's other permutes stop it",
    ),
    Flag(
        "xla_gpu_collective_permute_combine_threshold_bytes",
        str(2**40),
        "the arrays of a page larger than 30 MiB together travel one by one, and few of these overlap compute",
    ),
    *(
        Flag(
            f"xla_gpu_{collective}_combine_threshold_bytes",
            str(2**30),
            "the gathers or sums of a layer larger than 30 MiB together travel one by one, and a fifth of their bytes "
            "overlaps nothing",
        )
        for collective in ("all_gather", "reduce_scatter")
    ),
    Flag(
        "xla_gpu_memory_limit_slop_factor",
        "950",
        "a program whose temporaries take more than 95 % of what its arguments leave of 80 % of the memory is "
        "scheduled for memory alone, and nothing overlaps, although it fits",
    ),
)
_KERNELS = (
    Flag(
        "xla_gpu_enable_triton_gemm",
        "false",
        "every kernel is copied out of its stack for a matmul of Triton, before it is known whether cuBLAS is faster; "
        "cuBLAS reads the stack in place: 1,664 MiB a microbatch of a LLaMA-3 8B layer, compiled for an absent H100",
    ),
)
_DETERMINISTIC = (
    Flag(
        "xla_gpu_exclude_nondeterministic_ops",
        "true",
        "sums by atomic additions differ from run to run",
    ),
)
_ALONE = (
    Flag(
        "xla_gpu_shard_autotuning",
        "false",
        "each process tries its share of the kernels, and waits for what those that are not there have found",
    ),
)
_SHARED_CORES = (
    Flag(
        "xla_cpu_collective_call_warn_stuck_timeout_seconds",
        "600",
        "devices that share a core and so arrive late at a collective are warned of",
    ),
    Flag(
        "xla_cpu_collective_call_terminate_timeout_seconds",
        "3600",
        "devices that share a core and so arrive late at a collective end the run",
    ),
)

GPU_FLAGS = {flag.name: flag.value for flag in (*_OVERLAP, *_KERNELS)}
DETERMINISTIC_GPU_FLAGS = {flag.name: flag.value for flag in _DETERMINISTIC}
MOCKED_GPU_FLAGS = {flag.name: flag.value for flag in _ALONE}
CPU_FLAGS = {flag.name: flag.value for flag in _SHARED_CORES}
_REASONS = {flag.name: flag.reason for flag in (*_OVERLAP, *_KERNELS, *_DETERMINISTIC, *_ALONE, *_SHARED_CORES)}


def add_flags(flags: Mapping[str, Any]) -> None:
    """Adds flags to XLA_FLAGS that the user has not set there; call it before JAX starts its backends.

    Warns about a flag that the installed XLA does not know, and leaves it out.

    Args:
        flags: name, without dashes -> value.
    """
    given = given_flags()
    added = []
    for name, value in flags.items():
        if name in given:
            continue
        if is_known(name):
            added.append(f"--{name}={value}")
        else:
            consequence = f"; without it, {_REASONS[name]}" if name in _REASONS else ""
            warnings.warn(
                f"XLA flag {name}={value} is left out: jaxlib {version('jaxlib')} or its GPU plugin does not know it"
                + consequence,
                stacklevel=2,
            )
    # Flags of the user come first and stay as written.
    os.environ["XLA_FLAGS"] = " ".join([_written(), *added]).strip()


def given_flags() -> set[str]:
    """The names of the flags that XLA_FLAGS sets."""
    return {flag.partition("=")[0] for flag in _flags()}


def flags_of(platform: str) -> list[str]:
    """The flags in XLA_FLAGS, as "name=value", but those of the other platform alone.

    Args:
        platform: "cpu" or "gpu".
    """
    other = {"cpu": "xla_gpu_", "gpu": "xla_cpu_"}[platform]
    return sorted(flag for flag in _flags() if not flag.startswith(other))


def _flags() -> list[str]:
    return re.findall(r"(?:^|\s)--(\w+\S*)", _written())


def is_known(name: str) -> bool:
    """Whether every installed library that reads XLA_FLAGS knows the flag; True if there is no library to search.

    A library holds each name followed by a zero byte, so the beginning of a longer name is not found. The search takes
    milliseconds for a known name, which is in the first 20 MiB, and about a second for an unknown one.
    """

    def holds(library: Path) -> bool:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return mapped.find(name.encode() + b"\0") >= 0

    # Every library reads the same XLA_FLAGS, and each ends the process at a flag that it does not know.
    return all(map(holds, _libraries()))


def _written() -> str:
    """The flags in XLA_FLAGS, or in the file that it names instead."""
    written = os.environ.get("XLA_FLAGS", "").strip()
    # XLA takes a value without a dash for the name of a file.
    return written if written.startswith("-") or not written else Path(written).read_text().strip()


def _libraries() -> list[Path]:
    """The libraries of jaxlib and its GPU plugins, which all read the same XLA_FLAGS."""
    plugins = find_spec("jax_plugins")
    folders = list(plugins.submodule_search_locations or ()) if plugins else []
    return [
        *Path(jaxlib.__file__).parent.glob("libjax_common.*"),
        *(library for folder in folders for library in Path(folder).glob("xla_*/*_plugin.so")),
    ]
