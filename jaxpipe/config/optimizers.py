"""The optimizers that a config names, one row each, and the fields of `optimizer` that they read; all are optax's.

A row is all that other code knows of an optimizer: the trainer makes it, the checks know its name, the estimator counts
its state and its products. Weight decay is on kernels of matrix products alone. Left to others: clipping (`step`), the
learning rate by step and what is put around an optimizer (`jaxpipe.training.optimizer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from jaxpipe.config.legal import at_least, one_of, positive
from jaxpipe.config.muon import products_of, scale_by_muon
from jaxpipe.models import Anatomy
from jaxpipe.models.lora import NAMES

Path = tuple[Any, ...]


class Matrices(NamedTuple):
    """Which parameters of layers are matrices, for an optimizer that reads whole ones.

    Attributes:
        is_matrix: of the path of a parameter.
        anatomy: of the model: which columns of a joined kernel are whose; None: not known of a model given in Python.
    """

    is_matrix: Callable[[Path], bool]
    anatomy: Anatomy | None = None


@dataclass(frozen=True, eq=False)
class Optimizer:
    """What all other code knows of an optimizer.

    Attributes:
        make: (fields of `optimizer`, learning rate by step, matrices) -> the optimizer. It sees parameters of
            layers stacked, [device, chunk, layer, ...], so that the norm of a parameter, as LAMB's, would be one of all
            layers: what reads more than the number itself is written for the last two dims, as `scale_by_muon`, or is
            given to `fit`, which maps it over layers (`jaxpipe.training.by_layer`).
        num_moments: float32 arrays of its state like a parameter.
        num_moments_of_matrix: the same of a matrix of a layer.
        reads_matrices: whether its update of a matrix reads the whole matrix; False: each number for itself. Schedules
            without flush update parts of a matrix where this is False; elsewhere XLA gathers what is read.
        products: (rows, columns) -> (rows, depth, columns) of the products of matrices in the update of a matrix; None:
            it has none.
    """

    make: Callable[[OptimizerSection, optax.Schedule, Matrices], optax.GradientTransformation]
    num_moments: int
    num_moments_of_matrix: int
    reads_matrices: bool = False
    products: Callable[[int, int], tuple[tuple[int, int, int], ...]] | None = None


def is_kernel(params: Any) -> Any:
    """A tree of bools that selects the kernels of matrix products, adapters' among them, by the name of each leaf.

    Biases, norms and embeddings are not decayed. The name decides, because a staged parameter has more dimensions
    than a canonical one.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: name_of(path) in ("kernel", *NAMES), params)


def name_of(path: Path) -> str | None:
    """The name of a leaf; None in a list or tuple."""
    return getattr(path[-1], "key", None)


MATRICES_BY_NAME = Matrices(lambda path: name_of(path) == "kernel")


def _adamw(fields: OptimizerSection, rate: optax.Schedule, matrices: Matrices) -> optax.GradientTransformation:
    del matrices
    decay = {"weight_decay": fields.weight_decay, "mask": is_kernel}
    return optax.adamw(rate, b1=fields.beta1, b2=fields.beta2, eps=fields.epsilon, **decay)


def _lion(fields: OptimizerSection, rate: optax.Schedule, matrices: Matrices) -> optax.GradientTransformation:
    del matrices
    return optax.lion(rate, fields.beta1, fields.beta2, weight_decay=fields.weight_decay, mask=is_kernel)


def _sgd(fields: OptimizerSection, rate: optax.Schedule, matrices: Matrices) -> optax.GradientTransformation:
    del matrices
    decayed = optax.add_decayed_weights(fields.weight_decay, mask=is_kernel)
    return optax.chain(decayed, optax.sgd(rate, fields.beta1))


def _muon(fields: OptimizerSection, rate: optax.Schedule, matrices: Matrices) -> optax.GradientTransformation:
    of_matrices = optax.chain(
        scale_by_muon(matrices.anatomy, beta=fields.muon_beta),
        optax.add_decayed_weights(fields.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    labels = partial(labels_of_muon, is_matrix=matrices.is_matrix)
    return optax.multi_transform({"muon": of_matrices, "adamw": _adamw(fields, rate, matrices)}, labels)


def labels_of_muon(params: Any, *, is_matrix: Callable[[Path], bool] = MATRICES_BY_NAME.is_matrix) -> Any:
    """The optimizer of each parameter under Muon: "muon" for the matrices of layers, "adamw" for all others."""
    # Muon is made for hidden matrices: its authors leave embedding and head to AdamW.
    of_layers = jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if is_matrix(path) else "adamw", params["layers"]
    )
    return {**jax.tree.map(lambda _: "adamw", params), "layers": of_layers}


OPTIMIZERS = {
    "adamw": Optimizer(_adamw, num_moments=2, num_moments_of_matrix=2),
    # The kernels of layers by Muon, the rest by AdamW.
    "muon": Optimizer(_muon, num_moments=2, num_moments_of_matrix=1, reads_matrices=True, products=products_of),
    "lion": Optimizer(_lion, num_moments=1, num_moments_of_matrix=1),
    "sgd": Optimizer(_sgd, num_moments=1, num_moments_of_matrix=1),
}


@dataclass(frozen=True)
class OptimizerSection:
    """The section `optimizer` of a config."""

    name: str = one_of(tuple(OPTIMIZERS), "adamw")
    learning_rate: float = positive(1e-3)  # the peak, after warm-up
    warmup_fraction: float = at_least(0, 0.05, most=0.5)  # of the steps: linear to the peak
    warmup_steps: int = at_least(0, 0)  # the same in steps; above 0 it replaces the fraction
    # Then "cosine" to the last step; "wsd": the peak, and a line down in the last steps; "constant".
    schedule: str = one_of(("cosine", "wsd", "constant"), "cosine")
    decay_fraction: float = positive(0.2, most=1.0)  # of the steps, for wsd's line down
    final_learning_rate_fraction: float = at_least(0, 0.1, most=1.0)  # of the peak, at the end of cosine or line
    weight_decay: float = at_least(0, 0.1)  # on kernels only
    beta1: float = at_least(0, 0.9, is_below_one=True)  # of AdamW and Lion; momentum of SGD
    beta2: float = positive(0.95, is_below_one=True)  # of AdamW, whose bias correction divides by 1 - beta, and Lion
    epsilon: float = positive(1e-8)  # of AdamW
    muon_beta: float = positive(0.95, is_below_one=True)  # momentum of Muon
    max_grad_norm: float = positive(1.0)  # gradients with a larger global norm are scaled to this
    # For schedules without flush: to each gradient, which is of older weights, is added what the one before it lacked.
    error_feedback: bool = False
    average_decay: float = at_least(0, 0.0, is_below_one=True)  # of the average of the weights (EMA); 0: none is kept
    zero1: bool = True  # older configs: False stands for mesh.shard="none", which replaces it
