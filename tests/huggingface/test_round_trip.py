"""A model that came from Hugging Face goes back byte for byte; one that did not loads in transformers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from their_models import (
    MODELS,
    imported,
    load,
    logits_of,
    microbatch,
    new_model,
    our_logits,
    read_model,
    their_logits,
)

from jaxpipe.checkpoints import restore_canonical, save_canonical
from jaxpipe.config import base_config, model_config
from jaxpipe.convert import export_model, import_model
from jaxpipe.huggingface import writing
from jaxpipe.huggingface.source_model import copy_source_model
from jaxpipe.models import LanguageModel
from jaxpipe.training.run_folder import read_config, write_config

ONE_OF_A_FAMILY = ["gpt2", "qwen2", "bert"]
COMPANIONS = {
    "tokenizer.json": '{"model": {"type": "BPE", "vocab": {"</s>": 0}, "merges": []}}',
    "tokenizer_config.json": "{ }\n",
    "merges.txt": "#version: 0.2\nĠ t\n",
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def round_trip(folder: Path, tmp_path: Path, **options) -> Path:
    export_model(str(imported(folder, tmp_path / "run")), str(tmp_path / "back"), **options)
    return tmp_path / "back"


def assert_same_files(folder: Path, other: Path) -> None:
    files = files_of(folder)
    assert {"config.json"} < files.keys()
    assert files == files_of(other)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_A_FAMILY else pytest.mark.slow if i % 2 else pytest.mark.ci)
        for i, name in enumerate(MODELS)
    ],
)
def test_a_round_trip_is_byte_identical(saved, tmp_path, name):
    assert_same_files(saved(name), round_trip(saved(name), tmp_path))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.ci)])
def test_a_round_trip_of_shards_in_half_precision_is_byte_identical(transformers, tmp_path, dtype):
    import torch

    model = new_model(transformers, *MODELS["llama"]).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    for name, text in COMPANIONS.items():
        (tmp_path / "saved" / name).write_text(text)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 2
    assert_same_files(tmp_path / "saved", round_trip(tmp_path / "saved", tmp_path))


@pytest.mark.ci
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_a_round_trip_with_layers_of_two_kinds_in_bfloat16_is_byte_identical(transformers, tmp_path, name):
    import torch

    model = new_model(transformers, *MODELS[name]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert_same_files(tmp_path / "saved", round_trip(tmp_path / "saved", tmp_path))


def test_an_export_has_the_logits_of_the_original_bit_by_bit(transformers, saved, tmp_path):
    numbers = microbatch("llama")
    back = load(transformers, round_trip(saved("llama3"), tmp_path), "LlamaForCausalLM")
    original = load(transformers, saved("llama3"), "LlamaForCausalLM")
    np.testing.assert_array_equal(*(their_logits(model, numbers)["masked_lm"] for model in (back, original)))


def test_a_trained_run_exports_what_it_learned(transformers, saved, tmp_path):
    """A later run has its own config.json, checkpoints of later steps, and the origin of the first."""
    first, later = imported(saved("gpt2"), tmp_path / "first"), tmp_path / "later"
    later.mkdir()
    config = read_config(str(first))
    config.model.hidden_dropout, config.model.recompute = 0.25, "full"
    write_config(later, config)
    model = LanguageModel(model_config(config))
    _, params = restore_canonical(first, model=model)
    for step in (3, 6):
        params = jax.tree.map(lambda leaf: 1.01 * leaf, params)
        save_canonical(later, step=step, params=params)
    copy_source_model(first, later)

    said = export_model(str(later), str(tmp_path / "back"), step=3)
    assert said.startswith("read       step 3 of ")
    export_model(str(later), str(tmp_path / "last"))
    assert {*files_of(tmp_path / "back")} == {*files_of(saved("gpt2"))}
    numbers = microbatch("gpt")
    theirs = their_logits(load(transformers, tmp_path / "last", "GPT2LMHeadModel"), numbers)["masked_lm"]
    assert np.abs(our_logits(later, numbers)["masked_lm"] - theirs).max() < 1e-4
    earlier = their_logits(load(transformers, tmp_path / "back", "GPT2LMHeadModel"), numbers)["masked_lm"]
    assert np.abs(earlier - theirs).max() > 1e-2


def test_another_dtype_is_that_of_tensors_and_config(transformers, tmp_path):
    import torch

    new_model(transformers, *MODELS["llama"]).save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    back = round_trip(tmp_path / "saved", tmp_path, dtype="bfloat16")
    wanted = load(transformers, tmp_path / "saved", "LlamaForCausalLM", dtype=torch.bfloat16).state_dict()
    found = load(transformers, back, "LlamaForCausalLM", dtype="auto").state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, wanted[name])
    index = json.loads((back / "model.safetensors.index.json").read_text())
    total = sum(tensor.numel() * 2 for tensor in found.values())
    assert index["metadata"]["total_size"] == total


def new_run(workdir: Path, family: str, **changes) -> Path:
    """A run of a model that jaxpipe made, with noise in every parameter."""
    config = base_config(family)
    config.model.update({"num_layers": 2, "hidden": 32, "num_heads": 4, "vocab_size": 61} | changes)
    config.data.seq_len = 20
    model = LanguageModel(model_config(config))
    generator = np.random.default_rng(0)

    def fill(path, leaf):
        numbers = generator.normal(float(path[-1].key == "scale"), 0.2, leaf.shape).astype(np.float32)
        is_of_words = path[-1].key in ("token", "kernel", "bias") and leaf.shape[0] == 128
        return np.concatenate([numbers[:61], 0 * numbers[61:]]) if is_of_words else numbers

    params = jax.tree_util.tree_map_with_path(fill, jax.eval_shape(model.init, jax.random.key(0)))
    workdir.mkdir()
    write_config(workdir, config)
    save_canonical(workdir, step=0, params=params)
    return workdir


NEW = {
    "gpt": ("gpt", "GPT2LMHeadModel", {"feed_forward": "56", "attention_dropout": 0.2}),
    "gpt_untied": ("gpt", "GPT2LMHeadModel", {"tie_embeddings": False}),
    "llama": ("llama", "LlamaForCausalLM", {"num_kv_heads": 2, "rope_scaling_factor": 4.0, "rope_theta": 100.0}),
    "llama_linear": (
        "llama",
        "LlamaForCausalLM",
        {"rope_scaling": "linear", "rope_scaling_factor": 3.0, "tie_embeddings": True, "head_size": "6"},
    ),
    "llama_yarn": (
        "llama",
        "LlamaForCausalLM",
        {"rope_scaling": "yarn", "rope_scaling_factor": 3.0, "rope_original_positions": 4, "rope_truncate": False},
    ),
    "llama_dynamic": (
        "llama",
        "LlamaForCausalLM",
        {"rope_scaling": "dynamic", "rope_scaling_factor": 3.0, "rope_original_positions": 20},
    ),
    "llama_biases": (
        "llama",
        "LlamaForCausalLM",
        {"query_key_value_bias": True, "output_bias": True, "feed_forward_bias": True},
    ),
    "mistral": ("llama", "MistralForCausalLM", {"sliding_window": "6"}),
    "heads_that_do_not_divide_hidden": (
        "llama",
        "MistralForCausalLM",
        {"num_heads": 3, "num_kv_heads": 3, "head_size": "6"},
    ),
    # As many rows as tokens, so that no choice is dropped: transformers drops none.
    "mixtral_with_a_capacity": ("mixtral", "MixtralForCausalLM", {"dispatch": "capacity", "capacity_factor": 8.0}),
    "qwen2": ("llama", "Qwen2ForCausalLM", {"query_key_value_bias": True}),
    "qwen2_window": ("llama", "Qwen2ForCausalLM", {"query_key_value_bias": True, "sliding_window": "6"}),
    "qwen2_first_full": (
        "llama",
        "Qwen2ForCausalLM",
        {"query_key_value_bias": True, "sliding_window": "6", "full_first": 1},
    ),
    "qwen3_in_turn": (
        "llama",
        "Qwen3ForCausalLM",
        {"query_key_norm": True, "sliding_window": "6", "full_every": 2},
    ),
    "qwen3": ("llama", "Qwen3ForCausalLM", {"query_key_norm": True, "head_size": "10", "tie_embeddings": True}),
    "mixtral": ("mixtral", "MixtralForCausalLM", {"num_experts": 3, "experts_per_token": 1, "balance_loss": 0.0}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_kv_heads": 2, "normalize_weights": False, "z_loss": 0.1}),
    "gpt_oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        {"num_kv_heads": 2, "sliding_window": "6", "rope_scaling": "yarn", "rope_scaling_factor": 4.0, "z_loss": 0.1},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {"query_latent_size": "9", "num_groups": 2, "rope_scaling": "yarn", "rope_scaling_factor": 4.0}
        | {"score_mscale": 0.8, "rope_original_positions": 8, "weight_scale": 2.5},
    ),
    "deepseek_v2": (
        "deepseek_v3",
        "DeepseekV2ForCausalLM",
        {"scores": "softmax", "bias_rate": 0.0, "normalize_weights": False, "num_shared": 2},
    ),
    "bert": ("bert", "MegatronBertForPreTraining", {"num_token_types": 3}),
    "bert_masked": ("bert", "MegatronBertForMaskedLM", {"num_token_types": 3, "sentence_order": False}),
    "bert_untied": ("bert", "MegatronBertForPreTraining", {"num_token_types": 3, "tie_embeddings": False}),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "llama" else pytest.mark.slow if i % 2 else pytest.mark.ci)
        for i, name in enumerate(NEW)
    ],
)
def test_a_model_of_ours_loads_in_transformers(transformers, tmp_path, name):
    family, kind, changes = NEW[name]
    run = new_run(tmp_path / "run", family, **changes)
    export_model(str(run), str(tmp_path / "model"))
    model, loading = getattr(transformers, kind).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype.itemsize == 4
    numbers = microbatch(family)
    theirs = their_logits(model.eval(), numbers)
    for head, logits in our_logits(run, numbers).items():
        assert np.abs(logits).max() > 0.5
        assert np.abs(logits - theirs[head]).max() < 1e-4


def write_words(path: Path, text: str, special: Sequence[str] = ("<|endoftext|>",)) -> tokenizers.Tokenizer:
    """Byte-level pairs, of which numbers have long ones: Qwen's own cut numbers into digits."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet)
    library.train_from_iterator([text] * 3, trainer)
    library.save(str(path))
    return library


