"""Eight virtual CPU devices for the whole suite, set before anything starts a JAX backend.

Nothing here imports JAX by itself, so that tests of the pure parts run without it. No compilation cache: programs of
several CPU devices that were loaded from one have hung (jax 0.10.2 and 0.12.0.1, about one run in eight). Equal
programs of a process share one executable, see `shared_programs`.
"""

import gc
import os
import sys
from collections import Counter
from importlib.metadata import version

import pytest
from shared_programs import share_programs

collect_ignore = ["added"]  # scripts for copies of the package with something added

XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Devices share few cores: one may be late to a collective for a long time without being stuck.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    # LLVM takes a tenth less for a program in one piece; 32 pieces are for idle cores.
    "--xla_cpu_parallel_codegen_split_count=1",
)

# Small programs compile in half the time without XLA's fusion emitters; 0.12 has no other way, nor this flag.
if version("jaxlib").startswith("0.10."):
    XLA_FLAGS += ("--xla_cpu_use_fusion_emitters=false",)

os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS)).strip()  # the last one wins
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
# LLVM takes half the time without its expensive passes. The optimized HLO is the same; numbers are, to rounding.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# Programs that differ only in the lines of tests that call for them are equal, and compiled once.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"


def pytest_addoption(parser):
    parser.addoption("--method", action="append", default=[], help="a Python file with a method, swept like all others")


def pytest_configure(config):
    from jaxpipe.schedules.methods.registry import register_file

    for path in config.getoption("--method"):
        register_file(path)


def pytest_collection_finish():
    if "jax" in sys.modules:
        share_programs()
    gc.freeze()  # what is imported stays: no collection looks at it again
    gc.set_threshold(200_000)  # traces are many small objects: one in seven seconds went to looking for rubbish


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """A test stands in one tier: of those marked ci, the second tier leaves out what is slow besides.

    Files of few tests come first: their tests are long, and a long one that comes last leaves a core idle.
    """
    if config.option.markexpr == "ci":
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    num_tests = Counter(item.location[0] for item in items)
    items.sort(key=lambda item: num_tests[item.location[0]])
