"""Compiles steps of LLaMA-3 8B for absent H100s and adds up what each kernel of a layer reads and writes.

python experiments/030_gpu_program/run.py            # needs the extra gpu-aot; two minutes
python experiments/030_gpu_program/run.py --quick    # 1F1B alone
"""

import argparse
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import stand_in
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpipe.cluster import parse_topology
from jaxpipe.compile import absent_gpus, compile_step, computations
from jaxpipe.config import check, model_config
from jaxpipe.mesh import with_losses
from jaxpipe.models import LanguageModel

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")
DTYPES = {"bfloat16": "bf16", "float32": "f32", "int32": "s32"}  # as HLO writes them
NUM_TOKENS = 8192  # of a microbatch
NUM_DEVICES, NUM_MICROBATCHES, NUM_LAYERS = 8, 32, 4  # the last: layers of the step without a pipeline


def config_of(schedule: str, preset: str = "llama3_8b") -> ConfigDict:
    """The config of a step: microbatches of 8,192 tokens, four layers a device where there are experts."""
    spec = importlib.util.spec_from_file_location(preset, CONFIGS / f"{preset}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.mesh.update(pipe=NUM_DEVICES, tensor=1)
    config.pipeline.update(schedule=schedule, num_microbatches=NUM_MICROBATCHES)
    config.data.batch_size = NUM_MICROBATCHES * (NUM_TOKENS // config.data.seq_len)
    config.model.attention = "cudnn"
    if "num_experts" in config.model:
        config.model.num_layers = 4 * NUM_DEVICES
    check(config)
    return config


def pipelined(schedule: str, preset: str = "llama3_8b") -> tuple[str, int]:
    """The optimized HLO of a pipelined step, and how many of its pools of pages it fills before the rounds."""
    topology = parse_topology(f"h100-80g:1x{NUM_DEVICES}")
    config = config_of(schedule, preset)
    step = compile_step(config, absent_gpus(topology), gpus_per_node=topology.gpus_per_node)
    text = step.compiled.as_text()
    storage = step.pipeline.shapes(step.state.params, step.batch).storage
    rows = [row for pool in storage.pools for row in pool.like()]
    pools = {f"{DTYPES[str(row.dtype)]}[{','.join(map(str, row.shape))}]" for row in rows}
    of_name, entry = computations(text)
    filled = [
        i for i in of_name[entry].instructions if i.shape in pools and i.opcode in ("broadcast", "copy", "fusion")
    ]
    return text, len(filled)


def plain(over_layers: Callable[..., jax.Array], *, is_stacked: bool, preset: str = "llama3_8b") -> str:
    """The optimized HLO of a step on one device without a pipeline: float32 sums over microbatches, `jax.vjp`.

    Args:
        over_layers: (layer, params, x) -> y.
        is_stacked: whether the parameters of all layers are in one array each, as in a scan.
        preset: a file of `configs`.
    """
    (device,) = absent_gpus(parse_topology("h100-80g:1x1"))
    mesh = Mesh(np.array([device]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    config = config_of("1f1b", preset)
    sizes = model_config(config)
    model = LanguageModel(sizes)
    shapes = jax.eval_shape(model.init, jax.random.key(0))["layers"]

    def like(dtype: Any) -> Any:
        def of(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        if is_stacked:
            return jax.tree.map(lambda leaf: of((NUM_LAYERS, *leaf.shape[1:])), shapes)
        return [jax.tree.map(lambda leaf: of(leaf.shape[1:]), shapes)] * NUM_LAYERS

    def layer(x: jax.Array, params: Any) -> jax.Array:
        return with_losses(model.layer(params, x, {}, None))[0]

    def step(params: Any, sums: Any, xs: jax.Array, dys: jax.Array) -> tuple[Any, jax.Array]:
        def microbatch(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            sums, _ = carry
            _, vjp = jax.vjp(lambda params, x: over_layers(layer, params, x), params, xs[i])
            grads, dx = vjp(dys[i])
            return jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), sums, grads), dx

        return lax.fori_loop(0, NUM_MICROBATCHES, microbatch, (sums, jnp.zeros_like(xs[0])))

    x = jax.ShapeDtypeStruct(
        (NUM_MICROBATCHES, NUM_TOKENS // config.data.seq_len, config.data.seq_len, config.model.hidden),
        "bfloat16",
        sharding=sharding,
    )
    # Kernels of Triton are compiled for a GPU that the mesh names.
    on_device = jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    compiled = jax.jit(on_device, donate_argnums=1).lower(like("bfloat16"), like("float32"), x, x).compile()
    return compiled.as_text()


def _unrolled(layer: Callable[..., jax.Array], params: list[Any], x: jax.Array) -> jax.Array:
    for of_layer in params:
        x = layer(x, of_layer)
    return x


def _scanned(layer: Callable[..., jax.Array], params: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, of_layer: (layer(x, of_layer), None), x, params)[0]


def rows(name: str, text: str) -> Iterator[str]:
    """A row for each action, by the median of its loops."""
    of_action: dict[str, list[Counter[str]]] = {}
    for action, totals in kernels.layers(text):
        of_action.setdefault(action, []).append(totals)
    for action, listed in sorted(of_action.items()):
        if action != "head":
            classes = (*kernels.CLASSES, kernels.PRODUCTS)
            yield row(name, action, {kind: np.median([totals[kind] for totals in listed]) for kind in classes})


def row(name: str, action: str, sizes: Mapping[str, float]) -> str:
    """A row of the table."""
    mib = [round(sizes.get(kind, 0) / kernels.MIB) for kind in (*kernels.CLASSES, kernels.PRODUCTS)]
    return f"| {name} | {action} | " + " | ".join(f"{size:,}" for size in (*mib[:-1], sum(mib[:-1]), mib[-1])) + " |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="What kernels move in a layer, as Markdown.")
    parser.add_argument("--quick", action="store_true", help="1F1B alone")
    quick = parser.parse_args().quick
    jax.nn.dot_product_attention = stand_in.dot_product_attention
    print(
        f"| MiB a layer and microbatch, jax {jax.__version__} | action |",
        " | ".join([*kernels.CLASSES, "no products", "products"]),
        "|",
    )
    print("|---" * (len(kernels.CLASSES) + 4) + "|")
    for schedule in SCHEDULES[:1] if quick else SCHEDULES:
        text, num_filled = pipelined(schedule)
        print(*rows(schedule, text), sep="\n", flush=True)
        print(f"{schedule}: {num_filled} pools of pages are filled before the rounds", file=sys.stderr)
    if not quick:
        for name, over_layers in (("unrolled", _unrolled), ("lax.scan", _scanned)):
            totals = kernels.of_loop(plain(over_layers, is_stacked=over_layers is _scanned), NUM_MICROBATCHES)
            print(row(f"jax.vjp, {name}", "F + B", {kind: size / NUM_LAYERS for kind, size in totals.items()}))


if __name__ == "__main__":
    main()
