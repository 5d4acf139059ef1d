"""Which devices a run takes: GPUs where the mesh fits, else virtual CPU devices.

Virtual CPU devices must be asked for before jax starts its backends, so `choose_devices` comes before any
other use of jax. What the user set in XLA_FLAGS is kept.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.errors import ConfigError

PLATFORMS = ("auto", "cpu", "gpu")

# Devices that share a core arrive late at a collective without being stuck.
_CPU_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
}
# Permutes overlap compute: the scheduler must hide them, and this pass would move them behind the action.
GPU_FLAGS = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_disable_hlo_passes": "collective-permute-motion",
}
_DETERMINISTIC_GPU_FLAGS = {"xla_gpu_exclude_nondeterministic_ops": "true"}  # no sums by atomic additions
_COUNT_FLAG = "xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Devices:
    """The devices of a run, and why these.

    Attributes:
        platform: "cpu" or "gpu".
        devices: as many as the mesh needs.
        reason: one line for the user.
    """

    platform: str
    devices: tuple[Any, ...]
    reason: str


def choose_devices(num_devices: int, *, platform: str = "auto", deterministic: bool = False) -> Devices:
    """`num_devices` devices: GPUs where there are so many, else virtual CPU devices.

    Args:
        num_devices: data x pipe x tensor.
        platform: "gpu" or "cpu" takes these or none; "auto" prefers GPUs.
        deterministic: whether one device adds in the same order every time.

    Raises:
        ConfigError: `platform` is unknown or has fewer devices than needed.
    """
    if platform not in PLATFORMS:
        raise ConfigError(
            f"mesh.platform={platform!r} is not known\n"
            f"  rule mesh-platform: one of {', '.join(PLATFORMS)}\n"
            "  repair: set mesh.platform='auto'"
        )
    if platform != "cpu":
        add_flags(GPU_FLAGS | (_DETERMINISTIC_GPU_FLAGS if deterministic else {}))
    if platform != "gpu":
        _ask_for_cpu_devices(num_devices)
    gpus = [] if platform == "cpu" else _devices("gpu")
    if platform == "gpu" or len(gpus) >= num_devices:
        _check_count(gpus, num_devices, "GPUs", repair="mesh.platform='auto' for virtual CPU devices")
        return Devices("gpu", tuple(gpus[:num_devices]), f"{num_devices} of {len(gpus)} GPUs, {gpus[0].device_kind}")
    cpus = _devices("cpu")
    _check_count(cpus, num_devices, "CPU devices", repair=f"take {_COUNT_FLAG} out of XLA_FLAGS")
    jax.config.update("jax_default_device", cpus[0])
    why = "as mesh.platform says" if platform == "cpu" else f"because there are {len(gpus)} GPUs"
    return Devices("cpu", tuple(cpus[:num_devices]), f"{num_devices} virtual CPU devices, {why}")


def _ask_for_cpu_devices(num_devices: int) -> None:
    add_flags(_CPU_FLAGS)
    if _COUNT_FLAG in os.environ["XLA_FLAGS"]:
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        pass  # The backends have started: _check_count says whether their devices are enough.


def add_flags(flags: dict[str, Any]) -> None:
    """Adds to XLA_FLAGS what the user has not set there."""
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


def _devices(platform: str) -> list[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # this machine, or JAX_PLATFORMS, has no such backend
        return []


def _check_count(found: list[Any], num_needed: int, kind: str, *, repair: str) -> None:
    if len(found) < num_needed:
        raise ConfigError(
            f"the mesh needs {num_needed} devices and there are {len(found)} {kind}\n"
            "  rule mesh-devices: mesh.data x mesh.pipe x mesh.tensor is at most the number of devices\n"
            f"      {num_needed} > {len(found)}\n"
            f"  repair: set a smaller mesh, or {repair}"
        )