def test_the_tokenizer_of_a_model_of_ours_goes_with_it_and_comes_back(tmp_path):
    run = new_run(tmp_path / "run", "llama")
    export_model(str(run), str(tmp_path / "bytes"))
    assert not (tmp_path / "bytes" / "tokenizer.json").exists()
    tokenizer = tmp_path / "all.tokenizer.json"
    write_words(tokenizer, "The year 1999 and the year 2024")
    config = read_config(str(run))
    config.data.tokenizer = str(tokenizer)
    write_config(run, config)
    assert "tokenizer.json" in export_model(str(run), str(tmp_path / "model"))
    import_model(str(tmp_path / "model"), str(tmp_path / "back"))
    config = read_config(str(tmp_path / "back"))
    assert Path(config.data.tokenizer).read_text() == tokenizer.read_text()
    assert json.loads((tmp_path / "back" / "hf" / "config.json").read_text())["eos_token_id"] == 0
    assert Path(config.data.tokenizer).parent == tmp_path / "back" / "hf"
    # Another one, that of later data, takes its place.
    write_words(tmp_path / "tokenizer.json", "Other words")
    config.data.tokenizer = str(tmp_path)
    write_config(tmp_path / "back", config)
    export_model(str(tmp_path / "back"), str(tmp_path / "again"))
    assert (tmp_path / "again" / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("is_imported", [False, True])
def test_the_special_tokens_of_the_tokenizer_go_with_it(transformers, saved, tmp_path, is_imported):
    """In place of those of the tokenizer that an imported model came with."""
    if is_imported:
        old = shutil.copytree(saved("qwen2"), tmp_path / "old")
        write_words(old / "tokenizer.json", "The year", special=["</s>", "<s>"])
        for name, content in {
            "special_tokens_map": {"eos_token": "</s>"},
            "generation_config": {"eos_token_id": 0},
        }.items():
            (old / f"{name}.json").write_text(json.dumps(content))
        (old / "chat_template.jinja").write_text("</s>")
        run = imported(old, tmp_path / "run")
    else:
        run = new_run(tmp_path / "run", "llama")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_words(folder / "tokenizer.json", "The year 1999", special=SPECIAL)
    beside = {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<none>"], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside | {"pad_token": {"content": "<|im_end|>"}}))
    config = read_config(str(run))
    config.data.tokenizer = str(folder)
    write_config(run, config)
    export_model(str(run), str(tmp_path / "model"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (theirs.eos_token, theirs.pad_token, theirs.chat_template) == ("<|endoftext|>", "<|im_end|>", TEMPLATE)
    assert "<none>" not in theirs.get_vocab()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.generation_config.eos_token_id == [0, 2]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt", "qwen3", "qwen3_moe", "llama"])
def test_transformers_reads_the_tokens_of_a_model_of_ours(transformers, tmp_path, name):
    family, _, changes = NEW[name]
    run = new_run(tmp_path / "run", family, **changes)
    library = write_words(tmp_path / "tokenizer.json", "The year 1999 and the year 2024")
    config = read_config(str(run))
    config.data.tokenizer = str(tmp_path)
    write_config(run, config)
    export_model(str(run), str(tmp_path / "model"))
    text = "The year 1999 and 2024, là-bas"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs(text, add_special_tokens=False)["input_ids"] == library.encode(text, add_special_tokens=False).ids


def test_large_models_of_ours_are_written_in_shards(transformers, tmp_path, monkeypatch):
    run = new_run(tmp_path / "run", "gpt")
    monkeypatch.setattr(writing.new_files, "__kwdefaults__", {"max_bytes": 30_000})
    export_model(str(run), str(tmp_path / "model"), dtype="float16")
    shards = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    sizes = [sum(array.nbytes for array in load_file(shard).values()) for shard in shards]
    assert max(sizes) <= 30_000
    _, loading = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def old_gpt2(folder: Path, target: Path, *, tied: str) -> Path:
    """As openai wrote it: no prefix, masks among the tensors; `tied`: the name of the token table, "both" too."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = {
        name.removeprefix("transformer."): array for name, array in load_file(folder / "model.safetensors").items()
    }
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 20, 20), np.uint8))
        tensors[f"h.{layer}.attn.masked_bias"] = np.full((), -1e4, np.float32)
    if tied != "wte.weight":
        tensors["lm_head.weight"] = tensors["wte.weight"] if tied == "both" else tensors.pop("wte.weight")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "tied",
    [pytest.param("wte.weight", marks=pytest.mark.ci), pytest.param("lm_head.weight", marks=pytest.mark.ci), "both"],
)
def test_old_files_of_gpt2_are_read_and_their_masks_left_out(saved, tmp_path, tied):
    folder = old_gpt2(saved("gpt2"), tmp_path / "old", tied=tied)
    numbers = microbatch("gpt")
    wanted = logits_of(*read_model(saved("gpt2")), numbers)["masked_lm"]
    np.testing.assert_array_equal(logits_of(*read_model(folder), numbers)["masked_lm"], wanted)
    if tied == "both":
        back = round_trip(folder, tmp_path)
        found, old = load_file(back / "model.safetensors"), load_file(folder / "model.safetensors")
        assert old.keys() - found.keys() == {f"h.{n}.attn.{kind}" for n in range(3) for kind in ("bias", "masked_bias")}
        assert all(np.array_equal(array, old[name]) for name, array in found.items())
