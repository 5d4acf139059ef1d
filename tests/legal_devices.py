"""The registered schedules, some options of each, and on how many devices they are: for tests over all of them."""

from collections.abc import Mapping
from typing import Any

from jaxpipe.schedules import REGISTRY

LEAST_DEVICES = {"bpipe": 4}
TWO_REPLICAS = ("bitpipe", "chimera", "dualpipe", "gems", "mixpipe")  # on an even number of devices

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("bitpipe", {"num_chunks": 1}),
    ("bitpipe", {"num_chunks": 3}),
    ("bitpipe", {"num_chunks": 4, "eager_sync": False}),
    ("bitpipe", {"v_shape": False}),
    ("bitpipe", {"v_shape": False, "num_chunks": 3, "scaling": "figure"}),
    ("bitpipe", {"scaling": "figure"}),
    ("bitpipe", {"scaling": "figure", "num_chunks": 1}),
    ("bitpipe", {"scaling": "early_forwarding"}),
    ("bitpipe", {"scaling": "early_forwarding", "num_chunks": 3, "eager_sync": False}),
    ("breadth_first", {"num_chunks": 1}),
    ("breadth_first", {"num_chunks": 4}),
    ("chimera", {"forward_doubling": True}),
    ("chimera", {"eager_sync": False}),
    ("dualpipe", {"backward_first": True, "eager_sync": False}),
    ("dualpipe_v", {"backward_first": True, "input_gradient": 1.2, "weight_gradient": 0.8}),
    ("gems", {"eager_sync": False}),
    ("hanayo", {"waves": 2}),
    ("interleaved_1f1b", {"num_chunks": 1}),
    ("interleaved_1f1b", {"num_chunks": 4}),
    ("interleaved_1f1b", {"num_chunks": 3, "group_size": 9}),
    ("mixpipe", {"injected": 2, "eager_sync": False}),
    ("v_min", {"input_gradient": 1.2, "weight_gradient": 0.8}),
    ("zb_h1", {"input_gradient": 0.9, "weight_gradient": 1.3}),
]


def takes(name: str, num_devices: int, options: Mapping[str, Any] | None = None) -> bool:
    """Whether the schedule `name` with `options` is one of `num_devices` devices."""
    group_size = (options or {}).get("group_size", num_devices)
    return LEAST_DEVICES.get(name, 1) <= num_devices <= group_size and not (name in TWO_REPLICAS and num_devices % 2)


def variants(*num_devices: int) -> list[tuple[str, dict[str, Any], int]]:
    """(name, options, number of devices) of registered schedules, plain and with `OPTIONS`, where they exist."""
    every = [*((name, {}) for name in sorted(REGISTRY)), *OPTIONS]
    return [(name, options, d) for name, options in every for d in num_devices if takes(name, d, options)]
