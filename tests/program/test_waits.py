"""Host waits on GPUs: few an action, for every method; and the count is that of the program's conditions."""

import jax
import numpy as np
import pytest
import tiny_mlp
from jax import lax

from jaxpipe.lowering import IDLE, lower
from jaxpipe.lowering.turns import turns_of
from jaxpipe.lowering.waits import waits_per_action
from jaxpipe.program import in_place
from jaxpipe.program import pipeline as pipelines
from jaxpipe.schedules import REGISTRY, build

# Waits an action of the device that waits most; D=8, N=32, two layers a stage.
MOST = {
    "gpipe": 5,
    "1f1b": 6,
    "interleaved_1f1b": 4,
    "breadth_first": 5,
    "bitpipe": 5,
    "chimera": 5,
    "gems": 11,
    "zb_h1": 5.5,
    "zb_h2": 8,
    "zb_v": 6,
    "v_half": 7.5,
    "dualpipe": 9,
    "dualpipe_v": 8.5,
    "v_min": 7.5,
    "hanayo": 9,
    "mixpipe": 9,
    "bpipe": 10,
}
# The same where each chunk has actions of its own.
MOST_BY_CHUNK = MOST | {
    "interleaved_1f1b": 5,
    "breadth_first": 5.1,
    "chimera": 7,
    "bitpipe": 9,
    "zb_v": 7.5,
    "v_half": 9.5,
    "hanayo": 11.5,
    "dualpipe_v": 11,
    "v_min": 10.5,
    "mixpipe": 12,
    "dualpipe": 11.5,
    "gems": 13,
}
FEW = ("1f1b", "interleaved_1f1b", "bitpipe")


def test_every_method_has_a_bound():
    assert MOST.keys() == REGISTRY.keys()


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.ci) for name in MOST])
def test_the_host_waits_a_few_times_an_action(name):
    schedule = build(name, num_devices=8, num_microbatches=32)
    table = lower(schedule, layers_per_stage=(2,) * schedule.num_stages)
    assert 1 < waits_per_action(table) <= MOST[name]
    assert waits_per_action(table, by_chunk=True) <= MOST_BY_CHUNK[name]
    # No device is asked what round comes next.
    stretches = turns_of(table.round_type, ())
    assert all(place.is_certain for places in stretches for place in places)


@pytest.mark.parametrize(
    ("name", "num_microbatches", "most"),
    [("pipedream_2bw", 32, 13.5), pytest.param("wpipe", 8, 19, marks=pytest.mark.ci)],
)
def test_without_flush_rounds_of_messages_are_a_choice_and_rare_ones_share_a_guard(name, num_microbatches, most):
    schedule = build(name, num_devices=8, num_microbatches=num_microbatches)
    table = lower(schedule, layers_per_stage=(2,) * schedule.num_stages)
    assert 1 < waits_per_action(table) <= most


def walked(round_type, stretches):
    """The rounds that the program takes, and the times that it asks the device, as `run_rounds` does."""
    type_of = [*round_type, -1]
    rounds = []
    num_waits = 0

    def take(types):
        assert type_of[len(rounds)] in types
        rounds.append(type_of[len(rounds)])

    for places in stretches:
        for _ in places[0].taken:
            for place in places:
                if place.is_certain:
                    take(place.types)
                    continue
                num_waits += 1
                if place.is_choice:
                    if type_of[len(rounds)] in place.types:
                        take(place.types)
                    continue
                while type_of[len(rounds)] in place.types:
                    take(place.types)
                    num_guards = 0 if len(place.types) == 1 else 1 if place.is_light else len(place.types) + 1
                    num_waits += num_guards + 1
    return rounds, num_waits


@pytest.mark.parametrize("seed", range(8))
def test_turns_take_every_round_in_order_and_know_their_waits(seed):
    random = np.random.default_rng(seed)
    for _ in range(20):
        num_types = int(random.integers(1, 9))
        often = random.integers(0, num_types, size=random.integers(1, 60)).tolist()
        # With period two, as tables without flush, or with none.
        round_type = np.array([kind for index in often for kind in ([num_types, index] if seed % 2 else [index])])
        light = np.flatnonzero(random.random(num_types) < 0.5).tolist()
        stretches = turns_of(round_type, light)
        rounds, num_waits = walked(round_type.tolist(), stretches)
        assert rounds == round_type.tolist()
        assert num_waits == sum(place.num_waits for places in stretches for place in places)


@pytest.mark.parametrize(
    ("name", "num_devices", "by_chunk"),
    [
        ("1f1b", 2, False),
        pytest.param("bpipe", 4, False, marks=pytest.mark.slow),
        pytest.param("zb_v", 2, True, marks=pytest.mark.slow),
        pytest.param("bitpipe", 2, False, marks=pytest.mark.ci),
    ],
)
def test_they_are_the_conditions_that_a_step_evaluates(name, num_devices, by_chunk, monkeypatch):
    """Every loop of unknown length in the program is in `in_place`, where tables have only turns of known places."""
    counted = np.zeros(num_devices, int)

    def count(device):
        counted[device] += 1

    class CountingLax:
        def __getattr__(self, name):
            return getattr(lax, name)

        def while_loop(self, condition, body, carry):
            def counting(carry):
                jax.debug.callback(count, lax.axis_index("pipe"))
                return condition(carry)

            return lax.while_loop(counting, body, carry)

        def fori_loop(self, start, stop, body, carry):
            step = lambda walk: (walk[0] + 1, body(walk[0], walk[1]))  # noqa: E731
            return self.while_loop(lambda walk: walk[0] < stop, step, (start, carry))[1]

    monkeypatch.setattr(in_place, "lax", CountingLax())
    monkeypatch.setattr(pipelines, "barriers_order", lambda mesh: True)  # as on GPUs
    schedule = build(name, num_devices=num_devices, num_microbatches=4)
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=2 * schedule.num_stages, by_chunk=by_chunk)
    params = pipeline.to_stages(tiny_mlp.make_params(2 * schedule.num_stages))
    jax.block_until_ready(pipeline.loss_and_grads(params, tiny_mlp.make_batch(4)))
    jax.effects_barrier()
    num_actions = (pipeline.table.kind != IDLE).sum(axis=0)
    assert waits_per_action(pipeline.table, by_chunk=by_chunk) == pytest.approx((counted / num_actions).max())
