"""Compiles a head, or a loop over layers, for a GPU that is not there, and counts its kernels.

Goes in: sizes and a device of `absent_gpus`. Comes out: records, seconds and bytes in them. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from head_forms import HEADS, MOST_LOGITS_BEFORE
from jax.sharding import SingleDeviceSharding
from kernels import Kernel, kernels
from layer_forms import LAYERS, over_layers

from jaxpipe.cluster.hardware import HARDWARE
from jaxpipe.models.cross_entropy import chunks_of

TOKENS = 8192
LEAST_SHARE = 0.005  # of the time: kernels with less are told together

Record = dict[str, Any]


def head(device: Any, form: str, hidden: int, words: int, *, tokens: int = TOKENS) -> tuple[list[Kernel], int]:
    """The kernels of one form of the head in bfloat16, and the bytes of its temporaries."""
    shapes = {
        "sums": ((words, hidden), jnp.float32),
        "x": ((tokens, hidden), jnp.bfloat16),
        "kernel": ((words, hidden), jnp.bfloat16),
        "targets": ((tokens,), jnp.int32),
        "scale": ((), jnp.float32),
    }
    return compiled(HEADS[form], shapes, device)


def layers(device: Any, form: str, *, num_layers: int, rows: int, columns: int) -> tuple[list[Kernel], int]:
    """The kernels of one form of the loop over layers, and the bytes of its temporaries."""
    shapes = {
        "sums": ((num_layers, rows, columns), jnp.float32),
        "x": ((TOKENS, rows), jnp.bfloat16),
        "dy": ((TOKENS, columns), jnp.bfloat16),
    }
    return compiled(over_layers(LAYERS[form]), shapes, device)


def compiled(
    function: Callable[..., Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]], device: Any
) -> tuple[list[Kernel], int]:
    """The kernels of a function whose first argument, running sums, is updated in place; bytes of its temporaries."""
    sharding = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes.values()]
    program = jax.jit(function, donate_argnums=0).lower(*arguments).compile()
    text, memory = program.as_text(), program.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError("the compiler tells no HLO or no bytes")
    return kernels(text), memory.temp_size_in_bytes


def head_record(gpu: str, device: Any, hidden: int, words: int) -> Record:
    """Both forms of the head in one cell of the table."""
    hardware, record = HARDWARE[gpu], {"GPU": gpu, "hidden": hidden, "words": words}
    record["chunk tokens"] = {"new": chunks_of(TOKENS, words)[1], "old": min(TOKENS, MOST_LOGITS_BEFORE // words)}
    record["products_s"] = 6 * TOKENS * hidden * words / hardware.bf16_flops_per_s
    for form in HEADS:
        found, temp_bytes = head(device, form, hidden, words)
        record[form] = {"kernels_s": sum(kernel.seconds(hardware) for kernel in found), "temp_bytes": temp_bytes}
    return record


def kernel_records(gpu: str, device: Any, hidden: int, words: int) -> list[Record]:
    """The kernels of the library's head, those that take longest first, and the rest together."""
    hardware = HARDWARE[gpu]
    found = sorted(head(device, "new", hidden, words)[0], key=lambda kernel: -kernel.seconds(hardware))
    least_s = LEAST_SHARE * sum(kernel.seconds(hardware) for kernel in found)
    long = [kernel for kernel in found if kernel.seconds(hardware) >= least_s]
    rest = found[len(long) :]
    records: list[Record] = [
        {
            "kernel": ("product, added to its result" if kernel.adds else "product") if kernel.flops else "fusion",
            "result": kernel.result,
            "times": kernel.times,
            "s": kernel.seconds(hardware),
            "bound by": kernel.bound_by(hardware),
        }
        for kernel in long
    ]
    others = {
        "kernel": "all others",
        "result": "",
        "times": sum(kernel.times for kernel in rest),
        "s": sum(kernel.seconds(hardware) for kernel in rest),
        "bound by": " and ".join(sorted({kernel.bound_by(hardware) for kernel in rest})),
    }
    return [*records, others]


def layer_records(gpu: str, device: Any, *, num_layers: int, rows: int, columns: int) -> list[Record]:
    """The three forms of the loop over layers; "bytes beside" are those of an element that no product moves."""
    hardware = HARDWARE[gpu]
    records = []
    for form in LAYERS:
        found, temp_bytes = layers(device, form, num_layers=num_layers, rows=rows, columns=columns)
        beside = sum(kernel.times * kernel.num_bytes for kernel in found if not kernel.flops)
        records.append(
            {
                "GPU": gpu,
                "form": form,
                "products_s": num_layers * 2 * TOKENS * rows * columns / hardware.bf16_flops_per_s,
                "kernels_s": sum(kernel.seconds(hardware) for kernel in found),
                "bytes beside": beside / (num_layers * rows * columns),
                "temp_bytes": temp_bytes,
            }
        )
    return records
