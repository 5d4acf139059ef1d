"""The compiled program: permutes as the table says, no pool-sized writes in its loops, size flat in N and D."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpipe.bench.memory import pool_shapes
from jaxpipe.mesh import make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.hlo import num_instructions, permute_pairs, whole_writes
from jaxpipe.program.rounds import permute_scope
from jaxpipe.schedules import build


def compile_step(schedule, *, num_layers, hidden=16):
    model = LanguageModel(GPTConfig(num_layers=num_layers, hidden=hidden, num_heads=2, vocab_size=32, seq_len=8))
    num_devices = schedule.num_devices
    mesh = make_mesh(data=1, pipe=num_devices, tensor=1, devices=jax.devices()[:num_devices])
    pipeline = Pipeline(schedule, mesh, StageFunctions.of(model), num_layers=num_layers)
    params = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))
    tokens = jax.ShapeDtypeStruct((schedule.num_microbatches, 2, 8), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    pages = pipeline.page_like(params, batch)
    return pipeline, pages, pipeline.loss_and_grads.lower(params, batch, 1.0).compile().as_text()


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches"), [("1f1b", 8, 16), ("1f1b", 3, 5), ("1f1b", 2, 4), ("gpipe", 4, 6)]
)
def test_pairs_of_each_position_are_those_that_the_clock_replays(name, num_devices, num_microbatches):
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    pipeline, _, text = compile_step(schedule, num_layers=num_devices)
    expected = {
        permute_scope(position, k): set(pairs)
        for position, permutes in enumerate(pipeline.table.permutes)
        for k, pairs in enumerate(permutes)
    }
    assert expected
    assert permute_pairs(text) == expected


@pytest.mark.parametrize(("name", "num_layers"), [("1f1b", 4), ("1f1b", 7), ("1f1b", 8), ("gpipe", 8)])
def test_no_pool_sized_writes_in_the_loops(name, num_layers):
    schedule = build(name, num_devices=4, num_microbatches=6)
    pipeline, pages, text = compile_step(schedule, num_layers=num_layers)
    assert whole_writes(text, pool_shapes(pipeline.table.storage.num_pages, pages)) == []


def test_a_three_way_switch_writes_the_pool():
    """The form that the program avoids (XLA copies what passes beside a branch) is seen by the count."""
    pool = jnp.zeros((5, 64, 64))

    def round_(carry, kind):
        pool, x = carry

        def idle(pool, x):
            return pool, x

        def write(pool, x):
            return lax.dynamic_update_index_in_dim(pool, x, kind % 5, 0), x

        def read(pool, x):
            return pool, x @ pool[kind % 5]

        return lax.switch(kind % 3, [idle, write, read], pool, x), None

    step = jax.jit(lambda pool, x: lax.scan(round_, (pool, x), jnp.arange(12)))
    text = step.lower(pool, pool[0]).compile().as_text()
    assert len(whole_writes(text, {"f32[5,64,64]"})) > 0


def test_program_size_depends_on_neither_microbatches_nor_devices():
    sizes = [
        num_instructions(compile_step(build("1f1b", num_devices=d, num_microbatches=n), num_layers=d)[2])
        for d, n in ((4, 8), (4, 64), (8, 16))
    ]
    assert max(sizes) <= 1.02 * min(sizes)
