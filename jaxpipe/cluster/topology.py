"""Topologies as users write them: `a100-80g:4x8` is four nodes of eight A100."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxpipe.cluster.axes import PRODUCT, MeshSizes
from jaxpipe.cluster.hardware import HARDWARE, Hardware
from jaxpipe.errors import ConfigError, closest

_MOST_GPUS = 2**20


@dataclass(frozen=True)
class Topology:
    """Nodes of equally many GPUs of one kind; GPUs are numbered node by node."""

    hardware: Hardware
    num_nodes: int
    gpus_per_node: int  # GPUs of each node, connected by NVLink, or PCIe where there is none; a GB200 NVL72 is one node

    def __str__(self) -> str:
        """The form that `parse_topology` reads."""
        return f"{self.hardware.name}:{self.num_nodes}x{self.gpus_per_node}"

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    def check_holds(self, **sizes: int) -> None:
        """Raises ConfigError if a mesh of these sizes, as in `MeshSizes`, needs more GPUs than there are."""
        mesh = MeshSizes(**sizes)
        num_needed = mesh.num_devices
        if num_needed > self.num_gpus:
            # Rounded up to whole nodes.
            num_nodes = -(-num_needed // self.gpus_per_node)
            raise ConfigError(
                f"a mesh of {num_needed} GPUs, and topology={self} has {self.num_gpus}",
                rule=f"topology-size: {PRODUCT} is at most nodes x GPUs of a node",
                picture=(
                    f"{' x '.join(map(str, mesh.axes.values()))} = {num_needed} > {self.num_nodes} x"
                    f" {self.gpus_per_node} = {self.num_gpus}"
                ),
                repair=f"set a smaller mesh, or topology={self.hardware.name}:{num_nodes}x{self.gpus_per_node}",
            )

    def check_computes(self, dtype: str) -> None:
        """Raises ConfigError if the GPUs have no units for matmuls in `dtype`."""
        if dtype == "bfloat16" and not self.hardware.bf16_flops_per_s:
            major, minor = self.hardware.compute_capability
            other = f"{next(iter(HARDWARE))}:{self.num_nodes}x{self.gpus_per_node}"
            raise ConfigError(
                f"model.dtype={dtype!r} on topology={self}: {self.hardware.description} has no bfloat16",
                rule="topology-dtype: the GPUs multiply in the dtype of compute and messages",
                picture=f"compute capability {major}.{minor}; bfloat16 begins with 8.0",
                repair=f"set model.dtype='float32', or use another GPU, as topology={other}",
            )


def parse_topology(written: str) -> Topology:
    """The topology that `written` names as HARDWARE:NODESxGPUS.

    Raises:
        ConfigError: `written` has another form, or the hardware is unknown.

    Example:
        >>> topology = parse_topology("a100-80g:4x8")
        >>> topology.hardware.name, topology.num_nodes, topology.gpus_per_node
        ('a100-80g', 4, 8)
    """
    name, _, shape = written.partition(":")
    if name not in HARDWARE:
        # "h100" is meant to be "h100-80g", which by letters may be further off than another name.
        longer = [known for known in HARDWARE if known.startswith(name)]
        raise ConfigError(
            f"topology={written!r}: hardware {name!r} is not known.{closest(name, longer or list(HARDWARE))}",
            rule=f"topology-hardware: one of {', '.join(HARDWARE)}",
            repair=f"write for example {next(iter(HARDWARE))}:4x8",
        )
    # At most nine digits: the product stays small, and `int` refuses thousands of them.
    numbers = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", shape)
    if not numbers:
        raise ConfigError(
            f"topology={written!r}: {shape!r} is not a number of nodes and of GPUs in each",
            rule="topology-form: HARDWARE:NODESxGPUS, both numbers 1 or more",
            repair=f"write for example {name}:4x8, four nodes of eight GPUs",
        )
    topology = Topology(HARDWARE[name], int(numbers[1]), int(numbers[2]))
    if topology.num_gpus > _MOST_GPUS:
        raise ConfigError(
            f"topology={written!r} has {topology.num_gpus:,} GPUs",
            rule=f"topology-size: a topology has at most {_MOST_GPUS:,} GPUs",
            repair=f"write fewer, for example {name}:4x8",
        )
    return topology
