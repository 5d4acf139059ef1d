"""Lets a command on CPUs take its buffers in pages of 2 MiB.

XLA takes a program's temporaries from the system in every step and gives them back after it. The system clears them
anew, 4 KiB at a time: a page fault each. In pages of 2 MiB the faults are a thirtieth, and addresses are found faster.
A heap that keeps what is freed (glibc's M_MMAP_MAX=0) has no faults at all, but grows to two or three times the memory:
an aligned buffer seldom fits where an equal one was.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from jaxpipe.mesh.devices import has_gpu

MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_VARIABLE = "GLIBC_TUNABLES"


def huge_pages() -> dict[str, str]:
    """What the environment of a process on CPUs lacks to have huge pages; {} where it should stay as it is.

    So it stays where glibc's allocator is set in it already, on a machine with a GPU, on another system or C library,
    with glibc before 2.35, and where the system gives huge pages to all processes or to none.
    """
    is_set = any(name == _VARIABLE or name.startswith("MALLOC_") for name in os.environ)
    if is_set or has_gpu() or not MODE.is_file() or "[madvise]" not in MODE.read_text():
        return {}
    library, number = platform.libc_ver()
    knows = library == "glibc" and tuple(map(int, number.split(".")[:2])) >= (2, 35)
    return {_VARIABLE: "glibc.malloc.hugetlb=1"} if knows else {}


def start_with_huge_pages() -> None:
    """Starts this process's program anew with `huge_pages`, if it lacks them; a command calls it before all else.

    glibc reads the variable once, before Python starts. Process number, open files and arguments stay.
    """
    if lacking := huge_pages():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | lacking)
