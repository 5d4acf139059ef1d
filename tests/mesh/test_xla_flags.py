"""The user's flags stay, ours come in once, and one that the installed XLA lacks does not end the process."""

import os
import subprocess
import sys
import warnings

import pytest

from jaxpipe.mesh import xla_flags as flags
from jaxpipe.mesh.xla_flags import CPU_FLAGS, DETERMINISTIC_GPU_FLAGS, GPU_FLAGS, add_flags, given_flags, is_known

ALL_FLAGS = GPU_FLAGS | DETERMINISTIC_GPU_FLAGS | CPU_FLAGS
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
UNKNOWN = "xla_gpu_enable_latency_hiding"  # the beginning of one that is known

START = """
import warnings
from jaxpipe.mesh.xla_flags import add_flags
{statement}
import jax
print(len(jax.devices("cpu")), "devices")
"""


def started(statement: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", START.format(statement=statement)],
        env={**os.environ, "XLA_FLAGS": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def xla_flags(monkeypatch):
    """Sets XLA_FLAGS for one test; returns what it holds now."""

    def set_flags(written: str) -> None:
        monkeypatch.setenv("XLA_FLAGS", written)

    return set_flags


@pytest.mark.parametrize("name", ALL_FLAGS)
def test_recommended_flags_are_known(name):
    assert is_known(name)


def test_the_installed_xla_takes_the_recommended_flags():
    done = started(f"add_flags({ALL_FLAGS})")
    assert (done.stdout, done.returncode) == ("1 devices\n", 0), done.stderr


@pytest.mark.ci
def test_an_unknown_flag_ends_a_process_that_sets_it_and_is_left_out_by_us():
    assert "Unknown flag" in started("pass", XLA_FLAGS=f"--{UNKNOWN}=true").stderr
    done = started(f"add_flags({{'{UNKNOWN}': 'true', '{SCHEDULER}': 'true'}})")
    assert (done.stdout, done.returncode) == ("1 devices\n", 0), done.stderr
    assert f"UserWarning: XLA flag {UNKNOWN}=true is left out" in done.stderr
    assert f"XLA flag {SCHEDULER}" not in done.stderr


def test_a_warning_says_what_is_lost(xla_flags, monkeypatch):
    xla_flags("")
    monkeypatch.setattr(flags, "is_known", lambda name: False)
    with pytest.warns(UserWarning, match="without it, the first pass may move"):
        add_flags({"xla_disable_hlo_passes": "collective-permute-motion"})
    assert os.environ["XLA_FLAGS"] == ""


def test_what_the_user_set_stays(xla_flags):
    xla_flags(f"--{SCHEDULER}=false --xla_dump_to=folder")
    add_flags({SCHEDULER: "true", "xla_dump_to": "elsewhere"})
    assert os.environ["XLA_FLAGS"] == f"--{SCHEDULER}=false --xla_dump_to=folder"


def test_a_flag_whose_name_begins_or_ends_another_is_another(xla_flags):
    """`xla_dump_hlo_as_text` set by the user is no reason to leave `xla_dump_hlo` out, nor is a value."""
    xla_flags(f"--{SCHEDULER}_too=true --xla_dump_to=/{SCHEDULER}")
    add_flags({SCHEDULER: "true"})
    assert os.environ["XLA_FLAGS"].endswith(f" --{SCHEDULER}=true")


def test_adding_twice_adds_once(xla_flags):
    xla_flags("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_flags(GPU_FLAGS)
        written = os.environ["XLA_FLAGS"]
        add_flags(GPU_FLAGS)
    assert os.environ["XLA_FLAGS"] == written == " ".join(f"--{name}={value}" for name, value in GPU_FLAGS.items())


def test_flags_in_a_file_stay(xla_flags, tmp_path):
    """XLA reads a file where XLA_FLAGS does not begin with a dash."""
    file = tmp_path / "flags"
    file.write_text("--xla_dump_to=folder\n--xla_dump_hlo_as_text\n")
    xla_flags(str(file))
    assert given_flags() == {"xla_dump_to", "xla_dump_hlo_as_text"}
    add_flags({SCHEDULER: "true"})
    assert os.environ["XLA_FLAGS"].split() == ["--xla_dump_to=folder", "--xla_dump_hlo_as_text", f"--{SCHEDULER}=true"]


def test_every_library_that_reads_the_flags_must_know_them(monkeypatch, tmp_path):
    both, one = tmp_path / "libjax_common.so", tmp_path / "xla_cuda_plugin.so"
    both.write_bytes(b"\0xla_a\0xla_abc\0")
    one.write_bytes(b"\0xla_abc\0")
    monkeypatch.setattr(flags, "_libraries", lambda: [both, one])
    assert is_known("xla_abc")
    assert not is_known("xla_a")
    assert not is_known("xla_ab")
    monkeypatch.setattr(flags, "_libraries", list)
    assert is_known("xla_ab")


@pytest.mark.parametrize(("platform", "others"), [("cpu", ["xla_cpu_a=1"]), ("gpu", ["xla_gpu_b=x,y"])])
def test_flags_of_a_platform_leave_out_those_of_the_other(xla_flags, platform, others):
    xla_flags("--xla_gpu_b=x,y --xla_cpu_a=1 --xla_z")
    assert flags.flags_of(platform) == [*others, "xla_z"]
