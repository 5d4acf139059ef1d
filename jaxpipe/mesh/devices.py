"""The devices of a run, GPUs if the mesh fits on them, else virtual CPU devices; and the mesh of them, in its order.

Virtual CPU devices must be requested before JAX starts its backends, so call `choose_devices` before any other use of
JAX. Settings of the user in XLA_FLAGS and XLA_PYTHON_CLIENT_MEM_FRACTION, or XLA_CLIENT_MEM_FRACTION, are kept.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.cluster.assignment import assign
from jaxpipe.cluster.axes import AXES, BATCH_AXES, PRODUCT, MeshSizes
from jaxpipe.distributed.shared_device import MEMORY_VARIABLES, memory_fraction
from jaxpipe.errors import ConfigError
from jaxpipe.mesh.local import collectives_are_local
from jaxpipe.mesh.xla_flags import CPU_FLAGS, DETERMINISTIC_GPU_FLAGS, GPU_FLAGS, add_flags, given_flags

PLATFORMS = ("auto", "cpu", "gpu")

# Device files, since asking a driver's library would start it.
_GPU_FILES = ("nvidia[0-9]*", "nvidiactl", "dxg", "nvgpu*", "nvhost-gpu*", "kfd")  # in /dev
_COUNT_FLAG = "xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Devices:
    """The devices of a run and the reason for the choice.

    Attributes:
        platform: "cpu" or "gpu".
        devices: the devices, as many as the mesh needs.
        reason: one line for the user.
    """

    platform: str
    devices: tuple[Any, ...]
    reason: str


def has_gpu(dev: str = "/dev") -> bool:
    """Whether the system has a device file of NVIDIA (also under WSL or on a Jetson) or of AMD."""
    return any(any(Path(dev).glob(pattern)) for pattern in _GPU_FILES)


def choose_devices(
    num_devices: int, *, platform: str = "auto", deterministic: bool = False, num_processes: int = 1
) -> Devices:
    """`num_devices` devices: GPUs if there are enough, else virtual CPU devices.

    Args:
        num_devices: those of the mesh.
        platform: "gpu" or "cpu" takes only these; "auto" prefers GPUs.
        deterministic: whether a device adds in the same order every time.
        num_processes: number of joined processes, each with an equal share of the devices.

    Raises:
        ConfigError: `platform` is unknown or has fewer devices than needed, or the processes cannot share them.
    """
    if platform not in PLATFORMS:
        raise ConfigError(
            f"mesh.platform={platform!r} is not known",
            rule=f"mesh-platform: one of {', '.join(PLATFORMS)}",
            repair="set mesh.platform='auto'",
        )
    if platform != "cpu":
        # Before the first question for devices, which starts the backends.
        prepare_gpus(deterministic=deterministic)
    _check_shared(num_devices, num_processes)
    if platform != "gpu":
        _ask_for_cpu_devices(num_devices // num_processes)
    # Never asked for on "cpu": the question alone would take memory on a GPU.
    gpus = [] if platform == "cpu" else _devices("gpu")
    if platform == "gpu" or len(gpus) >= num_devices:
        _check_count(gpus, num_devices, "GPUs", repair="mesh.platform='auto' for virtual CPU devices")
        _check_all_used(len(gpus), num_devices, num_processes)
        return Devices("gpu", tuple(gpus[:num_devices]), f"{num_devices} of {len(gpus)} GPUs, {gpus[0].device_kind}")
    cpus = _devices("cpu")
    more = (
        f"take {_COUNT_FLAG} out of XLA_FLAGS"
        if _COUNT_FLAG in given_flags()
        else f"call jaxpipe.mesh.choose_devices({num_devices}) in a new process before any other use of JAX"
    )
    _check_count(cpus, num_devices, "CPU devices", repair=more)
    # Else arrays without a device would be made on a GPU that the mesh does not use.
    jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
    why = "as mesh.platform says" if platform == "cpu" else f"because there are {len(gpus)} GPUs"
    why = why if num_processes == 1 else f"{num_devices // num_processes} in each of {num_processes} processes, {why}"
    return Devices("cpu", tuple(cpus[:num_devices]), f"{num_devices} virtual CPU devices, {why}")


def prepare_gpus(*, deterministic: bool) -> None:
    """Sets what programs on GPUs are compiled and run with, before JAX starts its backends."""
    # A user who sets one of these variables has decided.
    if not set(MEMORY_VARIABLES) & set(os.environ):
        os.environ[MEMORY_VARIABLES[0]] = memory_fraction()  # JAX's default is 0.75
    add_flags(GPU_FLAGS | (DETERMINISTIC_GPU_FLAGS if deterministic else {}))


def _ask_for_cpu_devices(num_devices: int) -> None:
    add_flags(CPU_FLAGS)
    if _COUNT_FLAG in given_flags():
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        pass  # The backends have started: _check_count says whether their devices are enough.


def _devices(platform: str) -> list[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # this machine, or JAX_PLATFORMS, has no such backend
        return []


def _check_shared(num_devices: int, num_processes: int) -> None:
    if num_devices % num_processes:
        raise ConfigError(
            f"the mesh needs {num_devices} devices, which {num_processes} processes cannot share equally",
            rule="devices-of-processes: every process has as many devices of the mesh as any other",
            picture=(
                f"{num_devices} = {num_processes} x {num_devices // num_processes} + {num_devices % num_processes}"
            ),
            repair="set a mesh whose size is a multiple of the processes, or start another number of processes",
        )


def _check_all_used(num_there: int, num_devices: int, num_processes: int) -> None:
    if num_processes > 1 and num_there != num_devices:
        raise ConfigError(
            f"the mesh takes {num_devices} of the {num_there} GPUs of {num_processes} processes",
            rule="devices-of-processes: the mesh of several processes takes all their GPUs",
            picture=f"{num_devices} < {num_there}",
            repair=f"set a mesh of {num_there} devices, mesh.data for example, or start fewer processes",
        )


def _check_count(present: list[Any], num_needed: int, kind: str, *, repair: str) -> None:
    if len(present) < num_needed:
        raise ConfigError(
            f"the mesh needs {num_needed} devices and there are {len(present)} {kind}",
            rule=f"mesh-devices: {PRODUCT} of mesh is at most the number of devices",
            picture=f"{num_needed} > {len(present)}",
            repair=f"set a smaller mesh, or {repair}",
        )


# JAX's CUDA plugin, once asked on a machine without a GPU, prints a traceback about the CUDA libraries that the extra
# gpu-aot leaves out. Where it is installed and the user names no platform, JAX starts on CPUs alone. This stands here,
# and not in a function, since it must come before JAX starts its backends, and a script may start them itself.
if sys.platform == "linux" and find_spec("jax_plugins") and not jax.config.values["jax_platforms"] and not has_gpu():
    jax.config.update("jax_platforms", "cpu")


def num_batch_parts(mesh: Mesh) -> int:
    """Parts that each microbatch is split into: the devices along `BATCH_AXES`."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def make_mesh(*, devices: Sequence[Any] | None = None, **sizes: int) -> Mesh:
    """The mesh with all axes of `jaxpipe.cluster.axes`, the last of them innermost; `make_mesh(data=2, pipe=4)`.

    Args:
        devices: the devices of the mesh, in its order; by default the first of `jax.devices()`.
        sizes: devices along its axes, as in `MeshSizes`; 1 where none are given.

    Raises:
        ConfigError: there are not so many devices.
    """
    mesh = MeshSizes(**sizes)
    shape = tuple(mesh.axes.values())
    num_needed = mesh.num_devices
    chosen = list(jax.devices()[:num_needed] if devices is None else devices)
    if len(chosen) != num_needed:
        raise ConfigError(
            f"the mesh has {num_needed} devices, and {len(chosen)} are given",
            rule=f"mesh-devices: {PRODUCT} is the number of devices",
            picture=f"{' x '.join(map(str, shape))} = {num_needed}",
            repair=f"set axes that multiply to {len(chosen)}, or give {num_needed} devices",
        )
    return Mesh(np.array(chosen, dtype=object).reshape(shape), AXES)


