"""Whole training steps for CPUs: data orders each collective in a loop or branch against all others.

XLA runs what nothing orders at once on a device. All collectives of a `shard_map` have one channel, so two over the
same devices would meet under one key, and the run dies, or the sums are those of other arrays. Two over other devices
would take each other's threads, and the run stands still.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives_of_programs import unordered_collectives
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiers import tiers

from jaxpipe.compile.step import compile_step
from jaxpipe.config import base_config, check

SIZES = {"num_layers": 4, "hidden": 16, "num_heads": 4, "vocab_size": 256}
LLAMA = SIZES | {"num_kv_heads": 2, "feed_forward": 32}
FAMILIES = {
    "gpt": SIZES,
    "bert": SIZES | {"vocab_size": 264},
    "llama": LLAMA,
    "mixtral": LLAMA | {"num_experts": 4, "experts_per_token": 2},
}
PLAIN, WHOLE = {"mesh.deterministic": False}, {"mesh.shard": "none"}
WEIGHTS = {"mesh.shard": "weights"}
# family; pipe, data, expert, tensor; schedule; fields
DIED = ("gpt", (1, 2, 1, 1), "1f1b", PLAIN | WHOLE)  # on pipe=1, data=2 after a step, ten times of ten
STOOD_STILL = ("gpt", (2, 4, 1, 1), "zb_v", {})
CASES = tiers(
    [],
    ci=[
        DIED,
        ("gpt", (2, 2, 1, 2), "pipedream_2bw", {"optimizer.name": "muon"}),
        ("mixtral", (1, 2, 2, 2), "1f1b", WEIGHTS),
    ],
    slow=[
        ("mixtral", (1, 2, 2, 1), "zb_h1", PLAIN | WHOLE | {"model.dispatch": "capacity"}),
        ("llama", (2, 2, 1, 2), "1f1b", {"pipeline.vocab_over_pipe": "true"}),
        ("gpt", (1, 2, 1, 1), "1f1b", {}),
        ("bert", (2, 2, 1, 2), "chimera", {}),
        STOOD_STILL,
        ("llama", (2, 4, 1, 1), "wpipe", PLAIN | {"pipeline.num_microbatches": 2}),
        ("gpt", (4, 2, 1, 1), "bpipe", PLAIN | {"optimizer.name": "muon"}),
        ("mixtral", (2, 1, 2, 2), "1f1b", {}),
        ("gpt", (2, 4, 1, 1), "dualpipe", PLAIN | WEIGHTS),
        ("llama", (2, 2, 1, 2), "zb_h1", PLAIN | WEIGHTS),
        ("bert", (4, 2, 1, 1), "bpipe", PLAIN | {"mesh.shard": "gradients"}),
    ],
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_of_a_training_step(case):
    family, shape, schedule, fields = case
    config = base_config(family)
    sizes = {f"model.{name}": size for name, size in FAMILIES[family].items()}
    mesh = {f"mesh.{axis}": size for axis, size in zip(("pipe", "data", "expert", "tensor"), shape, strict=True)}
    rest = {"pipeline.schedule": schedule, "pipeline.num_microbatches": 2 * shape[0], "mesh.platform": "cpu"}
    batch = {"data.batch_size": 16 * shape[0], "data.seq_len": 16, "data.files": __file__}
    config.update_from_flattened_dict({**sizes, **mesh, **rest, **batch, **fields})
    check(config)
    num_devices = int(np.prod(shape))
    compiled = compile_step(config, jax.devices()[:num_devices], gpus_per_node=num_devices).compiled
    assert unordered_collectives(compiled.as_text()) == []


@pytest.mark.parametrize("way", ["loops", "a loop and a sum", "one after the other"])
def test_what_nothing_orders_is_seen(way):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P("data"), check_vma=False)
    def two_sums(x, y, num_turns):
        def turns(x):
            return lax.fori_loop(0, num_turns, lambda _, x: lax.psum(jnp.sin(x), "data"), x)

        x = turns(x)
        y = lax.psum(y, "data") if way == "a loop and a sum" else turns(y + x if way == "one after the other" else y)
        return x, y

    text = jax.jit(two_sums).lower(jnp.ones((2, 8)), jnp.ones((2, 8)), 3).compile().as_text()
    assert bool(unordered_collectives(text)) == (way != "one after the other")
