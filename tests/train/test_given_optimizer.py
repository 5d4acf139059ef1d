"""Optimizers given in Python do to stacked and split parameters what they do to layers one by one, or are refused."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from running import settings

from jaxpipe.config import base_config
from jaxpipe.errors import CompileError, ConfigError
from jaxpipe.training import Model, fit
from jaxpipe.training.by_layer import by_layer
from jaxpipe.training.optimizer import learning_rate, make_optimizer

NUM_LAYERS, NUM_STEPS, BATCH_SIZE, HIDDEN = 3, 3, 8, 8


@pytest.fixture(autouse=True)
def _settings():
    with settings():
        yield


def init(key):
    def normal(seed, *shape):
        return jnp.asarray(np.random.default_rng(seed).normal(scale=0.3, size=shape), jnp.float32)

    kernels = normal(2, NUM_LAYERS, HIDDEN, HIDDEN) * jnp.array([1.0, 3.0, 9.0])[:, None, None]
    shared = {"in": normal(0, 4, HIDDEN), "out": normal(1, HIDDEN, 4)}
    return {"shared": shared, "layers": {"kernel": kernels, "bias": normal(3, NUM_LAYERS, HIDDEN)}}


def layer(params, x, batch, random):
    return x + jnp.tanh(x @ params["kernel"] + params["bias"])


def head(shared, x, batch):
    return ((x @ shared["out"] - batch["y"]) ** 2).sum()


MODEL = Model(lambda shared, batch, random: batch["x"] @ shared["in"], layer, head, init)


def batches(step):
    x = np.random.default_rng(step).normal(size=(BATCH_SIZE, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def config(schedule="1f1b", *, data=2):
    """Stages of two layers and of one."""
    made = base_config("given")
    made.mesh.update(data=data, pipe=2, platform="cpu")
    made.pipeline.update(schedule=schedule, num_microbatches=2)
    made.train.update(steps=NUM_STEPS, eval_every=NUM_STEPS)
    made.checkpoint.save_every = 2
    made.optimizer.max_grad_norm = 1e9
    return made


def one_by_one(optimizer, *, has_delay=False):
    """The parameters after these steps on one device, every layer a tree of its own."""

    def apart(params):
        rows = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(NUM_LAYERS)]
        return {"shared": params["shared"], "layers": rows}

    def loss(params, batch):
        x = batch["x"] @ params["shared"]["in"]
        for each in params["layers"]:
            x = layer(each, x, batch, None)
        return head(params["shared"], x, batch) / BATCH_SIZE

    older = params = apart(init(None))
    state = optimizer.init(params)
    grads_of, update = jax.jit(jax.grad(loss)), jax.jit(optimizer.update)
    for step in range(NUM_STEPS):
        grads = grads_of(older if has_delay else params, batches(step))
        older = params
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    return {"shared": params["shared"], "layers": layers}


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


OF_PARAMETERS = {
    "lamb": lambda: optax.lamb(0.01, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "lars": lambda: optax.lars(0.1),
    "muon": lambda: optax.contrib.muon(0.01),
    "adamw, decay by shape": lambda: optax.adamw(0.01, weight_decay=0.5, mask=is_matrix),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    "several steps": lambda: optax.MultiSteps(optax.lamb(0.01), 2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.lamb)(optax.linear_schedule(0.02, 0.0, 5)),
}
OF_TREES = {
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)),
    "if finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
}
OF_NUMBERS = {"adam": lambda: optax.adam(0.01), "sgd": lambda: optax.sgd(0.1, momentum=0.9)}
OFTEN = ("adafactor",)  # whose state has other shapes than the parameters


def assert_as_one_by_one(params, optimizer):
    """Sums in another order; Muon's steps in bfloat16 make more of it."""
    for leaf, want in zip(jax.tree.leaves(params), jax.tree.leaves(one_by_one(optimizer)), strict=True):
        assert np.linalg.norm(leaf - want) <= 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ci if name in OFTEN else pytest.mark.slow)
        for name in OF_PARAMETERS | OF_TREES | OF_NUMBERS
    ],
)
def test_an_optimizer_does_what_it_does_to_the_layers_one_by_one(name, tmp_path):
    """Stopped and resumed on the way: its state goes through a checkpoint."""
    make = (OF_PARAMETERS | OF_TREES | OF_NUMBERS)[name]
    for on_step in (lambda step, metrics, state: step == 2, None):
        run = fit(config(), tmp_path, model=MODEL, train_batches=batches, optimizer=make(), on_step=on_step)
    assert run.num_done == NUM_STEPS
    assert_as_one_by_one(run.params, make())


def muon_config(schedule="1f1b", *, data=2):
    made = config(schedule, data=data)
    made.optimizer.update(name="muon", learning_rate=0.02)
    return made


