"""Gradients of adapters under a pipeline are those that peft has of the same files in transformers.

Needs peft, which jaxpipe does not: `pip install peft`, then `pytest -m slow` on this file.
"""

import jax
import numpy as np
import pytest
from streamed_runs import staged
from test_round_trip import new_run

from jaxpipe.checkpoints import restore_canonical, save_canonical
from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.convert import convert
from jaxpipe.huggingface import configs
from jaxpipe.huggingface.adapters import modules_of, tensors_of
from jaxpipe.models import LanguageModel
from jaxpipe.training.run_folder import read_config, write_config
from jaxpipe.training.step import name_losses

NUM_MICROBATCHES = 4
LARGEST_ERROR = 1e-5  # of a tensor's norm: float32, in another order
SIZES = {"num_layers": 4, "num_kv_heads": 2, "feed_forward": 48}
MESH = {"mesh.data": 2, "mesh.pipe": 2, "mesh.platform": "cpu", "pipeline.num_microbatches": NUM_MICROBATCHES}
# Family, what of a layer has adapters, and the rest of the run.
CASES = {
    "split": ("llama", "all", {"pipeline.schedule": "zb_h1", "mesh.tensor": 2, "mesh.shard": "weights"}),
    "v": ("llama", "query,value,down", {"pipeline.schedule": "zb_v", "mesh.tensor": 2}),
    "replicas": ("llama", "gate,key", {"pipeline.schedule": "bitpipe"}),
    "parked": (
        "qwen3_moe",
        "query,value,output",
        {"pipeline.schedule": "bpipe", "mesh.data": 1, "mesh.pipe": 4, "model.balance_loss": 0.0},
    ),
    "experts": (
        "mixtral",
        "query,key,value,output",
        {"pipeline.schedule": "1f1b", "mesh.data": 1, "mesh.expert": 2, "model.balance_loss": 0.0},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_peft(case, transformers, tmp_path):
    peft = pytest.importorskip("peft")
    family, targets, more = CASES[case]
    run = new_run(tmp_path / "run", family, **SIZES, lora_rank=3, lora_alpha=4.5, lora_targets=targets)
    config = RunConfig.of(read_config(str(run))).replaced(MESH | more)
    write_config(run, config)
    convert(str(run), f"peft:{tmp_path}/peft")
    tokens = np.random.default_rng(1).integers(61, size=(NUM_MICROBATCHES, 4, 19), dtype=np.int32)
    loss, found = ours(run, {"tokens": tokens[..., :-1], "targets": tokens[..., 1:]})
    write_base(run, tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    model = peft.PeftModel.from_pretrained(model, tmp_path / "peft", is_trainable=True)
    wanted_loss, wanted = theirs(model, tokens.reshape(-1, 19))
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        norm = np.linalg.norm(wanted[name])
        assert norm > 0.1
        assert np.linalg.norm(gradient - wanted[name]) <= LARGEST_ERROR * norm, name


def ours(run, batch):
    """Summed loss and gradients under the run's pipeline, by peft's names."""
    params, pipeline, config = staged(run)
    loss, grads = pipeline.loss_and_grads(params, batch, 1.0)
    by_path = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.jit(pipeline.from_stages)(grads))
    }
    model = LanguageModel(model_config(config))
    architecture = configs.architecture_of(configs.new_config(config, dtype="float32"), where=configs.CONFIG)
    rows = tensors_of(modules_of(architecture, model), model.config.num_layers)
    return float(name_losses(loss)["loss"]), {name: by_path[path][layer].T for name, path, layer in rows}


def write_base(run, folder):
    """Exports what the adapters stand beside: the merged model with each B at 0."""
    config = read_config(str(run))
    model = LanguageModel(model_config(RunConfig.of(config)))
    _, params = restore_canonical(run, model=model)
    plain = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * 0 if path[-1].key == "lora_b" else leaf, params)
    base = folder.parent / "plain"
    base.mkdir()
    write_config(base, config)
    save_canonical(base, step=0, params=plain)
    convert(str(base), f"hf:{folder}")


def theirs(model, tokens):
    """Summed loss and gradients of peft's model."""
    import torch

    tokens = torch.tensor(tokens).long()
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    trained = {
        name.replace(".default", ""): value.grad for name, value in model.named_parameters() if value.requires_grad
    }
    return loss.item(), {name: grad.numpy() for name, grad in trained.items()}
