"""A forward and a backward in one action have the gradients of two, and of plain `jax.grad`."""

import jax
import numpy as np
import pytest
from tiers import tiers
from tiny_mlp import assert_equivalent, loss_and_grads, make_pipeline
from tiny_models import config_of, pipeline_of, random_batch, random_params

from jaxpipe.schedules import Kind, Schedule, build
from jaxpipe.schedules.passes.overlap import apart, overlap

NUM_MICROBATCHES = 6


def kimi(num_devices: int = 2, num_microbatches: int = NUM_MICROBATCHES, num_chunks: int = 2) -> Schedule:
    sizes = {"num_devices": num_devices, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    return overlap(build("interleaved_1f1b", **sizes, extra_warm_up=True))


def dualpipe(name: str = "dualpipe") -> Schedule:
    return build(name, num_devices=2, num_microbatches=NUM_MICROBATCHES, overlap=True)


MLPS = {
    "two chunks": (kimi(), (2, 2, 2, 2)),
    "uneven": (kimi(), (1, 3, 2, 1)),
    "three chunks": (kimi(num_chunks=3), (1,) * 6),
    "one chunk": (kimi(4, 12, 1), (2, 2, 2, 2)),
    "two replicas": (dualpipe(), (3, 2)),
    "V": (dualpipe("dualpipe_v"), (2, 1, 2, 2)),
}


@pytest.mark.parametrize(
    "what", tiers(["uneven"], ci=["two chunks", "two replicas"], slow=["three chunks", "one chunk", "V"])
)
def test_pairs_have_the_gradients_of_plain_grad_and_the_digits_of_two_actions(what):
    schedule, layers_per_stage = MLPS[what]
    sizes = {"num_layers": sum(layers_per_stage), "layers_per_stage": layers_per_stage}
    pipeline = make_pipeline(schedule, **sizes)
    assert any(Kind.PAIR in kinds for kinds in pipeline.table.kinds)
    assert_equivalent(pipeline)
    found, wanted = (loss_and_grads(make_pipeline(of, **sizes)) for of in (schedule, apart(schedule)))
    # Sums are taken in the order of the row, with pairs and without.
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


DROPLESS = {"num_experts": 4, "dispatch": "dropless"}
MODELS = {
    "gpt": ("gpt", {"tensor": 2, "data": 2}, {"dropout": 0.3}, "none"),
    "llama": ("llama", {"tensor": 2}, {}, "full"),
    "mixtral": ("mixtral", {"tensor": 2, "expert": 2}, {"num_experts": 4}, "attention"),
    "dropless": ("qwen3_moe", {"tensor": 2, "expert": 2}, DROPLESS, "none"),
}


@pytest.mark.parametrize("what", tiers([], ci=["llama"], slow=["gpt", "mixtral", "dropless"]))
def test_pairs_of_models_on_a_mesh_have_the_digits_of_two_actions(what):
    family, axes, choices, recompute = MODELS[what]
    config = config_of(family, num_layers=6, recompute=recompute, **choices)
    schedule = kimi()

    def found(schedule):
        pipeline = pipeline_of(schedule, config, layers_per_stage=(1, 2, 2, 1), **axes)
        params = jax.jit(pipeline.to_stages)(random_params(config))
        key = jax.random.key(1) if "dropout" in choices else None
        batch = random_batch(NUM_MICROBATCHES, seed=0)
        batch = {name: np.repeat(leaf, 2, axis=1) for name, leaf in batch.items()}
        return pipeline.loss_and_grads(params, batch, key=key)

    def compare(leaf, wanted):
        leaf, wanted = np.asarray(leaf, np.float64), np.asarray(wanted, np.float64)
        assert np.linalg.norm(leaf - wanted) <= 1e-6 * np.linalg.norm(wanted)

    jax.tree.map(compare, found(schedule), found(apart(schedule)))
