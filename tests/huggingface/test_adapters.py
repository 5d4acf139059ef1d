"""Adapters go into peft's files and come back byte for byte, and are merged on export.

peft itself is no dependency: names, shapes and formula stand here as peft 0.21 documents and writes them.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_round_trip import files_of, new_run
from their_models import load, microbatch, our_logits, their_logits

from jaxpipe.checkpoints import restore_canonical, save_canonical
from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.convert import convert
from jaxpipe.errors import ConfigError
from jaxpipe.models import LanguageModel
from jaxpipe.models.lora import base_of
from jaxpipe.training.run_folder import read_config, write_config

RANK, ALPHA = 3, 6.0
FIELDS = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_targets": "query,value,output,up"}
LAYER = "model.layers.{layer}."
MODULES = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (32, 16), "self_attn.o_proj": (32, 32)}
MODULES |= {"mlp.up_proj": (32, 48)}  # inputs and outputs
FILE, ABOUT = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run with adapters, and one of the model that it began as."""
    folder = tmp_path_factory.mktemp("adapted")
    run = new_run(folder / "run", "llama", num_kv_heads=2, feed_forward=48, **FIELDS)
    config = RunConfig.of(read_config(str(run)))
    model = LanguageModel(model_config(config))
    _, params = restore_canonical(run, model=model)
    base = {**params, "layers": _without_adapters(params["layers"])}
    (folder / "base").mkdir()
    write_config(folder / "base", config.replaced({"model.lora_rank": 0, "model.lora_alpha": 16.0} | NO_TARGETS))
    save_canonical(folder / "base", step=0, params=base)
    convert(str(run), f"peft:{folder}/peft")
    return folder


NO_TARGETS = {"model.lora_targets": "query,value"}


def _without_adapters(tree):
    if not isinstance(tree, dict):
        return tree
    return {
        name: _without_adapters(node)
        for name, node in tree.items()
        if "lora_a" not in (node if isinstance(node, dict) else ())
    }


def test_files_are_those_of_peft(adapted):
    tensors = load_file(adapted / "peft" / FILE)
    shapes = {
        f"base_model.model.{LAYER.format(layer=layer)}{name}.lora_{side}.weight": shape
        for layer in range(2)
        for name, (inputs, outputs) in MODULES.items()
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
    }
    assert {name: array.shape for name, array in tensors.items()} == shapes
    assert list(tensors) == sorted(tensors)
    about = json.loads((adapted / "peft" / ABOUT).read_text())
    assert (about["peft_type"], about["r"], about["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert about["target_modules"] == ["o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.ci
def test_the_merged_model_has_the_kernels_by_peft_s_formula_and_our_logits(adapted, transformers, tmp_path):
    convert(str(adapted / "run"), f"hf:{tmp_path}/merged")
    convert(str(adapted / "base"), f"hf:{tmp_path}/base")
    merged, base = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "base"))
    adapters = load_file(adapted / "peft" / FILE)
    changed = {f"{LAYER.format(layer=layer)}{name}" for layer in range(2) for name in MODULES}
    for name, weight in merged.items():
        module = name.removesuffix(".weight")
        if module not in changed:
            np.testing.assert_array_equal(weight, base[name])
            continue
        a, b = (adapters[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        np.testing.assert_allclose(weight, base[name] + ALPHA / RANK * (b @ a), atol=1e-6)
        assert np.abs(weight - base[name]).max() > 1e-3
    model = load(transformers, tmp_path / "merged", "LlamaForCausalLM")
    numbers = microbatch("llama")
    for wanted, found in zip(
        their_logits(model, numbers).values(), our_logits(adapted / "run", numbers).values(), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_they_come_back_byte_for_byte(adapted, tmp_path):
    peft = shutil.copytree(adapted / "peft", tmp_path / "peft")
    about = json.loads((peft / ABOUT).read_text())
    (peft / ABOUT).write_text(json.dumps(about | {"peft_version": "0.21.2", "use_dora": False}, indent=1))
    told = convert(f"peft:{peft}", str(tmp_path / "run"), base=str(adapted / "base"))
    assert "rank 3" in told
    config = read_config(str(tmp_path / "run"))
    assert {name: config.model[name] for name in ("lora_rank", "lora_alpha")} == {
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
    }
    assert set(config.model.lora_targets.split(",")) == set(FIELDS["lora_targets"].split(","))
    models = [
        LanguageModel(model_config(RunConfig.of(read_config(str(run))))) for run in (adapted / "run", tmp_path / "run")
    ]
    (_, wanted), (_, found) = (
        restore_canonical(run, model=model)
        for run, model in zip((adapted / "run", tmp_path / "run"), models, strict=True)
    )
    np.testing.assert_equal(found, wanted)
    convert(str(tmp_path / "run"), f"peft:{tmp_path}/back")
    assert files_of(tmp_path / "back") == files_of(peft)


def _changed(name, **fields):
    def change(folder: Path) -> None:
        if name == ABOUT:
            (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))
            return
        tensors = load_file(folder / FILE)
        first = next(iter(tensors))
        if fields["what"] == "missing":
            del tensors[first]
        elif fields["what"] == "unknown":
            tensors["base_model.model.lm_head.lora_A.weight"] = tensors[first]
        else:
            tensors[first] = tensors[first][:, 1:].copy()
        save_file(tensors, folder / FILE)

    return change


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("peft-field: use_dora is False", _changed(ABOUT, use_dora=True)),
        ("peft-field: bias is 'none'", _changed(ABOUT, bias="all")),
        ("peft-field: rank_pattern is {}", _changed(ABOUT, rank_pattern={"q_proj": 4})),
        ("peft-files", _changed(ABOUT, r="3")),
        ("peft-files", lambda folder: (folder / ABOUT).unlink()),
        ("peft-tensors", _changed(FILE, what="missing")),
        ("peft-tensors", _changed(FILE, what="unknown")),
        ("peft-shapes", _changed(FILE, what="misshapen")),
    ],
)
def test_other_adapters_are_refused_and_nothing_is_written(adapted, tmp_path, rule, change):
    peft = shutil.copytree(adapted / "peft", tmp_path / "peft")
    change(peft)
    with pytest.raises(ConfigError, match=rf"rule {rule}(.|\n)*repair: "):
        convert(f"peft:{peft}", str(tmp_path / "run"), base=str(adapted / "base"))
    assert not (tmp_path / "run").exists()


def test_runs_that_are_not_for_adapters_are_refused(adapted, tmp_path):
    with pytest.raises(ConfigError, match=r"rule peft-base.*\n.*repair: import the model first"):
        convert(f"peft:{adapted}/peft", str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"has adapters itself"):
        convert(f"peft:{adapted}/peft", str(tmp_path / "run"), base=str(adapted / "run"))
    with pytest.raises(ConfigError, match=r"rule peft-export"):
        convert(str(adapted / "base"), f"peft:{tmp_path}/none")
    gpt = new_run(tmp_path / "gpt", "gpt", lora_rank=2)
    with pytest.raises(ConfigError, match=r"rule peft-modules"):
        convert(str(gpt), f"peft:{tmp_path}/gpt2")
    assert base_of(model_config(RunConfig.of(read_config(str(gpt))))).lora is None
    convert(str(gpt), f"hf:{tmp_path}/merged")  # merged it goes