def renamed(params):
    """No kernel by name: matrices of a model of one's own are what has two dims in a layer."""
    return {**params, "layers": {"w": params["layers"]["kernel"], "b": params["layers"]["bias"]}}


def muon_of_optax(made):
    """Optax's Muon for the matrices of layers, its AdamW for all else, which no name lets decay."""
    fields = made.optimizer
    rate = learning_rate(made)
    muon = optax.contrib.muon(rate, beta=fields.muon_beta, weight_decay=fields.weight_decay, consistent_rms=0.2)
    adamw = optax.adamw(rate, fields.beta1, fields.beta2, fields.epsilon, weight_decay=0.0)

    def labels(params):
        of_layers = jax.tree.map(lambda leaf: "muon" if leaf.ndim == 2 else "adamw", params["layers"])
        return {"shared": jax.tree.map(lambda _: "adamw", params["shared"]), "layers": of_layers}

    return optax.multi_transform({"muon": muon, "adamw": adamw}, labels)


def test_muon_of_a_config_takes_the_matrices_of_a_model_of_ones_own():
    """Updates of stacked layers, and of staged ones, are optax's of one layer after the other."""
    made = muon_config()
    params = renamed(init(None))
    grads = jax.tree.map(lambda leaf: jnp.cos(7 * leaf), params)
    row = {**params, "layers": jax.tree.map(lambda leaf: leaf[1], params["layers"])}
    optimizer = muon_of_optax(made)
    of_row = {**grads, "layers": jax.tree.map(lambda leaf: leaf[1], grads["layers"])}
    wanted, _ = jax.jit(optimizer.update)(of_row, jax.jit(optimizer.init)(row), row)
    ours = make_optimizer(made, params)
    for num_dims in (0, 2):  # in front of the layers
        tree, given = (
            {**part, "layers": jax.tree.map(lambda leaf, n=num_dims: leaf[(None,) * n], part["layers"])}
            for part in (params, grads)
        )
        updates, _ = jax.jit(ours.update)(given, ours.init(tree), tree)
        layers = jax.tree.map(lambda leaf, n=num_dims: leaf[(0,) * n][1], updates["layers"])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), {**updates, "layers": layers}, wanted)


@pytest.mark.parametrize(
    ("schedule", "data"),
    [
        pytest.param("1f1b", 2, marks=pytest.mark.ci),
        pytest.param("zb_h1", 1, marks=pytest.mark.slow),
        pytest.param("pipedream_2bw", 2, marks=pytest.mark.slow),
    ],
)
def test_muon_trains_a_model_of_ones_own(schedule, data, tmp_path):
    """Without flush every gradient is of the weights before the last update."""
    made = muon_config(schedule, data=data)
    own = dataclasses.replace(
        MODEL,
        init=lambda key: renamed(init(key)),
        layer=lambda params, x, batch, random: layer({"kernel": params["w"], "bias": params["b"]}, x, batch, random),
    )
    run = fit(made, tmp_path, model=own, train_batches=batches)
    assert run.num_done == NUM_STEPS
    wanted = renamed(one_by_one(muon_of_optax(made), has_delay=schedule == "pipedream_2bw"))
    for leaf, want, start in zip(*map(jax.tree.leaves, (run.params, wanted, renamed(init(None)))), strict=True):
        assert np.linalg.norm(leaf - want) <= 1e-3 * np.linalg.norm(want - start)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "data"), [("zb_h1", 1), ("chimera", 2)])
def test_an_optimizer_does_the_same_under_other_schedules_and_meshes(schedule, data, tmp_path):
    optimizer = OF_PARAMETERS["lamb"]()
    run = fit(config(schedule, data=data), tmp_path, model=MODEL, train_batches=batches, optimizer=optimizer)
    assert_as_one_by_one(run.params, optimizer)


def with_empty(init):
    params = init(None)
    nothing = jnp.zeros((NUM_LAYERS, 0, 4))
    return {"shared": {**params["shared"], "none": nothing[0]}, "layers": {**params["layers"], "none": nothing}}


EMPTY = dataclasses.replace(MODEL, init=lambda key: with_empty(init))


def empty_batches(step):
    return {**batches(step), "none": np.zeros((BATCH_SIZE, 0), np.float32)}


@pytest.mark.slow
def test_empty_parameters_and_batches_change_nothing(tmp_path):
    """Stopped, resumed, and taken as the start of another run."""
    given = {"model": EMPTY, "train_batches": empty_batches, "optimizer": optax.adam(0.01)}
    fit(config(), tmp_path / "run", on_step=lambda step, metrics, state: step == 2, **given)
    run = fit(config(), tmp_path / "run", **given)
    assert run.params["layers"].pop("none").shape == (NUM_LAYERS, 0, 4)
    assert run.params["shared"].pop("none").shape == (0, 4)
    assert_as_one_by_one(run.params, given["optimizer"])
    other = config()
    other.checkpoint.init_from = str(tmp_path / "run")
    assert fit(other, tmp_path / "other", dry_run=True, **given).num_done == 0


