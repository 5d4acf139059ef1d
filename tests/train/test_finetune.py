"""configs/finetune.py takes the config of a working folder, and names what is missing."""

import runpy
from pathlib import Path

import pytest

from jaxpipe.config import base_config, model_config
from jaxpipe.config.checks import check
from jaxpipe.errors import ConfigError
from jaxpipe.training.run_folder import write_config

GET_CONFIG = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "finetune.py"))["get_config"]


@pytest.mark.parametrize("family", ["gpt", "bert", "llama"])
def test_it_is_the_config_of_the_folder_that_it_starts_from(family, tmp_path):
    config = base_config(family)
    config.model.num_layers, config.data.seq_len = 3, 64
    write_config(tmp_path, config)
    found = GET_CONFIG(str(tmp_path))
    assert found.checkpoint.init_from == str(tmp_path)
    assert model_config(found) == model_config(config)


def test_its_defaults_do_not_ruin_a_model(tmp_path, monkeypatch):
    """Small steps after a warm-up, whole documents, the dtype that the model came in, and no text of ours."""
    write_config(tmp_path, base_config("llama"))
    config = GET_CONFIG(str(tmp_path))
    assert 1e-5 <= config.optimizer.learning_rate <= 2e-5
    assert config.optimizer.warmup_fraction > 0
    assert config.data.packing == "documents"
    assert config.model.dtype == "float32"
    assert config.mesh.platform == config.pipeline.costs == "auto"
    with pytest.raises(
        ConfigError, match=r"data.files is not set\n *rule data-files(.|\n)*repair: set --config.data.f"
    ):
        check(config)
    config.data.files = "auto"
    check(config)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    assert GET_CONFIG(str(tmp_path)).model.dtype == "bfloat16"
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert GET_CONFIG(f"~/{tmp_path.name}").model.dtype == "bfloat16"


def test_learned_positions_stay_when_sequences_get_shorter(tmp_path):
    write_config(tmp_path, base_config("gpt"))
    found = GET_CONFIG(str(tmp_path))
    found.data.seq_len = 16
    assert model_config(found).num_positions == base_config("gpt").data.seq_len == 128


def test_without_a_folder_it_says_how_to_name_one():
    with pytest.raises(ConfigError, match=r"no working folder\n *rule finetune-folder: .*\n *repair: .*:runs/llama"):
        GET_CONFIG()
