"""The former place of `jaxpipe.cluster.topology`, kept for scripts written for version 0.1."""

from jaxpipe.cluster.topology import Topology, parse_topology

__all__ = ["Topology", "parse_topology"]