def test_empty_parameters_are_refused_without_flush(tmp_path):
    with pytest.raises(
        CompileError, match=r"(?s)rule run-of-elements: .*params\['layers'\]\['none'\] \[2, 1, 2, 0, 4\]"
    ):
        fit(config("pipedream_2bw"), tmp_path, model=EMPTY, train_batches=empty_batches)


@pytest.mark.ci
def test_what_on_step_keeps_of_the_state_stays_as_it_is(tmp_path, capsys):
    kept, seen = [], []

    def on_step(step, metrics, state):
        kept.append((state, state.params["layers"], np.asarray(state.step)))
        seen.append(jax.tree.map(lambda leaf: np.array(leaf, copy=True), state))
        state.params["shared"] = None  # the tree is the caller's

    run = fit(config(), tmp_path, model=MODEL, train_batches=batches, on_step=on_step)
    assert len(kept) == NUM_STEPS
    for step, ((state, layers, number), wanted) in enumerate(zip(kept, seen, strict=True), start=1):
        jax.tree.map(np.testing.assert_array_equal, layers, wanted.params["layers"])
        jax.tree.map(np.testing.assert_array_equal, state.optimizer, wanted.optimizer)
        assert number == int(state.step) == step
    canonical = run.pipeline.from_stages({"shared": {}, "layers": kept[-1][1]})["layers"]
    jax.tree.map(np.testing.assert_array_equal, canonical, run.params["layers"])
    assert capsys.readouterr().out.count("on_step keeps") == 1


@pytest.mark.ci
def test_a_model_trains_under_the_strictest_rules_of_jax_which_its_functions_keep(tmp_path, capsys):
    rules = []

    def strict_layer(params, x, batch, random):
        rules.append((jax.config.jax_numpy_rank_promotion, jax.config.jax_numpy_dtype_promotion))
        return x + jnp.tanh(x @ params["kernel"])

    model = dataclasses.replace(MODEL, layer=strict_layer)
    optimizer = optax.adam(optax.linear_schedule(0.01, 0.0, 9))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        given = {"train_batches": batches, "heldout_batches": [batches(9)], "optimizer": optimizer}
        run = fit(config(), tmp_path, model=model, **given, on_step=lambda *_: None)
    assert run.num_done == NUM_STEPS
    assert set(rules) == {("raise", "strict")}
    assert "on_step keeps" not in capsys.readouterr().out


def staged():
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = {"kernel": of(2, 1, 2, HIDDEN, HIDDEN), "bias": of(2, 1, 2, HIDDEN)}
    return {"shared": {"in": of(4, HIDDEN)}, "layers": layers}


@pytest.mark.parametrize("name", [*OF_PARAMETERS, *OF_TREES, *OF_NUMBERS])
def test_without_flush_an_optimizer_makes_each_number_by_itself(name):
    optimizer = (OF_PARAMETERS | OF_TREES | OF_NUMBERS)[name]()
    if name in OF_NUMBERS:
        assert by_layer(optimizer, staged(), has_flush=False) is optimizer
        return
    with pytest.raises(
        ConfigError, match=r"(?s)has no flush\n  rule optimizer-by-layer: .*\n  repair: use optimizer\."
    ):
        by_layer(optimizer, staged(), has_flush=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3)), "several of them at once"),
        (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=is_matrix)), "several of them"),
        (lambda: optax.flatten(optax.adam(1e-3)), "several of them at once"),
        (lambda: optax.adam, "optimizer=function cannot be traced: AttributeError"),
        (
            lambda: optax.polyak_sgd(),
            "(?s)cannot be traced: TypeError.*missing 1 required keyword-only argument: 'value'",
        ),
    ],
    ids=["clipped lamb", "clipped, decay by shape", "flattened", "a function", "wants the loss"],
)
def test_what_an_optimizer_cannot_be_is_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message) as refused:
        by_layer(make(), staged(), has_flush=True)
    assert "\n  rule " in str(refused.value)
    assert "\n  repair: " in str(refused.value)


def test_an_optimizer_is_shown_the_shapes_of_a_layer():
    seen = []

    def mask(params):
        seen.append(jax.tree.map(lambda leaf: leaf.ndim, params["layers"]))
        return is_matrix(params)

    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), staged())
    optimizer = by_layer(optax.adamw(1.0, weight_decay=1.0, mask=mask), staged(), has_flush=True)
    seen.clear()
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert seen
    assert all(ndims == {"kernel": 2, "bias": 1} for ndims in seen)
    assert (np.asarray(updates["layers"]["kernel"]) == -1).all()
    assert (np.asarray(updates["layers"]["bias"]) == 0).all()
