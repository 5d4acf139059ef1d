"""Files of a gpt-oss in MXFP4: numbers as transformers dequantizes them, on the way in; bfloat16 on the way out."""

import json

import numpy as np
import pytest
from their_models import GPT_OSS, LLAMA, imported, load, microbatch, new_model, our_logits, their_logits

from jaxpipe.convert import export_model
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.mxfp4 import dequantized

SIZES = LLAMA | GPT_OSS | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def random_pair(num_experts: int, num_out: int, num_in: int, *, seed: int, scales: tuple[int, int] = (122, 127)):
    """Blocks and scales; numbers of about 0.1."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(256, size=(num_experts, num_out, num_in // 32, 16), dtype=np.uint8)
    return blocks, generator.integers(*scales, size=blocks.shape[:-1], dtype=np.uint8)


@pytest.mark.ci
def test_numbers_are_those_of_transformers(transformers):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_pair(3, 40, 96, seed=0, scales=(0, 253))
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=dtype)
        np.testing.assert_array_equal(dequantized(blocks, scales), theirs.float().numpy())


@pytest.fixture
def quantized(transformers, tmp_path):
    """A folder in MXFP4, and the model of transformers with the same numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    model = new_model(transformers, "GptOssForCausalLM", SIZES).to(torch.bfloat16)
    folder = tmp_path / "quantized"
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith("_proj") and "experts" in name)):
        num_experts, num_in, num_out = tensors.pop(name).shape
        blocks, scales = random_pair(num_experts, num_out, num_in, seed=seed)
        tensors |= {f"{name}_blocks": torch.tensor(blocks), f"{name}_scales": torch.tensor(scales)}
        state[name] = torch.tensor(dequantized(blocks, scales))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(theirs | {"quantization_config": QUANTIZATION}))
    # Anew: the frequencies of one in bfloat16 are rounded.
    model = new_model(transformers, "GptOssForCausalLM", SIZES)
    model.load_state_dict(state)
    return folder, model


@pytest.mark.ci
def test_quantized_files_come_in_dequantized_and_go_out_in_bfloat16(transformers, quantized, tmp_path):
    import torch

    folder, model = quantized
    run = imported(folder, tmp_path / "run")
    numbers = microbatch("llama")
    wanted = their_logits(model, numbers)["masked_lm"]
    assert np.abs(wanted).max() > 1
    assert np.abs(our_logits(run, numbers)["masked_lm"] - wanted).max() < 1e-4
    export_model(str(run), str(tmp_path / "back"))
    back = load(transformers, tmp_path / "back", "GptOssForCausalLM", dtype="auto")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    for name, tensor in back.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, model.state_dict()[name].to(torch.bfloat16))


@pytest.mark.ci
def test_blocks_without_scales_are_refused(quantized, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = quantized
    tensors = load_file(folder / "model.safetensors")
    for damaged in ("scales", "blocks"):
        name = next(name for name in tensors if name.endswith(damaged))
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"rule huggingface-(mxfp4|dtype)"):
            imported(folder, tmp_path / damaged)
