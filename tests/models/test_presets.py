"""Every file in `configs/` is legal, says what to expect, and has as many parameters as was published."""

import ast
import math
import runpy
from functools import cache
from pathlib import Path

import jax
import pytest

from jaxpipe.config import check, model_config
from jaxpipe.models import LanguageModel

CONFIGS = Path(__file__).parents[2] / "configs"
HEADINGS = ["Command", "Hardware", "Time", "Number"]
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "finetune")  # it needs a folder

# Of Hugging Face's files, and those that a token goes through: mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B,
# Qwen/Qwen3-235B-A22B; "active" as the papers round it.
MIXTURE_PARAMETERS = {
    "mixtral_8x7b": (46_702_792_704, 12.9e9),
    "qwen3_30b_a3b": (30_532_122_624, 3.3e9),
    "qwen3_235b_a22b": (235_093_634_560, 22e9),
    # The model card's table 1 counts the logits' matrix among the active ones, and not the token table.
    "gpt_oss_20b": (20_914_757_184, 3.61e9),
    "gpt_oss_120b": (116_829_156_672, 5.13e9),
    # The paper rounds the active ones, without the token table, to 2.4 billion.
    "deepseek_v2_lite": (15_706_484_224, 2.45e9),
    "deepseek_v3": (671_026_419_200, 37e9),  # with the bias of each expert, without the module of a further token
}
# Hugging Face's safetensors of huggyllama/llama-7b, 13b, 65b and meta-llama/Meta-Llama-3-8B, 70B; 405B.
LLAMA_PARAMETERS = {
    "llama_7b": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_65b": 65_285_660_672,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_8b_128k": 8_030_261_248,
    "llama3_70b_128k": 70_553_706_496,
}
GPT_PARAMETERS = {
    "gpt3_125m": 125e6,
    "gpt3_1b3": 1.3e9,
    "gpt3_6b7": 6.7e9,
    "gpt3_13b": 13e9,
    "gpt3_96b": 96e9,
    "gpt3_134b": 134e9,
    "gpt3_175b": 175e9,
    "gpt_96": 11e9,
}
BERT_PARAMETERS = {
    # Devlin et al. 2019, section 3, and Wu et al. 2024 (BitPipe), table 3.
    "bert_base": 110e6,
    "bert_64": 5e9,
}


def load(name: str):
    return runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()


@cache
def num_parameters(name: str) -> int:
    shapes = jax.eval_shape(LanguageModel(model_config(load(name))).init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_legal_and_says_what_to_expect(name):
    check(load(name), name=name)
    text = ast.get_docstring(ast.parse((CONFIGS / f"{name}.py").read_text())) or ""
    said = [line.partition(":")[0] for line in text.splitlines()]
    assert [word for word in said if word in HEADINGS] == HEADINGS
    assert f"--config=configs/{name}.py" in text


def test_the_module_of_a_further_token_has_the_published_parameters():
    """README_WEIGHTS.md of DeepSeek-V3 says 11.5 billion beside those that it shares with the model."""
    config = load("deepseek_v3")
    config.model.mtp_factor = 0.3
    shapes = jax.eval_shape(LanguageModel(model_config(config)).init, jax.random.key(0))
    of_module = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["shared"]["head"]["further"]))
    assert of_module == pytest.approx(11.5e9, rel=0.01)
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert total == MIXTURE_PARAMETERS["deepseek_v3"][0] + of_module


def test_every_preset_is_counted():
    others = {"quickstart", "quickstart_bert", "quickstart_moe", "bench_cpu", "bench_cpu_bert"}
    others |= {"bench_cpu_llama", "bench_cpu_moe"}
    tables = LLAMA_PARAMETERS, MIXTURE_PARAMETERS, GPT_PARAMETERS, BERT_PARAMETERS
    assert set(NAMES) == others.union(*tables)


@pytest.mark.parametrize("name", MIXTURE_PARAMETERS)
def test_a_mixture_has_exactly_the_published_parameters(name):
    config = model_config(load(name))
    total, active = MIXTURE_PARAMETERS[name]
    assert num_parameters(name) == total
    of_experts = (config.num_layers - getattr(config, "num_dense", 0)) * 3 * config.hidden * config.feed_forward
    left_out = of_experts * (config.num_experts - config.experts_per_token)
    if name.startswith("gpt_oss") or name == "deepseek_v2_lite":
        left_out += config.vocab_size * config.hidden
    assert total - left_out == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", LLAMA_PARAMETERS)
def test_a_llama_has_exactly_the_published_parameters(name):
    assert num_parameters(name) == LLAMA_PARAMETERS[name]


@pytest.mark.parametrize("name", GPT_PARAMETERS)
def test_a_gpt_has_the_parameters_of_its_name(name):
    assert num_parameters(name) == pytest.approx(GPT_PARAMETERS[name], rel=0.02)


@pytest.mark.parametrize("name", GPT_PARAMETERS)
def test_a_gpt_has_the_parameters_of_the_closed_formula(name):
    """With h hidden, L layers, V words and s positions, embeddings tied: 12 L h^2 + 13 L h + V h + s h + 2 h.

    Kernels of a layer: queries, keys, values 3 h^2, output h^2, feed forward 4 h^2 up and 4 h^2 down. Its
    biases: 3 h + h + 4 h + h; its two norms: 4 h. Tables of words and positions, and the last norm's 2 h.
    """
    config = load(name)
    layers, hidden = config.model.num_layers, config.model.hidden
    layer = (3 + 1 + 4 + 4) * hidden**2 + (3 + 1 + 4 + 1) * hidden + 4 * hidden
    ends = (config.model.vocab_size + config.data.seq_len) * hidden + 2 * hidden
    assert num_parameters(name) == layers * layer + ends
    words, positions = config.model.vocab_size * hidden, config.data.seq_len * hidden
    assert layers * layer + ends == 12 * layers * hidden**2 + 13 * layers * hidden + words + positions + 2 * hidden


@pytest.mark.parametrize("name", BERT_PARAMETERS)
def test_a_bert_has_the_parameters_of_its_name(name):
    assert num_parameters(name) == pytest.approx(BERT_PARAMETERS[name], rel=0.03)


@pytest.mark.parametrize("name", BERT_PARAMETERS)
def test_a_bert_has_the_parameters_of_the_closed_formula(name):
    """BertForPreTraining's: 12 L h^2 + 13 L h + (V + 512 + 2) h, and its norms and heads.

    Heads: the words' transform h^2 + h with its norm 2 h and V biases; the pooler h^2 + h; the order 2 h + 2. The norm
    after the embeddings, 2 h, stands after the last layer here. V = 30522 words are 239 x 128 = 30592 rows.
    """
    model = load(name).model
    layers, h, rows = model.num_layers, model.hidden, 239 * 128
    tables, heads = (rows + 512 + 2) * h, (h * h + h) + 2 * h + rows + (h * h + h) + (2 * h + 2)
    assert num_parameters(name) == 12 * layers * h * h + 13 * layers * h + 2 * h + tables + heads


def test_bert_base_has_the_published_parameters_and_rows_that_are_no_words():
    """110,106,428: Hugging Face's BertForPreTraining of bert-base-uncased, tied, counts as many."""
    assert num_parameters("bert_base") - (30592 - 30522) * (768 + 1) == 110_106_428
