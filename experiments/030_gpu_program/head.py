"""Compiles the head of LLaMA-3 8B for an absent H100 and lists what its kernels that are no products read and write.

python experiments/030_gpu_program/head.py           # needs the extra gpu-aot; ten seconds
"""

from collections.abc import Iterator

import jax
import kernels
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.cluster import parse_topology
from jaxpipe.compile import absent_gpus
from jaxpipe.mesh import TensorAxis
from jaxpipe.models import cross_entropy
from jaxpipe.models.cross_entropy import KernelSums, Vocabulary

TOKENS, HIDDEN, NUM_DEVICES = 8192, 4096, 8
LEAST_BYTES = 2**20  # of a kernel that is listed


def programs(words: int) -> Iterator[tuple[str, str]]:
    """(name, optimized HLO) of the whole head, of its forward alone, and of S and T of the split one.

    Args:
        words: rows of the logits' kernel.
    """
    mesh = Mesh(np.array(absent_gpus(parse_topology("h100-80g:1x1"))), ("pipe",))
    sharding = NamedSharding(mesh, PartitionSpec())
    tensor = TensorAxis()

    def like(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def compiled(function: object, *arguments: object, donate: tuple[int, ...] = ()) -> str:
        on_device = jax.shard_map(
            function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        return jax.jit(on_device, donate_argnums=donate).lower(*arguments).compile().as_text()

    def backward(sums: jax.Array, kernel: jax.Array, x: jax.Array, targets: jax.Array) -> object:
        return cross_entropy.cross_entropy_backward(
            x, targets, Vocabulary(kernel, tensor), scale=1.0, sums=KernelSums(sums, None)
        )

    def forward(kernel: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy.cross_entropy_sum(x, targets, Vocabulary(kernel, tensor))

    def of_part(kernel: jax.Array, x: jax.Array, targets: jax.Array) -> object:
        return cross_entropy.softmax_of_part(x, targets, Vocabulary(kernel, tensor))

    def after_part(
        sums: jax.Array, kernel: jax.Array, x: jax.Array, targets: jax.Array, exponentials: jax.Array, parts: object
    ) -> object:
        return cross_entropy.backward_of_part(
            x,
            targets,
            Vocabulary(kernel, tensor),
            exponentials=exponentials,
            parts=parts,
            scale=1.0,
            sums=KernelSums(sums, None),
        )

    tokens = like((1, TOKENS, HIDDEN)), like((1, TOKENS), "int32")
    whole = like((words, HIDDEN), "float32"), like((words, HIDDEN))
    yield "head", compiled(backward, *whole, *tokens, donate=(0,))
    yield "head, loss alone", compiled(forward, whole[1], *tokens)
    part = like((words // NUM_DEVICES, HIDDEN), "float32"), like((words // NUM_DEVICES, HIDDEN))
    yield "split head, S", compiled(of_part, part[1], *tokens)
    exponentials, statistics = jax.eval_shape(of_part, part[1], *tokens)
    parts = jax.tree.map(lambda leaf: like((NUM_DEVICES, *leaf.shape), leaf.dtype), statistics)
    arguments = (*part, *tokens, like(exponentials.shape, exponentials.dtype), parts)
    yield "split head, T", compiled(after_part, *arguments, donate=(0,))


def main() -> None:
    """Prints a table for each vocabulary."""
    for words in (128256, 32768):
        print(f"| {words:,} words, jax {jax.__version__} | kernel's result | times | MiB read and written |")
        print("|---|---|---|---|")
        for name, text in programs(words):
            listed = [(kernel, turns, size) for kernel, turns, size in kernels.listed(text) if size >= LEAST_BYTES]
            for result, turns, size in listed:
                print(f"| {name} | `{result}` | {turns} | {turns * size / kernels.MIB:,.0f} |")
            total = sum(turns * size for _, turns, size in listed)
            print(f"| {name} | all | | {total / kernels.MIB:,.0f} |", flush=True)
        print()


if __name__ == "__main__":
    main()
