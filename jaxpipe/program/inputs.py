"""Do schedule, mesh, model and arrays fit together? Asked before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import CompileError
from jaxpipe.mesh.mesh import AXES
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.layout import Layout
from jaxpipe.schedules.schedule import Kind, Schedule

PyTree = Any


def check_actions(schedule: Schedule) -> None:
    """Raises CompileError where `schedule` has actions that the program does not run."""
    if schedule.num_replicas == 1 and schedule.columns.is_kind(Kind.SYNC).any():
        raise CompileError(
            f"schedule {schedule.name!r} of num_replicas=1 has actions of kind SYNC.\n"
            "  rule program-actions: SYNC is between two replicas: over `data` gradients are summed without it\n"
            "  repair: leave the SYNCs out"
        )


def check_mesh(schedule: Schedule, mesh: jax.sharding.Mesh, functions: StageFunctions) -> None:
    """Raises CompileError unless `mesh` has our axes, as many `pipe` devices as `schedule`, and `tensor` a use."""
    if tuple(mesh.axis_names) != AXES:
        raise CompileError(
            f"the mesh has axes {tuple(mesh.axis_names)}.\n"
            f"  rule mesh-axes: a mesh has the axes {AXES}, in this order\n"
            "  repair: make it with jaxpipe.mesh.make_mesh(data=..., pipe=..., tensor=...)"
        )
    if mesh.shape["pipe"] != schedule.num_devices:
        raise CompileError(
            f"schedule {schedule.name!r} has num_devices={schedule.num_devices}, the mesh pipe={mesh.shape['pipe']}.\n"
            "  rule pipe-devices: the schedule's devices are the mesh's `pipe` axis\n"
            f"  repair: build the schedule with num_devices={mesh.shape['pipe']}, or a mesh with "
            f"pipe={schedule.num_devices}"
        )
    if mesh.shape["tensor"] > 1 and functions.specs is None:
        raise CompileError(
            f"the mesh has tensor={mesh.shape['tensor']}, and no parameter is split over it.\n"
            "  rule tensor-axis: functions that know of `tensor` say in `specs` what it splits; others would do the "
            "same work on all its devices\n"
            "  repair: make the functions for this tensor axis, for example StageFunctions.of(LanguageModel(config, "
            f"TensorAxis({mesh.shape['tensor']}))), or use tensor=1"
        )


def check_inputs(schedule: Schedule, mesh: jax.sharding.Mesh, layout: Layout, params: PyTree, batch: PyTree) -> None:
    """Raises CompileError unless staged `params` and `batch` have the shapes that the program takes."""
    if not isinstance(params, dict) or set(params) != {"shared", "layers"}:
        raise CompileError(
            f"params is {type(params).__name__} {sorted(params) if isinstance(params, dict) else ''}.\n"
            "  rule params: a dictionary with 'shared' and 'layers'\n"
            "  repair: put embedding and head under 'shared', the stacked layers under 'layers'"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
        if leaf.shape[:3] != layout.canonical.shape:
            raise CompileError(
                f"params['layers']{jax.tree_util.keystr(path)} has shape {leaf.shape}.\n"
                f"  rule staged-layers: it begins with [device, chunk, layer] = {layout.canonical.shape}\n"
                "  repair: pass the parameters through pipeline.to_stages first"
            )
    num_data = mesh.shape["data"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim < 2 or leaf.shape[0] != schedule.num_microbatches or leaf.shape[1] % num_data:
            raise CompileError(
                f"batch{jax.tree_util.keystr(path)} has shape {leaf.shape}.\n"
                f"  rule batch: leaves are [num_microbatches={schedule.num_microbatches}, microbatch size, ...], "
                f"the size a multiple of data={num_data}\n"
                "  repair: reshape the global batch to [num_microbatches, -1, ...]"
            )


def shapes_on_a_device(mesh: jax.sharding.Mesh, function: Callable, *arguments: PyTree) -> Any:
    """Shapes that `function` returns on one device, from those of its arguments there; it may use the mesh's axes."""
    return jax.eval_shape(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), *arguments)


def check_functions(
    functions: StageFunctions, mesh: jax.sharding.Mesh, params: PyTree, microbatch: PyTree
) -> tuple[jax.ShapeDtypeStruct, PyTree]:
    """The shapes of a message on one device and of the losses; CompileError unless the functions keep the contract.

    Args:
        params: shapes {"shared", "layer"} on one device.
        microbatch: shapes of one microbatch on one device.
    """

    def shapes(function: Callable, *arguments: PyTree) -> Any:
        return shapes_on_a_device(mesh, function, *arguments)

    x = _one_array(
        "embed", shapes(lambda shared, batch: functions.embed(shared, batch, None), params["shared"], microbatch)
    )
    y = _one_array(
        "layer",
        shapes(lambda layer, x, batch: functions.layer(layer, x, batch, None), params["layer"], x, microbatch),
    )
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise CompileError(
            f"layer takes {x.dtype}{list(x.shape)} and returns {y.dtype}{list(y.shape)}.\n"
            "  rule same-shape: every layer returns the shape and dtype that embed returns\n"
            "  repair: cast or reshape inside embed or layer"
        )
    loss = shapes(functions.head, params["shared"], y, microbatch)
    leaves = jax.tree.leaves(loss)
    if not leaves or any(getattr(leaf, "shape", None) != () or leaf.dtype != "float32" for leaf in leaves):
        raise CompileError(
            f"head returns {loss}.\n"
            "  rule loss-sum: head returns the sum of the microbatch's losses, a float32 scalar, or one of each kind\n"
            "  repair: sum, do not average, and cast to float32"
        )
    return x, loss


def scale_of_each(losses: PyTree, scale: PyTree) -> PyTree:
    """A factor for each of `losses`, float32: `scale` has one for each, or is one for all.

    Raises:
        CompileError: it has others.
    """
    structure, found = jax.tree.structure(losses), jax.tree.structure(scale)
    if found == jax.tree.structure(0):
        return jax.tree.map(lambda _: jnp.asarray(scale, jnp.float32), losses)
    if found != structure:
        raise CompileError(
            f"scale is {found}, and head returns {structure}.\n"
            "  rule loss-scale: scale is one number for all losses, or one for each that head returns\n"
            "  repair: give a pytree of numbers like what head returns, or one number"
        )
    return jax.tree.map(lambda factor: jnp.asarray(factor, jnp.float32), scale)


def _one_array(name: str, value: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(value, "shape"):
        raise CompileError(
            f"{name} returns {type(value).__name__}.\n"
            "  rule one-array: what travels from stage to stage is one array\n"
            "  repair: return one array; put what all layers need into the batch or the shared parameters"
        )
    return value
