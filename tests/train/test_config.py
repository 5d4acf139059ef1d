"""Every config error is found before anything is compiled and says how to mend it."""

import pytest

from jaxpipe.config import base_config, check
from jaxpipe.errors import ConfigError


def _with(**values):
    config = base_config()
    for path, value in values.items():
        section, field = path.split("__")
        config[section][field] = value
    return config


def test_the_base_config_is_legal_and_has_its_sections_in_order():
    check(base_config())
    assert list(base_config().to_dict()) == ["model", "data", "pipeline", "mesh", "optimizer", "train", "checkpoint"]


def test_a_mistyped_field_names_the_closest():
    with pytest.raises(AttributeError, match='Did you mean "hidden"'):
        base_config().model.hiden = 64


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data__batch_size": 33}, ["data.batch_size=33", "batch-divides", "data.batch_size=32, the nearest"]),
        ({"data__batch_size": 49, "mesh__data": 2}, ["x mesh.data=2", "data.batch_size=64, the nearest"]),
        ({"data__batch_size": 5}, ["data.batch_size=16, the nearest"]),
        ({"pipeline__schedule": "1f1"}, ["Did you mean '1f1b'?", "field-choice", "gpipe"]),
        ({"pipeline__num_chunks": 2, "mesh__pipe": 4}, ["has no effect", "pipeline.num_chunks=1"]),
        ({"mesh__pipe": 9, "pipeline__num_microbatches": 8}, ["9 stages", "mesh.pipe=8 or less"]),
        ({"mesh__tensor": 2}, ["tensor-axis", "mesh.tensor=1"]),
        ({"model__hidden": 130, "model__num_heads": 4}, ["hidden-per-head", "128", "132"]),
        ({"model__attention": "flash"}, ["model-attention", "xla"]),
        ({"model__vocab_size": 255}, ["vocabulary", "model.vocab_size=256"]),
        ({"model__dtype": "float16"}, ["model.dtype", "bfloat16"]),
        ({"train__steps": 0}, ["train.steps=0", "1 or more"]),
        ({"optimizer__learning_rate": 0.0}, ["more than 0"]),
        ({"data__heldout_fraction": 0.6}, ["at most 0.5"]),
        ({"optimizer__beta1": 1.0}, ["optimizer.beta1=1.0", "less than 1.0"]),
        ({"optimizer__beta2": 1.0}, ["optimizer.beta2=1.0", "less than 1.0"]),
        ({"optimizer__beta2": float("inf")}, ["optimizer.beta2=inf", "a finite number"]),
        ({"optimizer__max_grad_norm": float("inf")}, ["optimizer.max_grad_norm=inf", "a finite number"]),
        ({"optimizer__weight_decay": float("nan")}, ["optimizer.weight_decay=nan", "a finite number"]),
        ({"data__seed": 2**32}, ["data.seed=4294967296", "at most 4294967295"]),
        ({"train__seed": 2**32}, ["train.seed=4294967296", "at most 4294967295"]),
        ({"train__seed": -1}, ["0 or more"]),
    ],
)
def test_one_broken_rule_is_reported_alone_with_its_repair(values, words):
    with pytest.raises(ConfigError, match=r"^1 rule broken in here\n") as error:
        check(_with(**values), name="here")
    for word in [*words, "  rule ", "  repair: "]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer__beta1": 0.0},
        {"optimizer__final_learning_rate_fraction": 0.0},
        {"data__seed": 2**32 - 1, "train__seed": 2**32 - 1},
    ],
)
def test_the_ends_of_a_range_are_legal(values):
    check(_with(**values))


def test_all_broken_rules_of_a_round_are_reported():
    with pytest.raises(ConfigError, match="3 rules broken") as error:
        check(_with(data__batch_size=33, mesh__pipe=9, model__attention="flash"))
    assert str(error.value).count("repair:") == 3


def test_wrong_types_are_reported_before_anything_uses_them():
    config = base_config()
    with config.ignore_type():
        config.model.hidden = "wide"
    with pytest.raises(ConfigError, match=r"model.hidden='wide' is of type str\n *rule field-type"):
        check(config)
