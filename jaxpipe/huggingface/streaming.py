"""The weights of a pipeline as a stream of Hugging Face tensors, bucket by bucket: for a sampler, while a run goes on.

Goes in: staged parameters on their devices, as a train state has them. Comes out: what the file export would write, by
name, in its order, adapters merged. One layer's parameter at a time leaves its stage: it is rounded where it lies, sent
over `pipe` by the device that owns it, gathered over all other axes, and cut as the table of its class says. Each kind
of parameter is one program, compiled once, with the layer as an argument. Left to others: files (`jaxpipe.convert`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.distributed.in_step import InStep
from jaxpipe.errors import ConfigError, check_choice, first_of
from jaxpipe.huggingface import configs
from jaxpipe.huggingface.mapping import Transform
from jaxpipe.huggingface.tensor_files import CODES
from jaxpipe.huggingface.tensors import LayerTensors, TensorMap
from jaxpipe.mesh import on_devices
from jaxpipe.mesh.collectives import sum_over
from jaxpipe.mesh.jax_defaults import default_rules
from jaxpipe.models import Anatomy, LanguageModel
from jaxpipe.models.lora import NAMES, Columns, base_of, merged
from jaxpipe.models.parameters import adapted_columns
from jaxpipe.program import Pipeline
from jaxpipe.program.partition import STACKED, Part
from jaxpipe.program.staged_params import StagedLayout

PLACES = ("device", "host")
_NUM_CACHED = 64  # programs: a class has a dozen kinds of parameters, and a run one or two dtypes


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some tensors of a model, all that a stream holds at a time.

    Attributes:
        tensors: (name, array), what `load_weights` of a sampler takes. Arrays of JAX are whole on every device of the
            mesh; `array.addressable_data(0)` is the one on this process's first device.
        num_bytes: bytes of the arrays, on each device or on the host; an array with two names counts once.
        seconds: wall-clock time to gather them, the first time with the compilation.
    """

    tensors: list[tuple[str, Any]]
    num_bytes: int
    seconds: float


