"""Virtual devices are made before JAX starts, and what the user set is kept."""

import os
import subprocess
import sys

import jax
import pytest

from jaxpipe.mesh.devices import choose_devices, has_gpu

PROGRAM = """
from jaxpipe.mesh import choose_devices, make_mesh
devices = choose_devices({num_devices}, platform="cpu")
mesh = make_mesh(data=2, pipe={num_devices} // 2, devices=devices.devices)
print(mesh.axis_names, mesh.devices.shape, devices.reason)
"""


OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"  # jaxlib refuses both at once


@pytest.mark.parametrize(
    ("platform", "given", "expected"),
    [
        ("auto", {}, {OLD: "0.96"}),
        ("auto", {OLD: "0.5"}, {OLD: "0.5"}),
        ("auto", {NEW: "0.5"}, {NEW: "0.5"}),
        ("cpu", {}, {}),
    ],
)
def test_programs_get_nearly_all_of_a_gpu(platform, given, expected, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # put back afterwards, with what is added
    for name in (OLD, NEW):
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    default = jax.config.values["jax_default_device"]
    try:
        choose_devices(2, platform=platform)
    finally:
        jax.config.update("jax_default_device", default)
    assert {name: os.environ[name] for name in (OLD, NEW) if name in os.environ} == expected


def _run(num_devices: int, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(num_devices=num_devices)],
        env={**os.environ, "XLA_FLAGS": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_48_virtual_devices_are_made_by_the_program_itself():
    done = _run(48)
    assert (
        "('replicate', 'data', 'pipe', 'context', 'expert', 'tensor') (1, 2, 24, 1, 1, 1) 48 virtual CPU devices"
        in done.stdout
    ), done.stderr


@pytest.mark.ci
def test_a_count_that_the_user_set_is_kept_and_checked():
    flag = "--xla_force_host_platform_device_count=4"
    assert "(1, 2, 2, 1, 1, 1) 4 virtual CPU devices" in _run(4, XLA_FLAGS=flag).stdout
    refused = _run(8, XLA_FLAGS=flag)
    assert "the mesh needs 8 devices and there are 4 CPU devices" in refused.stderr


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (
            "from jaxpipe.mesh import choose_devices; print(choose_devices(2).reason)",
            "2 virtual CPU devices, because there are 0 GPUs\n",
        ),
        pytest.param(
            "import jax; from jaxpipe.program import Pipeline; print(jax.devices('cpu')[0].platform)",
            "cpu\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import jax; from jaxpipe.training import fit; print(jax.device_count())", "1\n", marks=pytest.mark.ci
        ),
    ],
    ids=["choose_devices", "Pipeline", "fit"],
)
def test_where_there_is_no_gpu_nothing_is_said_of_cuda(program, printed):
    if has_gpu():
        pytest.skip("this machine has a GPU")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (printed, "")


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "dxg", "nvhost-gpu", "kfd"])
def test_a_gpu_is_known_by_its_device_file(tmp_path, name):
    (tmp_path / "null").touch()
    (tmp_path / "nvidia-caps").mkdir()
    assert not has_gpu(str(tmp_path))
    (tmp_path / name).touch()
    assert has_gpu(str(tmp_path))
