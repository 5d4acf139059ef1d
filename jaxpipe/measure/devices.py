"""Which devices are timed: as many as share a layer, and one more for the link, where there is one."""

from __future__ import annotations

from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpipe.mesh import choose_devices
from jaxpipe.mesh.flags import add_flags

_COUNT_FLAG = "xla_force_host_platform_device_count"


def devices_to_measure(config: ConfigDict) -> list[Any]:
    """The first is what is timed; before any other use of jax.

    Raises:
        ConfigError: fewer than `mesh.tensor` are there.
    """
    tensor, platform = config.mesh.tensor, config.mesh.platform
    if platform != "gpu":
        add_flags({_COUNT_FLAG: str(tensor + 1)})
    chosen = choose_devices(tensor, platform=platform, deterministic=config.mesh.deterministic)
    return jax.local_devices(backend=chosen.platform)[: tensor + 1]
