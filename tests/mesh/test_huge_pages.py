"""Commands on CPUs start with huge pages, unless the user or the machine speaks against it; and page faults get few."""

import os
import subprocess
import sys

import pytest

from jaxpipe.mesh import huge_pages

ASKED = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Takes, fills and frees one buffer after another, and says how many pages the system cleared.
PROGRAM = """
import ctypes, os, resource, sys
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    buffer = libc.malloc(64 << 20)
    libc.memset(buffer, 1, 64 << 20)
    libc.free(buffer)
print(os.getpid(), sys.argv[1:], resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
if "GLIBC_TUNABLES" not in os.environ:
    from jaxpipe.mesh.huge_pages import start_with_huge_pages
    start_with_huge_pages()
    print("not started anew")
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Sets what is asked before a start: variables, the system's mode, the C library, whether there is a GPU."""

    def sets(*, mode="always [madvise] never", library=("glibc", "2.35"), gpu=False, **variables):
        for name in [name for name in os.environ if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if mode is not None:
            (tmp_path / "enabled").write_text(mode)
        monkeypatch.setattr(huge_pages, "MODE", tmp_path / "enabled")
        monkeypatch.setattr(huge_pages.platform, "libc_ver", lambda: library)
        monkeypatch.setattr(huge_pages, "has_gpu", lambda: gpu)

    return sets


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, ASKED),
        ({"library": ("glibc", "2.41")}, ASKED),
        ({"library": ("glibc", "2.34")}, {}),
        ({"library": ("musl", "2.41")}, {}),
        ({"library": ("", "")}, {}),
        ({"mode": None}, {}),
        ({"mode": "[always] madvise never"}, {}),
        ({"mode": "always madvise [never]"}, {}),
        ({"gpu": True}, {}),
        ({"GLIBC_TUNABLES": ""}, {}),
        ({"MALLOC_ARENA_MAX": "1"}, {}),
    ],
)
def test_what_a_start_adds_to_the_environment(machine, given, added):
    machine(**given)
    assert huge_pages.huge_pages() == added


def test_a_program_starts_anew_with_few_page_faults():
    environment = {
        name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--a", "b c"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert not ran.returncode, ran.stderr
    first, second = ran.stdout.splitlines()
    if second == "not started anew":
        pytest.skip("the system gives huge pages to all or to none, or has a GPU")
    (before, faults), (after, fewer) = (line.rsplit(" ", 1) for line in (first, second))
    assert before == after  # the same process and arguments
    assert int(fewer) < int(faults) / 8
