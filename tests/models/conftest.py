"""What tests of models share."""

import jax
import pytest


@pytest.fixture(scope="module")
def compiled_quickly():
    """LLVM takes half the time without its expensive passes; what is computed stays the same to rounding."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
