"""Models of transformers, trained here on a mesh, are what transformers and PyTorch's AdamW make of them.

Both compute in float32 and round in other orders, a few 1e-7 of a gradient. AdamW divides by the root of the second
moment, which makes noise of the smallest gradients as large as any: 1e-3 of what three steps change is asked of each
tensor.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from their_models import DEEPSEEK_V2, GPT_OSS, LLAMA, load, new_model

from jaxpipe.config import model_config
from jaxpipe.convert import convert
from jaxpipe.huggingface.adapters import modules_of, tensors_of
from jaxpipe.huggingface.configs import ARCHITECTURES
from jaxpipe.mesh import key_of
from jaxpipe.models import LanguageModel
from jaxpipe.train import main as train
from jaxpipe.training.batches import batches_of, read_corpus
from jaxpipe.training.metrics import METRICS
from jaxpipe.training.optimizer import learning_rate
from jaxpipe.training.run_folder import read_config

ROOT = Path(__file__).parents[2]
NUM_STEPS, LARGEST_ERROR = 3, 1e-3
MESH = ["--config.mesh.data=2", "--config.mesh.pipe=2", "--config.mesh.platform=cpu"]
SIZES = LLAMA | {"vocab_size": 300, "num_hidden_layers": 4, "num_attention_heads": 4, "tie_word_embeddings": False}
# Class of a model, its sizes, and what its run has besides.
MODELS = {
    "llama": ("LlamaForCausalLM", SIZES, ["--config.mesh.tensor=2"]),
    "mixtral": (
        "MixtralForCausalLM",
        SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
        ["--config.mesh.expert=2", "--config.model.balance_loss=0.0"],
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        SIZES | GPT_OSS | {"num_local_experts": 4, "swiglu_limit": 7.0},  # at 1.0 rounding moves numbers over the limit
        ["--config.mesh.expert=2", "--config.model.balance_loss=0.0"],
    ),
    # Layers of two kinds; of a DeepSeek-V3 only we would move the bias of experts.
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        SIZES
        | DEEPSEEK_V2
        | {"num_attention_heads": 4, "num_key_value_heads": 4}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2},  # an expert that few tokens choose has noise for gradients
        ["--config.mesh.expert=2", "--config.model.balance_loss=0.0"],
    ),
}
BATCH = [
    *("--config.data.batch_size=16", "--config.data.seq_len=16", "--config.pipeline.num_microbatches=4"),
    *("--config.data.files=auto", "--config.data.packing=windows", "--config.optimizer.weight_decay=0.1"),
]
STEPS = [f"--config.train.steps={NUM_STEPS}", "--config.optimizer.learning_rate=0.01"]


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt_oss", "deepseek_v2")), "mixtral"],
)
def case(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def original(transformers, tmp_path_factory, case):
    folder = tmp_path_factory.mktemp("model") / "original"
    new_model(transformers, *case[:2]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(original, case):
    """The folder of our run; converted beside it, and converted back."""
    folder = original.parent
    convert(f"hf:{original}", str(folder / "converted"))
    config = f"--config={ROOT}/configs/finetune.py:{folder / 'converted'}"
    assert train([config, f"--workdir={folder / 'run'}", *MESH, *case[2], *BATCH, *STEPS]) == 0
    convert(str(folder / "run"), f"hf:{folder / 'back'}")
    return folder / "run"


def train_in_torch(model, run: Path) -> list[float]:
    """The same steps of `model`, on the same tokens; its losses."""
    import torch

    config = read_config(str(run))
    optimizer, batches = config.optimizer, batches_of(config, read_corpus(config).train)
    # Decay for matrix products alone, not for norms and embeddings; the head's product is one.
    groups: dict[float, list] = {optimizer.weight_decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        is_product = any(part in name for part in ("proj", "lm_head", ".gate.", ".router.")) and "bias" not in name
        groups[optimizer.weight_decay if is_product else 0.0].append(parameter)
    adamw = torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()],
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
    )
    losses = []
    for step in range(NUM_STEPS):
        batch = {name: torch.tensor(array).long().flatten(0, 1) for name, array in batches.at(step).items()}
        logits = model(input_ids=batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
        for group in adamw.param_groups:
            group["lr"] = float(learning_rate(config)(step))
        adamw.step()
        losses.append(loss.item())
    return losses


def numbers(model) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().astype(np.float64) for name, value in model.state_dict().items()}


@pytest.mark.ci
def test_three_steps_on_a_mesh_are_those_of_torch(transformers, original, trained, case):
    model = load(transformers, original, case[0])
    before = {name: value.copy() for name, value in numbers(model).items()}
    losses = train_in_torch(model, trained)
    wanted, found = numbers(model), numbers(load(transformers, trained.parent / "back", case[0]))
    # What the model brought along went with the run: it comes back in the form that it had.
    assert (trained.parent / "back" / "config.json").read_bytes() == (original / "config.json").read_bytes()
    rows = [json.loads(line) for line in (trained / METRICS).read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert found.keys() == wanted.keys()
    changes = {name: np.linalg.norm(wanted[name] - start) for name, start in before.items()}
    assert min(changes.values()) > 0
    errors = {name: np.linalg.norm(found[name] - wanted[name]) / change for name, change in changes.items()}
    assert max(errors.values()) <= LARGEST_ERROR, errors


def with_adapters(model, initial: dict[str, np.ndarray], *, rank: int, alpha: float) -> dict:
    """Freezes `model`, and adds to the weights of its layers products that are trained, by peft's formula.

    Args:
        initial: A by name of the module, "rank in".

    Returns:
        The parametrizations, by name of the module.
    """
    import torch

    class Adapted(torch.nn.Module):
        def __init__(self, a, num_outputs: int):
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor(a))
            self.b = torch.nn.Parameter(torch.zeros(num_outputs, rank))

        def forward(self, weight):
            return weight + alpha / rank * self.b @ self.a

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters = {}
    for name, a in initial.items():
        module = model.get_submodule(name)
        adapters[name] = Adapted(a, module.weight.shape[0])
        torch.nn.utils.parametrize.register_parametrization(module, "weight", adapters[name])
    return adapters


@pytest.mark.slow
def test_three_steps_of_adapters_are_those_of_torch(transformers, tmp_path):
    """Under a split backward; all that is trained here are A and B."""
    rank, alpha = 3, 12.0
    new_model(transformers, "LlamaForCausalLM", SIZES).save_pretrained(tmp_path / "theirs")
    convert(f"hf:{tmp_path}/theirs", str(tmp_path / "converted"))
    lora = [f"--config.model.lora_rank={rank}", f"--config.model.lora_alpha={alpha}", "--config.model.lora_targets=all"]
    command = [
        *(
            f"--config={ROOT}/configs/finetune.py:{tmp_path}/converted",
            f"--workdir={tmp_path}/run",
            *MESH,
            *BATCH,
            *STEPS,
        ),
        *(*lora, "--config.pipeline.schedule=zb_h1", "--config.mesh.tensor=2"),
    ]
    assert train(command) == 0
    convert(str(tmp_path / "run"), f"peft:{tmp_path}/peft")
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config = model_config(read_config(str(tmp_path / "run")))
    architecture = ARCHITECTURES["LlamaForCausalLM"]
    params = LanguageModel(config).init(key_of(0))  # whose A the run began with
    by_path = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    initial = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): by_path[path][layer].T.copy()
        for name, path, layer in tensors_of(modules_of(architecture, LanguageModel(config)), config.num_layers)
        if "lora_A" in name
    }
    model = load(transformers, tmp_path / "theirs", "LlamaForCausalLM")
    adapters = with_adapters(model, initial, rank=rank, alpha=alpha)
    losses = train_in_torch(model, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert len(adapters) == 4 * 7
    for name, adapter in adapters.items():
        for side, wanted, before in (("A", adapter.a, initial[name]), ("B", adapter.b, 0)):
            numbers = wanted.detach().numpy()
            error = np.linalg.norm(found[f"base_model.model.{name}.lora_{side}.weight"] - numbers)
            assert error <= LARGEST_ERROR * np.linalg.norm(numbers - before), (name, side)
