"""What a jaxpr computes: how often it runs each primitive."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as core

PRODUCTS = ("conv_general_dilated", "dot_general")


def num_runs(function: Any, *arguments: Any) -> Counter[str]:
    """Of each primitive in `function`, in a loop once for each turn, in the branches of a conditional all together."""
    return _of_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr)


def num_products(runs: Counter[str]) -> int:
    """Of matrix products and convolutions."""
    return sum(runs[name] for name in PRODUCTS)


def _of_jaxpr(jaxpr: core.Jaxpr) -> Counter[str]:
    total: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        total[equation.primitive.name] += 1
        num_turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in core.jaxprs_in_params(equation.params):
            total.update({name: num_turns * num for name, num in _of_jaxpr(inner).items()})
    return total


def all_equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a jaxpr and of those in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from all_equations(inner)
