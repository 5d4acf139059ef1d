"""Times I and W of one layer against its B, and counts their matrix products; see README.md."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp

from jaxpipe.measure.timing import timed
from jaxpipe.models import BertConfig, GPTConfig, LanguageModel, LlamaConfig
from jaxpipe.program.split_vjp import split_vjp
from jaxpipe.program.vjp import trace_vjp

SEQ_LEN, BATCH = 256, 2
SIZES = {"num_layers": 1, "hidden": 512, "num_heads": 8, "vocab_size": 256}
FAMILIES: dict[str, Callable[..., Any]] = {
    "GPT": lambda **more: GPTConfig(**SIZES, **more, num_positions=SEQ_LEN),
    "LLaMA": lambda **more: LlamaConfig(**SIZES, **more, num_kv_heads=4, feed_forward=1376),
    "BERT": lambda **more: BertConfig(**SIZES, **more, num_positions=SEQ_LEN),
}
RECOMPUTE = ("none", "attention", "full")


def main() -> None:
    """One line for each family and recomputation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_repeats", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="of a GPT alone, 5 turns")
    flags = parser.parse_args()
    families = ("GPT",) if flags.quick else tuple(FAMILIES)
    num_repeats = 5 if flags.quick else flags.num_repeats
    print("| model | recompute | products B = I + W | numbers a token: F keeps, W reads | (I + W) / B |")
    print("|---|---|---|---|---|")
    for family in families:
        for recompute in RECOMPUTE:
            model = LanguageModel(FAMILIES[family](recompute=recompute))
            print(f"| {family} | {recompute} | {row(model, num_repeats)} |", flush=True)


def row(model: LanguageModel, num_repeats: int) -> str:
    """Cells of a table."""
    params = jax.tree.map(lambda leaf: leaf[0], model.init(jax.random.key(0))["layers"])
    x, dy = (jax.random.normal(jax.random.key(seed), (BATCH, SEQ_LEN, SIZES["hidden"])) for seed in (1, 2))
    given = {"tokens": jnp.zeros((BATCH, SEQ_LEN), jnp.int32)}, None
    vjp = trace_vjp(model.layer, params, x, *given)
    _, kept = jax.jit(lambda params, x: vjp.forward(params, x, *given))(params, x)
    split = split_vjp(vjp)
    shared_with_w = [kept[i] for i in split.shared_with_w]

    def whole(sums: list, params: Any, kept: list, dy: jax.Array) -> Any:
        d_params, dx = vjp.backward(params, kept, dy, *given)
        return added(sums, jax.tree.leaves(d_params)), dx

    def first(sums: list, params: Any, kept: list, dy: jax.Array) -> Any:
        dx, grads, left = split.input_gradient(params, kept, dy, *given)
        return added(sums, grads), dx, left

    def second(sums: list, params: Any, kept: list, left: list) -> Any:
        return added(sums, split.weight_gradient(params, kept, left, *given))

    zeros = [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)]
    left = jax.jit(first)(zeros, params, kept, dy)[2]
    arguments = {whole: (zeros, params, kept, dy), first: (zeros, params, kept, dy)}
    arguments[second] = (zeros, params, shared_with_w, left)
    products = [num_products(jax.make_jaxpr(part)(*given).jaxpr) for part, given in arguments.items()]
    cells = f"{products[0]} = {products[1]} + {products[2]}"

    compiled = {part: jax.jit(part, donate_argnums=0).lower(*given).compile() for part, given in arguments.items()}
    times: dict[Callable, list[float]] = {part: [] for part in arguments}
    for _ in range(num_repeats):
        for part, (_, *rest) in arguments.items():
            sums = jax.block_until_ready([jnp.zeros_like(leaf) for leaf in zeros])
            times[part].append(timed(lambda part=part, sums=sums, rest=rest: compiled[part](sums, *rest)).cpu_s)
    b, i, w = (statistics.median(times[part]) for part in arguments)
    numbers = [sum(leaf.size for leaf in leaves) / x.size for leaves in (kept, [*shared_with_w, *left])]
    return f"{cells} | {numbers[0]:.1f} h, {numbers[1]:.1f} h | {(i + w) / b:.2f}"


def added(sums: list, grads: list) -> list:
    """Running sums with what there is of a layer's gradients."""
    return [total if d is None else total + d for total, d in zip(sums, grads, strict=True)]


def num_products(jaxpr: core.Jaxpr) -> int:
    """Matrix products that it runs; those of a scan's body as often as it does."""
    num = 0
    for equation in jaxpr.eqns:
        num += equation.primitive.name == "dot_general"
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        num += turns * sum(map(num_products, core.jaxprs_in_params(equation.params)))
    return num


if __name__ == "__main__":
    main()
