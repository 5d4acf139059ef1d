"""48 virtual devices on few cores: the program runs to its end and is right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import tiny_mlp
from jaxpipe.mesh import choose_devices
from jaxpipe.schedules import build

choose_devices(48, platform="cpu")
tiny_mlp.assert_equivalent(tiny_mlp.make_pipeline(build("1f1b", num_devices=48, num_microbatches=4), num_layers=49))
"""


@pytest.mark.ci
def test_forty_eight_devices_have_the_gradients_of_plain_grad():
    # Without this suite's own flags: the collective time-outs are those that jaxpipe sets for its users.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
