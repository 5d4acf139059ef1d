"""Files of a DeepSeek-V3 in FP8: numbers as transformers dequantizes them, on the way in; bfloat16 on the way out."""

import json

import numpy as np
import pytest
from their_models import DEEPSEEK_V3, LLAMA, imported, load, microbatch, new_model, our_logits, their_logits

from jaxpipe.convert import export_model
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.fp8 import dequantized

# Blocks that are whole, and smaller ones at the ends.
SIZES = LLAMA | DEEPSEEK_V3 | {"hidden_size": 132, "moe_intermediate_size": 256, "num_hidden_layers": 3}
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def quantized_pair(weight):
    """Numbers and scales of a matrix of torch, each block with its largest number at the format's end."""
    import torch

    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.zeros(rows, columns)
    numbers = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            at = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scales[i, j] = weight[at].abs().max() / 448
            numbers[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return numbers, scales


def of_torch(numbers, scales) -> np.ndarray:
    import torch

    return dequantized(numbers.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy().reshape(*scales.shape, 4))


@pytest.mark.ci
def test_numbers_are_those_of_transformers(transformers):
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers, scales = quantized_pair(torch.randn(256, 384, generator=torch.Generator().manual_seed(0)))
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales)
    np.testing.assert_array_equal(of_torch(numbers, scales), theirs.numpy())


@pytest.fixture
def quantized(transformers, tmp_path):
    """A folder in FP8, and the model of transformers with the same numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    model = new_model(transformers, "DeepseekV3ForCausalLM", SIZES).to(torch.bfloat16)
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    for each in (folder, plain):
        model.save_pretrained(each)
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    left = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "kv_b_proj")  # kv_b_proj: some stay as they are
    for name in sorted(name for name in tensors if not any(word in name for word in left)):
        numbers, scales = quantized_pair(tensors[name].float())
        tensors |= {name: numbers, f"{name}_scale_inv": scales}
        dense[name] = torch.tensor(of_torch(numbers, scales))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({name: tensor.float() for name, tensor in dense.items()}, plain / "model.safetensors", {"format": "pt"})
    theirs = json.loads((folder / "config.json").read_text())
    published = {"quantization_config": QUANTIZATION, "auto_map": {"AutoConfig": "configuration_deepseek.X"}}
    (folder / "config.json").write_text(json.dumps(theirs | published))
    return folder, load(transformers, plain, "DeepseekV3ForCausalLM", dtype=torch.float32)


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
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    back = load(transformers, tmp_path / "back", "DeepseekV3ForCausalLM", dtype="auto")
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].to(tensor.dtype)), name
    assert back.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.ci
def test_numbers_without_scales_and_other_blocks_are_refused(quantized, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = quantized
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("scale_inv"))
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="rule huggingface-fp8"):
        imported(folder, tmp_path / "damaged")
    theirs = json.loads((folder / "config.json").read_text())
    theirs["quantization_config"]["weight_block_size"] = [64, 64]
    (folder / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(ConfigError, match="quantization_config="):
        imported(folder, tmp_path / "other")
