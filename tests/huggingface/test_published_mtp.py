"""Multi-token prediction in files of the published layout: logits beside torch, there and back, what is left out."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from their_models import DEEPSEEK_V3, LLAMA, imported, logits_of, microbatch, new_model

from jaxpipe.checkpoints import restore_canonical, save_canonical
from jaxpipe.config import base_config, model_config
from jaxpipe.convert import export_model
from jaxpipe.errors import ConfigError
from jaxpipe.models import LanguageModel
from jaxpipe.models.multi_token import with_next_tokens
from jaxpipe.training.run_folder import read_config, write_config

SIZES = LLAMA | DEEPSEEK_V3 | {"num_hidden_layers": 3, "first_k_dense_replace": 1}
LAYER = "model.layers.3"
OF_MODULE = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


class Published:
    """A model of transformers and a module beside it, from the parts of transformers; random numbers everywhere."""

    def __init__(self, transformers):
        import torch
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as parts

        self.model = new_model(transformers, "DeepseekV3ForCausalLM", SIZES)
        config = self.model.config
        hidden = config.hidden_size

        def norm():
            return parts.DeepseekV3RMSNorm(hidden, eps=config.rms_norm_eps)

        linear = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = parts.DeepseekV3DecoderLayer(config, layer_idx=SIZES["num_hidden_layers"])
        self.of = dict(zip(OF_MODULE, (norm(), norm(), linear, norm()), strict=True))
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for module in (self.layer, *self.of.values()):
                for array in (*module.parameters(), *module.buffers()):
                    mean = array.mean().round() if array.dim() == 1 else 0.0  # 1 for the scales of norms
                    array.copy_(0.2 * torch.randn(array.shape, generator=generator) + mean)

    def tensors(self) -> dict:
        """Those of the module in the published file, by name; the two copies are tensors of their own."""
        own = {f"{name}.weight": module.weight for name, module in self.of.items()}
        own |= self.layer.state_dict()
        # transformers 5 joins the weights of all experts; files have each by itself.
        gates, ups = own.pop("mlp.experts.gate_up_proj").chunk(2, dim=1)
        three = {"gate": gates, "up": ups, "down": own.pop("mlp.experts.down_proj")}
        for kind, weights in three.items():
            own |= {f"mlp.experts.{expert}.{kind}_proj.weight": weight for expert, weight in enumerate(weights)}
        own |= {"embed_tokens.weight": self.model.model.embed_tokens.weight}
        own |= {"shared_head.head.weight": self.model.lm_head.weight}
        return {f"{LAYER}.{name}": tensor.detach() for name, tensor in own.items()}

    def save(self, folder: Path, *, dtype: str = "float32") -> Path:
        import torch
        from safetensors.torch import load_file, save_file

        self.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors") | self.tensors()
        tensors = {name: of.to(getattr(torch, dtype)).clone().contiguous() for name, of in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        change_config(folder, num_nextn_predict_layers=1)
        return folder

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Those of the module, of the token after the next one of every position but the last."""
        import torch

        ids = torch.tensor(tokens, dtype=torch.long)
        model = self.model.model
        with torch.no_grad():
            # After the final norm: what the published model's own code hands on.
            h = model(input_ids=ids).last_hidden_state[:, :-1]
            both = (self.of["enorm"](model.embed_tokens(ids[:, 1:])), self.of["hnorm"](h))
            x = self.of["eh_proj"](torch.cat(both, dim=-1))
            seq = x.shape[1]
            positions = torch.arange(seq)[None]
            hidden = torch.full((seq, seq), -torch.inf).triu(1)[None, None]
            rotary = model.rotary_emb(x, positions)
            y = self.layer(x, attention_mask=hidden, position_ids=positions, position_embeddings=rotary)
            y = y[0] if isinstance(y, tuple) else y
            return self.model.lm_head(self.of["shared_head.norm"](y)).numpy()


@pytest.fixture(scope="module")
def published(transformers):
    return Published(transformers)


def change_config(folder: Path, **changes) -> None:
    theirs = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(theirs | changes, indent=2, sort_keys=True) + "\n")


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def further_logits(workdir: Path, numbers: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Ours, of the next token and of the one after it."""
    model = LanguageModel(model_config(read_config(str(workdir))))
    params = restore_canonical(workdir, model=model)[1]
    shared = params["shared"]
    x, _ = model._stream(params, numbers, None, 0)
    rows = model._module("embedding", shared["embedding"]).rows(with_next_tokens(numbers))
    features, _ = model.model_head.features(numbers)(shared["head"], x, rows)
    kernel = shared["head"]["kernel"][: model.config.vocab_size]
    return logits_of(model, params, numbers)["masked_lm"], np.asarray(features[1][:, :-1] @ kernel.T)


@pytest.mark.ci
def test_logits_of_a_published_file_are_those_of_torch(published, tmp_path):
    run = imported(published.save(tmp_path / "saved"), tmp_path / "run")
    assert read_config(str(run)).model.mtp_factor == 0.1
    numbers = microbatch("llama")
    ours, further = further_logits(run, numbers)
    wanted = published.logits(numbers["tokens"])
    assert np.abs(wanted).max() > 1
    assert np.abs(further - wanted).max() < 1e-4
    assert ours.shape[:2] == numbers["tokens"].shape


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_round_trip_is_byte_identical(published, tmp_path, dtype):
    folder = published.save(tmp_path / "saved", dtype=dtype)
    export_model(str(imported(folder, tmp_path / "run")), str(tmp_path / "back"))
    assert files_of(tmp_path / "back") == files_of(folder)


@pytest.mark.ci
def test_it_is_left_out_where_config_json_does_not_ask_for_it_or_files_lack_it(published, tmp_path):
    """As transformers saves a model: the number stays in config.json, the tensors go."""
    folder = published.save(tmp_path / "saved")
    change_config(folder, num_nextn_predict_layers=0)
    without = imported(folder, tmp_path / "without")
    assert read_config(str(without)).model.mtp_factor == 0.0
    export_model(str(without), str(tmp_path / "back"))
    from safetensors.numpy import load_file

    assert not [name for name in load_file(tmp_path / "back" / "model.safetensors") if name.startswith(LAYER)]
    change_config(tmp_path / "back", num_nextn_predict_layers=1)
    assert read_config(str(imported(tmp_path / "back", tmp_path / "again"))).model.mtp_factor == 0.0
    change_config(folder, num_nextn_predict_layers=2)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=2"):
        imported(folder, tmp_path / "refused")


@pytest.mark.ci
def test_copies_with_other_numbers_are_refused(published, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = published.save(tmp_path / "saved")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER}.shared_head.head.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="rule huggingface-tied"):
        imported(folder, tmp_path / "run")


@pytest.mark.slow
def test_a_model_that_jaxpipe_made_goes_out_and_comes_back(tmp_path):
    config = base_config("deepseek_v3")
    config.model.update({"num_layers": 3, "hidden": 32, "num_heads": 2, "vocab_size": 61, "mtp_factor": 0.3})
    workdir = tmp_path / "run"
    workdir.mkdir()
    write_config(workdir, config)
    model = LanguageModel(model_config(config))
    params = model.init(jax.random.key(0))
    save_canonical(workdir, step=0, params=params)
    export_model(str(workdir), str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    back = restore_canonical(imported(tmp_path / "out", tmp_path / "back"), model=model)[1]
    jax.tree.map(np.testing.assert_array_equal, back, params)
