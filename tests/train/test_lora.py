"""A run with adapters: it begins as a run that is there, freezes that, is resumed, evaluated and sampled."""

import re
import shutil

import jax
import numpy as np
import pytest
from running import run

from jaxpipe.config import base_config, check
from jaxpipe.errors import ConfigError
from jaxpipe.training import fit


def config_of(**model):
    config = base_config("llama")
    config.model.update(num_layers=4, hidden=32, feed_forward=48, num_kv_heads=1, dtype="bfloat16", **model)
    config.data.update(batch_size=8, seq_len=16, files="jaxpipe/mesh/*.py")
    config.mesh.update(data=2, pipe=2, platform="cpu")
    config.pipeline.update(num_microbatches=2, schedule="1f1b")
    config.optimizer.update(learning_rate=1e-2, average_decay=0.9)
    config.train.update(steps=4, eval_every=2, eval_batches=1)
    config.checkpoint.save_every = 2
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_fraction = 0.0
    return config


@pytest.mark.ci
def test_a_run_goes_on_with_adapters_resumes_and_is_evaluated(tmp_path):
    # A text of its own: of the repository's, the few held-out tokens may grow harder while the others are learned.
    text = tmp_path / "squares.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}.\n" for number in range(2000)))
    before = config_of()
    before.data.files = str(text)
    base = fit(before, tmp_path / "base")
    config = config_of(lora_rank=2, lora_targets="all")
    config.data.files = str(text)
    config.checkpoint.init_from = str(tmp_path / "base")
    once = fit(config, tmp_path / "once")
    frozen = dict(jax.tree_util.tree_leaves_with_path(base.params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(once.params):
        if path in frozen:
            np.testing.assert_array_equal(leaf, frozen[path].astype("bfloat16"))
        else:
            assert path[-1].key in ("lora_a", "lora_b")
    held_out = [row["eval_loss"] for row in once.metrics if "eval_loss" in row]
    assert min(held_out) < base.metrics[-1]["eval_loss"]
    # As if it had ended after the checkpoint of step 2.
    shutil.copytree(tmp_path / "once", tmp_path / "halves")
    shutil.rmtree(tmp_path / "halves/checkpoints/4")
    halves = fit(config, tmp_path / "halves")
    assert len(halves.metrics) == 4
    assert [row["loss"] for row in halves.metrics] == [row["loss"] for row in once.metrics]
    for kind in ("params", "average"):
        for wanted, found in zip(*(jax.tree.leaves(getattr(of, kind)) for of in (once, halves)), strict=True):
            np.testing.assert_array_equal(wanted, found)
    # Evaluated by the command, on another mesh, the average with the frozen weights.
    for more, name in ((["--average"], "eval_average_loss"), ([], "eval_loss")):
        mesh = ("--config.mesh.data=1", "--config.mesh.pipe=4")
        told = run("eval", f"--workdir={tmp_path}/once", *more, *mesh)
        (loss,) = re.findall(r"held-out loss ([0-9.]+)", told.stdout)
        assert float(loss) == pytest.approx(once.metrics[-1][name], abs=2e-3)  # bfloat16, in another order


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("llama", {"pipeline.schedule": "pipedream_2bw"}, "lora-alone: .*without flush every parameter"),
        ("llama", {"optimizer.name": "muon"}, "lora-alone: .*Muon is for the kernels"),
        ("mixtral", {"model.bias_rate": 0.01}, "lora-alone: .*biases of experts"),
        ("gpt", {"model.lora_targets": "query,gate"}, "lora-targets"),
        ("gpt", {"model.lora_targets": "query,query"}, "lora-targets: each target once"),
        ("gpt", {"model.lora_rank": 0, "model.lora_alpha": 4.0}, "field-used"),
        ("gpt", {"model.lora_rank": -1}, "field-range: model.lora_rank is 0 or more"),
        ("gpt", {"model.lora_alpha": 0.0}, "field-range: model.lora_alpha is more than 0"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(family, changes, told):
    config = base_config(family)
    config.model.lora_rank = 4
    check(config)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=rf"rule {told}(.|\n)*repair: "):
        check(config)