# ---- Device order: applies an assignment of jaxpipe.cluster to the devices of a run


def order_devices(
    devices: Sequence[Any], *, order: str = "pair_adjacent", gpus_per_node: int | None = None, **sizes: int
) -> tuple[Any, ...]:
    """`devices` in the order that `make_mesh` takes, so that the mesh follows `order`.

    Args:
        devices: as many as the mesh has; node by node if `gpus_per_node` is given.
        order: the order of the devices, one of `jaxpipe.cluster.assignment.ORDERS`; "contiguous" keeps the given order.
        gpus_per_node: None asks the devices. On GPUs a node is what JAX calls a slice: the GPUs of one host or of one
            NVLink domain. The virtual CPU devices of one process are one node. Give the number for absent GPUs.
        sizes: devices along axes of the mesh, as in `MeshSizes`; 1 where none are given.

    Raises:
        ConfigError: nodes differ in size, or the mesh does not fit the order.
    """
    # One node for all: the given order stays, whatever the nodes are.
    if order == "contiguous":
        gpus_per_node = len(devices)
    elif gpus_per_node is None:
        devices, gpus_per_node = node_by_node(devices)
    gpus = assign(order, gpus_per_node=gpus_per_node, **sizes).gpus
    return tuple(devices[gpu] for gpu in gpus.ravel())


