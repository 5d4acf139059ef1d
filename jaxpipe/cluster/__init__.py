"""The cluster in numbers: hardware, topology, and which GPU of which node takes which place in the mesh. No JAX."""
