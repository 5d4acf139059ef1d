"""What cannot be compiled is refused with its rule and a repair, and without an attempt."""

import pytest

from jaxpipe.cluster.hardware import HARDWARE
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import gpus as checks
from jaxpipe.compile.gpus import check_compilable, check_plugin
from jaxpipe.config import base_config
from jaxpipe.errors import ConfigError


def refused(topology: str, **mesh) -> str:
    config = base_config()
    config.mesh.update(mesh)
    with pytest.raises(ConfigError) as error:
        check_compilable(config, parse_topology(topology))
    return str(error.value)


def test_a_mesh_is_as_large_as_the_topology():
    config = base_config()
    config.mesh.update(data=2, pipe=4, tensor=4)
    check_compilable(config, parse_topology("a100-80g:4x8"))


@pytest.mark.parametrize(
    ("topology", "repair"),
    [
        ("a100-80g:4x8", "set mesh.data=4"),
        ("a100-80g:1x4", "give --topology=a100-80g:2x4"),
        ("a100-80g:1x7", "set axes that multiply to 7"),
    ],
)
def test_a_mesh_of_another_size_is_refused_with_what_would_fit(topology, repair):
    message = refused(topology, pipe=4, tensor=2)
    assert "rule compile-devices" in message
    assert "1 x 4 x 1 x 1 x 2 = 8" in message
    assert repair in message


def test_a_gpu_that_the_compiler_does_not_know_is_refused():
    message = refused("v100:1x8", pipe=8)
    assert "Tesla V100-SXM2-16GB" in message
    assert "rule compile-hardware" in message
    assert "7.0 < 7.5" in message


@pytest.mark.parametrize("name", sorted(HARDWARE.keys() - {"v100"}))
def test_all_other_gpus_are_compiled_for(name):
    config = base_config()
    config.mesh.update(pipe=8)
    check_compilable(config, parse_topology(f"{name}:1x8"))


def test_a_config_for_cpus_is_refused():
    assert "rule compile-platform" in refused("a100-80g:1x8", platform="cpu")


def test_cudnn_is_refused():
    config = base_config()
    config.model.update(attention="cudnn", dtype="bfloat16")
    config.mesh.pipe = 8
    with pytest.raises(ConfigError, match="rule compile-attention"):
        check_compilable(config, parse_topology("a100-80g:1x8"))


def test_missing_packages_are_told_with_the_extra(monkeypatch):
    monkeypatch.setattr(checks, "_is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"(?s)^no CUDA plugin.*rule compile-plugin.*pip install -e '\.\[gpu-aot\]'$"):
        check_plugin()
    monkeypatch.setattr(checks, "_is_installed", lambda module: module.startswith("jax_plugins"))
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    monkeypatch.setattr(checks.os.path, "isdir", lambda path: False)
    with pytest.raises(ConfigError, match=r"(?s)^no ptxas.*gpu-aot"):
        check_plugin()


def test_packages_of_either_cuda_will_do(monkeypatch):
    monkeypatch.setattr(
        checks, "_is_installed", lambda module: module in ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc")
    )
    check_plugin()