def permutes_block(mesh: Mesh) -> bool:
    """Whether a permute holds up both of its devices: on CPUs of several processes, where gloo has one thread for all.

    On GPUs, and between the devices of one process, it travels while they compute.
    """
    devices = mesh.devices.ravel().tolist()
    is_on_cpus = devices[0].platform == "cpu" and not collectives_are_local()
    return is_on_cpus and len({device.process_index for device in devices}) > 1


def collectives_in_turn(mesh: Mesh) -> bool:
    """Whether an action must wait for the permutes of its round: on CPUs, where it has collectives of its own.

    XLA has as many threads for what waits on CPUs as it has devices. Where a device waits in a permute and in its
    action at once, the threads are taken before all devices have come, and all wait for ever.
    """
    is_on_cpus = mesh.devices.flat[0].platform == "cpu" and not collectives_are_local()
    return is_on_cpus and mesh.size > mesh.shape["pipe"]


def slices_in_place(mesh: Mesh) -> bool:
    """Whether matmuls on the mesh read and write slices of stacks where they are, at places that the host knows.

    On GPUs from jax 0.11 on. With jax 0.10.2 slices are copied, also with xla_gpu_enable_dynamic_slice_fusion=true, at
    which it ends: "BufferAllocation::Slice not assigned".
    Source: compiled for absent H100s, experiments/030_gpu_program.
    """
    version = tuple(int(number) for number in jax.__version__.split(".")[:2])
    return mesh.devices.flat[0].platform != "cpu" and version >= (0, 11)


def barriers_order(mesh: Mesh) -> bool:
    """Whether what a barrier hands on is written only when all is computed that goes in: on GPUs.

    On CPUs XLA takes barriers out before it orders what it executes. Compiled for absent H100s with jax 0.10.2 and 0.12
    no pool is written whole behind one (tests/compile/test_gpus.py, experiments/030_gpu_program).
    """
    return mesh.devices.flat[0].platform != "cpu"


def by_node(devices: Sequence[Any]) -> dict[int, list[Any]]:
    """The devices of each node: on GPUs of what JAX calls a slice, on CPUs of a process."""
    nodes: dict[int, list[Any]] = {}
    for device in devices:
        nodes.setdefault(getattr(device, "slice_index", device.process_index), []).append(device)
    return nodes


def node_by_node(devices: Sequence[Any]) -> tuple[list[Any], int]:
    """`devices` sorted by node, a smaller node last, and the number of GPUs per node.

    Raises:
        ConfigError: nodes differ in size.
    """
    nodes = by_node(devices)
    in_order = [nodes[node] for node in sorted(nodes, key=lambda node: (-len(nodes[node]), node))]
    sizes = [len(node) for node in in_order]
    # The last node may be smaller: a mesh need not use it whole.
    if len(set(sizes[:-1])) > 1:
        raise ConfigError(
            f"the mesh's devices stand in nodes of {sizes} GPUs",
            rule="equal-nodes: all nodes give the mesh equally many GPUs; only one may give fewer",
            picture=f"{sizes[0]} != {sizes[-2]}",
            repair="start the run with as many GPUs on every node, or set order='contiguous'",
        )
    return [device for node in in_order for device in node], sizes[0]
