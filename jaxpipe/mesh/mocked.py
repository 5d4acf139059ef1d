"""The devices of a cluster of which one is here: its first GPU, or a CPU without any GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpipe.distributed.absent import absent_cpus
from jaxpipe.errors import ConfigError
from jaxpipe.mesh.devices import has_gpu, prepare_gpus
from jaxpipe.mesh.xla_flags import MOCKED_GPU_FLAGS, add_flags

_OPTION = "jax_mock_gpu_topology"


def mocked_devices(
    num_nodes: int, gpus_per_node: int, *, platform: str, deterministic: bool = False
) -> tuple[Any, ...]:
    """The devices of a cluster, node by node, of which the first is here; call it before any other use of JAX.

    Args:
        platform: "gpu", "cpu", or "auto" for a GPU if there is one.

    Raises:
        ConfigError: there is no GPU, or JAX cannot stand for absent ones.
    """
    may_have_gpu = platform == "gpu" or (platform == "auto" and has_gpu())
    # An empty tuple: device files without a working plugin.
    if may_have_gpu and (gpus := _mocked_gpus(num_nodes, gpus_per_node, deterministic=deterministic)):
        return gpus
    if platform == "gpu":
        raise ConfigError(
            "mesh.platform='gpu' and no GPU to be one of the cluster's",
            rule="mocked-device: one device of the cluster is here",
            repair="set mesh.platform='auto' for a CPU in its place",
        )
    jax.config.update("jax_platforms", "cpu")
    return absent_cpus(num_nodes * gpus_per_node)


def with_first_at(place: Sequence[int], places: np.ndarray, devices: Sequence[Any]) -> tuple[Any, ...]:
    """`devices` with the first one where the mesh takes the device at `place`.

    Args:
        places: [axes of the mesh], the index of the device that the mesh takes for each place.

    Example:
        >>> with_first_at((0, 2, 0, 0), np.arange(4).reshape(1, 4, 1, 1), "abcd")
        ('c', 'b', 'a', 'd')
    """
    swapped = list(devices)
    index = int(places[tuple(place)])
    # A swap, so that all other places keep their device.
    swapped[0], swapped[index] = swapped[index], swapped[0]
    return tuple(swapped)


def _mocked_gpus(num_nodes: int, gpus_per_node: int, *, deterministic: bool) -> tuple[Any, ...]:
    """The GPUs of the cluster; none if JAX finds no GPU."""
    if _OPTION not in jax.config.values:
        raise ConfigError(
            f"jax {jax.__version__} has no {_OPTION}",
            rule="mocked-gpus: JAX stands for the GPUs that are not here, as jax 0.10.2 to 0.12 can",
            repair="install one of these, or set mesh.platform='cpu', which needs no GPU",
        )
    prepare_gpus(deterministic=deterministic)
    add_flags(MOCKED_GPU_FLAGS)
    # One GPU is real; more would be taken for the cluster's.
    jax.config.update("jax_cuda_visible_devices", "0")
    jax.config.update(_OPTION, f"{num_nodes}x{gpus_per_node}x1")  # slices, processes of a slice, GPUs of a process
    try:
        devices = jax.devices("gpu")
    except RuntimeError:  # JAX finds no GPU, or has no plugin for it
        return ()
    num_wanted = num_nodes * gpus_per_node
    # JAX had started before, when the option has no effect.
    if len(devices) != num_wanted:
        raise ConfigError(
            f"JAX stands for {len(devices)} GPUs, not for {num_wanted}",
            rule="mocked-gpus: the cluster is asked for before JAX starts",
            repair="measure in a new process",
        )
    # Node by node, as the cluster's order of devices is described.
    return tuple(sorted(devices, key=lambda device: (device.process_index, device.id)))
