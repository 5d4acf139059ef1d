"""Virtual devices are made before jax starts, and what the user set is kept; each case in a process of its own."""

import os
import subprocess
import sys

PROGRAM = """
from jaxpipe.mesh import choose_devices, make_mesh
devices = choose_devices({num_devices}, platform="cpu")
mesh = make_mesh(data=2, pipe={num_devices} // 2, devices=devices.devices)
print(mesh.axis_names, mesh.devices.shape, devices.reason)
"""


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
    assert "('data', 'pipe', 'tensor') (2, 24, 1) 48 virtual CPU devices" in done.stdout, done.stderr


def test_a_count_that_the_user_set_is_kept_and_checked():
    flag = "--xla_force_host_platform_device_count=4"
    assert "(2, 2, 1) 4 virtual CPU devices" in _run(4, XLA_FLAGS=flag).stdout
    refused = _run(8, XLA_FLAGS=flag)
    assert "the mesh needs 8 devices and there are 4 CPU devices" in refused.stderr
