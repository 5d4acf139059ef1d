"""The walk of docs/architecture.md: its files and functions exist, are few, and the program goes through them."""

import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxpipe
from jaxpipe.mesh import choose_devices, make_mesh
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
STEPS = re.findall(r"^\| \d+ \| \[(\S+)\]\(\.\./jaxpipe/(\S+)\) \| `([\w.]+)` \|", PAGE, re.MULTILINE)
MOST_FILES = 20
ONLY_READ_BY_TESTS = {"compile/hlo.py"}


def test_the_walk_is_short():
    files = [file for _, file, _ in STEPS]
    assert len(files) == len(re.findall(r"^\| \d+ \|", PAGE, re.MULTILINE))  # no step has another form
    assert len(set(files)) == len(files)
    assert 10 < len(files) <= MOST_FILES


@pytest.mark.parametrize(("shown", "file", "function"), STEPS, ids=[file for _, file, _ in STEPS])
def test_each_step_is_there(shown, file, function):
    assert shown == file
    found = importlib.import_module("jaxpipe." + file.removesuffix(".py").replace("/", "."))
    for name in function.split("."):
        found = getattr(found, name)


def test_the_program_goes_through_every_step():
    """Lowering and tracing a 1F1B step enters each file of the walk."""
    entered = set()

    def note(frame, event, _):
        if event == "call":
            entered.add(frame.f_code.co_filename)

    def layer(params, x, batch, random):
        return x + jnp.tanh(x @ params["kernel"])

    def head(shared, x, batch):
        return (x @ shared["table"].T).sum()

    params = {"shared": {"table": jnp.zeros((8, 4))}, "layers": {"kernel": jnp.zeros((4, 4, 4))}}
    batch = {"tokens": jnp.zeros((6, 2, 3), int)}
    mesh = make_mesh(pipe=4, devices=choose_devices(4, platform="cpu").devices)
    functions = StageFunctions(lambda shared, batch, random: shared["table"][batch["tokens"]], layer, head)
    sys.setprofile(note)
    try:
        pipeline = Pipeline(build("1f1b", num_devices=4, num_microbatches=6), mesh, functions, num_layers=4)
        program = pipeline.loss_and_grads.lower(pipeline.to_stages(params), batch, 1.0).as_text()
    finally:
        sys.setprofile(None)
    assert "collective_permute" in program
    folder = Path(jaxpipe.__file__).parent
    files = {file for _, file, _ in STEPS} - ONLY_READ_BY_TESTS
    assert {file for file in files if str(folder / file) not in entered} == set()
    assert jax.device_count() >= 4
