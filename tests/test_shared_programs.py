"""Tests share executables of equal programs, and of no others."""

import jax
import jax.numpy as jnp


def executable(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().runtime_executable()


def test_equal_programs_are_compiled_once_and_no_others():
    x = jnp.ones(3)
    first = executable(lambda x: x + 1, x)
    assert executable(lambda x: x + 1, x) is first
    others = [executable(lambda x: x + 2, x), executable(lambda x: x + 1, jnp.ones(4))]
    others += [executable(lambda x: x + 1, jax.device_put(x, jax.devices()[1]))]

    def named(x):
        with jax.named_scope("other"):
            return x + 1

    named.__name__ = "<lambda>"
    assert first not in [*others, executable(named, x)]