def stream(
    params: Any,
    pipeline: Pipeline,
    config: Any,
    *,
    bucket_bytes: int = 2**30,
    dtype: str = "float32",
    to: str = "device",
) -> Iterator[Bucket]:
    """Yields the tensors of transformers that hold `params`, in the order and with the numbers of the file export.

    Of several processes all must iterate to the end, with equal arguments but for `to`; each gets all tensors. Besides
    `params` a device holds the bucket that the caller has and the next one while it fills, with what its last parameter
    needs while it is cut; with `to="host"` the buckets are on the host instead. Nothing is donated or changed.

    Args:
        params: staged parameters, as `TrainState.params`.
        pipeline: the pipeline that has them, as `Run.pipeline` or that of `fit(on_start=...)`.
        config: the config of the run, as `fit` takes it.
        bucket_bytes: bytes of a bucket at most, unless one layer's parameter has more than a quarter of them.
        dtype: of all tensors: "float32", "bfloat16" or "float16".
        to: "device", arrays of JAX; or "host", of NumPy, which may not be written to.

    Raises:
        ConfigError: transformers does not have the model, `params` are not those of the config, an argument is none of
            the above, or, while it is iterated, a number exceeds the range of `dtype`.
        LostProcess: another process has left the stream, or does not come within `train.lost_after_s`.

    Example:
        for bucket in stream(state.params, pipeline, config, dtype="bfloat16", to="host"):
            sampler.load_weights(bucket.tensors)
    """
    check_choice("dtype", dtype, tuple(CODES))
    check_choice("to", to, PLACES)
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ConfigError(
            f"bucket_bytes={bucket_bytes!r}",
            rule="bucket-bytes: a whole number of bytes, 1 or more",
            repair="give for example 2**30, or leave it out",
        )
    told = RunConfig.of(config)
    ours = model_config(told)
    theirs = configs.new_config(told, dtype=dtype)
    tensors = TensorMap(configs.architecture_of(theirs, where=configs.CONFIG), base_of(ours))
    by_path = _by_path(params)
    model = LanguageModel(ours)
    _check_staged(by_path, _shapes_of(model), pipeline.layout)
    gather = _Gather(by_path, _by_path(pipeline.parts(params)), pipeline, ours.anatomy, dtype, adapted_columns(ours))
    return _buckets(
        _in_buckets(tensors.groups, jnp.dtype(dtype).itemsize, bucket_bytes),
        gather,
        is_on_host=to == "host",
        what=f"{bucket_bytes}-byte buckets of {dtype} weights",
        lost_after_s=told.train.lost_after_s,
    )


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _shapes_of(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """The shapes of canonical parameters, by path."""
    return {path: leaf.shape for path, leaf in _by_path(jax.eval_shape(model.init, jax.random.key(0))).items()}


def _check_staged(params: dict[str, Any], shapes: dict[str, tuple[int, ...]], layout: StagedLayout) -> None:
    """Raises ConfigError unless `params` have the paths and shapes of the staged parameters of the config's model."""

    def staged(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not TensorMap.is_stacked(path):
            return shape
        kinds = layout.pattern.kinds_with(path.split(".")[1])
        return (*layout.of(kinds).canonical.shape, *shape[1:])

    wanted = {path: staged(path, shape) for path, shape in shapes.items()}
    there = {path: jnp.shape(leaf) for path, leaf in params.items()}
    different = [
        f"{path}: {there.get(path, 'missing')}, by the config {wanted.get(path, 'none')}"
        for path in sorted(wanted.keys() | there.keys())
        if wanted.get(path) != there.get(path)
    ]
    if different:
        raise ConfigError(
            f"{len(different)} of the given parameters are not the staged ones of the config's model",
            rule="stream-params: params, pipeline and config are of one run; layers are [device, chunk, layer, ...]",
            picture=first_of(different),
            repair="give state.params and the pipeline of the same run; canonical parameters become staged by"
            " pipeline.to_stages",
        )


def _in_buckets(groups: Sequence[LayerTensors], itemsize: int, bucket_bytes: int) -> list[list[LayerTensors]]:
    """`groups`, which are never divided, in buckets."""
    buckets: list[list[LayerTensors]] = []
    room = 0
    for group in groups:
        num_bytes = itemsize * sum(prod(tensor.shape) for tensor in group.tensors)
        # Until it is cut a parameter lies there up to four times: read, sent, received, in parts.
        if 4 * num_bytes > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(group)
        room -= num_bytes
    return buckets


def _buckets(
    buckets: Sequence[Sequence[LayerTensors]], gather: _Gather, *, is_on_host: bool, what: str, lost_after_s: float
) -> Iterator[Bucket]:
    with InStep(what, num_parts=len(buckets), lost_after_s=lost_after_s) as walk:
        for groups in buckets:
            walk.begin()
            # Not by a name of this function, which would keep a bucket while the next one is gathered.
            yield gather.bucket(groups, is_on_host=is_on_host)


@dataclass(frozen=True, eq=False)
class _Gather:
    """Gathers tensors from the devices that have their parts."""

    params: dict[str, Any]  # staged, by path
    parts: dict[str, Part]
    pipeline: Pipeline
    anatomy: Anatomy
    dtype: str
    adapted: dict[str, Columns]  # path of a linear layer -> how its adapters, which are merged, stand in its columns

    def bucket(self, groups: Sequence[LayerTensors], *, is_on_host: bool) -> Bucket:
        start = time.perf_counter()
        tensors: list[tuple[str, Any]] = []
        num_bytes = 0
        lost = {}
        for group in groups:
            arrays, lost[group.tensors[0].names[0]] = self._arrays(group)
            num_bytes += sum(array.nbytes for array in arrays)
            # One device's copy: all others are freed with the array.
            tensors += group.named(
                [np.asarray(array.addressable_data(0)) for array in arrays] if is_on_host else arrays
            )
        self._check_none_lost(jax.device_get(lost))
        jax.block_until_ready([array for _, array in tensors])
        return Bucket(tensors, num_bytes, time.perf_counter() - start)

    def _arrays(self, group: LayerTensors) -> tuple[Sequence[jax.Array], jax.Array]:
        path = group.parameter.path
        linear, _, kind = path.rpartition(".")
        columns = self.adapted.get(linear) if kind == "kernel" else None
        names = [name for name in columns.names if f"{linear}.{name}.{NAMES[0]}" in self.params] if columns else []
        paths = (path, *(f"{linear}.{name}.{side}" for name in names for side in NAMES))
        layout = self.pipeline.layout.of(self.parts[path].kinds)
        program = _program(
            layout,
            self.pipeline.mesh,
            tuple(self.parts[path] for path in paths),
            group.parameter.transform,
            self.anatomy,
            self.dtype,
            columns,
            tuple(names),
        )
        row = 0 if group.row is None else layout.row_of_layer[group.row]
        # An argument of the host, which a guard against transfers would refuse.
        with default_rules():
            return program([self.params[path] for path in paths], np.int32(row))

    def _check_none_lost(self, lost: dict[str, np.ndarray]) -> None:
        too_large = [f"{name}: {int(number)} numbers" for name, number in lost.items() if number]
        if too_large:
            raise ConfigError(
                f"{len(too_large)} parameters do not fit {self.dtype}",
                rule="convert-dtype: every number is within the range of the dtype",
                picture=first_of(too_large),
                repair="stream another dtype; bfloat16 has the range of float32",
            )


@lru_cache(_NUM_CACHED)
def _program(
    layout: StagedLayout,
    mesh: Mesh,
    parts: tuple[Part, ...],
    transform: Transform,
    anatomy: Anatomy,
    dtype: str,
    columns: Columns | None,
    names: tuple[str, ...],
) -> Callable[[list[jax.Array], np.int32], tuple[tuple[jax.Array, ...], jax.Array]]:
    """The jitted function from (staged parameter, row of the layer) to tensors, and how many numbers exceed `dtype`.

    A row is one of `StagedLayout.row_of_layer`; a shared parameter has none, and ignores it. With `columns` the
    parameters are a kernel and, by the `names` of their parts, A and B of the adapters that are added to it.
    """
    num_rows = layout.canonical[0].size  # of one device

    def gathered(local: jax.Array, row: jax.Array, part: Part, dtype: Any) -> tuple[jax.Array, jax.Array]:
        is_owner = jnp.bool(True)
        if part.stacked:
            local = local.reshape(num_rows, *local.shape[len(STACKED) :])
            local = lax.dynamic_index_in_dim(local, row % num_rows, keepdims=False)
            is_owner = lax.axis_index("pipe") == row // num_rows
        # Rounded before it is sent: half of the bytes travel.
        rounded = local.astype(dtype)
        lost = jnp.sum(jnp.isfinite(local) & ~jnp.isfinite(rounded) & is_owner)
        if part.stacked:
            # A sum of bytes, of which one term is not 0: a sum of floats would make 0.0 of -0.0.
            words = jnp.where(is_owner, lax.bitcast_convert_type(rounded, jnp.uint8), 0)
            rounded = lax.bitcast_convert_type(lax.psum(words, "pipe"), dtype)
        return part.whole(rounded), sum_over(lost, part.split_axes)

    def all_gathered(leaves: list[jax.Array], row: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        if columns is None:
            whole, lost = gathered(leaves[0], row, parts[0], dtype)
            return [whole], lost
        # Merged first, and rounded then.
        wholes = [gathered(leaf, row, part, leaf.dtype)[0] for leaf, part in zip(leaves, parts, strict=True)]
        return wholes, jnp.int32(0)

    def tensors(leaves: list[jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        specs = [part.spec() for part in parts]
        gather = on_devices(all_gathered, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), P()))
        (whole, *adapters), lost = gather(leaves, row)
        if columns is not None:
            pairs = zip(adapters[::2], adapters[1::2], strict=True)
            exact = merged(whole, columns, dict(zip(names, pairs, strict=True)))
            whole = exact.astype(dtype)
            lost = jnp.sum(jnp.isfinite(exact) & ~jnp.isfinite(whole))
        return transform.to_theirs(whole, anatomy), lost

    return jax.jit(tensors, out_shardings=NamedSharding(mesh, P()))
