"""The experiments' scripts at small size."""

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

from jaxpipe.compile.checks import check_compilable
from jaxpipe.config.base import base_config
from jaxpipe.mesh.topology import parse_topology

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def experiment(name):
    """The module of an experiment's script."""
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", EXPERIMENTS / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_steps_temporaries_are_what_is_held_and_the_largest_part_of_an_action():
    config = base_config("gpt")
    config.model.num_layers, config.model.hidden, config.model.num_heads = 4, 256, 4
    config.model.vocab_size = 2048
    config.model.attention_dropout = config.model.hidden_dropout = 0.1
    config.mesh.pipe, config.mesh.tensor = 2, 2
    config.pipeline.num_microbatches, config.data.batch_size, config.data.seq_len = 4, 4, 192
    report = experiment("003_gpt3_13b_without_a_gpu").measure(config, jax.devices()[:4])
    # At this size XLA's CPU backend needs a few per cent more, in buffers of a few KB.
    assert report.temp_bytes == pytest.approx(report.prediction.temp_bytes, rel=0.05)
    assert max(report.prediction.workspace.values()) > 0.1 * report.temp_bytes  # so that one left out is seen
    assert report.pool_writes == report.sum_writes == 0


def test_every_case_of_experiment_005_is_for_its_topology():
    run = experiment("005_fits_without_a_gpu")
    cases = list(run.cases(run.MODELS))
    assert len({name for name, _ in cases}) == 2 * 3 * 3 * 2
    for _, config in cases:
        check_compilable(config, parse_topology(run.TOPOLOGY))


def test_bitpipes_ablation_has_the_published_order():
    run = experiment("007_bitpipe_ablation")
    for (num_devices, batch_size), published in run.PUBLISHED.items():
        seconds = run.costs(num_devices)
        # 16-bit gradients of 12 h^2 weights a layer by 2 s b h: 12 h / (s b) = 15 for each layer of a chunk
        assert seconds.gradient_messages == pytest.approx(64 / (2 * num_devices) * 15)
        rates = run.samples_per_s(num_devices, batch_size, seconds)
        for found in (rates, published):
            assert found["BitPipe"] > found["without V"] > found["without eager sync"]
        steps_s = {name: batch_size / rate for name, rate in rates.items()}
        # Four exchanges after the last backward where one is left: three more.
        exchange_s = seconds.gradient_messages * seconds.transfer
        assert steps_s["without eager sync"] - steps_s["BitPipe"] == pytest.approx(3 * exchange_s)
        # A microbatch crosses one link more on its way there and one on its way back.
        assert steps_s["without V"] - steps_s["BitPipe"] > 1.99 * seconds.transfer
    assert run.samples_per_s(8, 32, run.costs(8))["BitPipe"] == pytest.approx(39.17, rel=1e-3)


@pytest.fixture
def block():
    pytest.importorskip("torch", reason="experiment 004 compares with PyTorch")
    return experiment("004_block_on_a_gpu")


@pytest.mark.parametrize("name", ["gpt3_13b", "llama3_8b"])
def test_our_block_and_pytorchs_have_the_same_outputs_and_gradients(block, name):
    assert block.difference(block.small_case(name, "cpu")) < 1e-4


def test_a_block_with_other_rotary_frequencies_is_seen_to_differ(block, monkeypatch):
    plain = block.frequencies
    monkeypatch.setattr(block, "frequencies", lambda *arguments: [1.01 * f for f in plain(*arguments)])
    with pytest.raises(ValueError, match="differ by"):
        block.compare("llama3_8b", block.small_case("llama3_8b", "cpu"))


def test_flops_of_a_block_are_those_of_the_literature(block):
    """Narayanan et al., SC 2021, section 5.1: 24 B s h^2 + 4 B s^2 h forward, and twice that backward."""
    s, h = 2048, 5120
    assert block.block_flops(block.full_case("gpt3_13b", "gpu")) == 3 * 4 * (24 * s * h**2 + 4 * s**2 * h)
    s, h, width, key_and_value = 8192, 4096, 14336, 2 * 8 * 128
    kernels = h * (2 * h + key_and_value + 3 * width)
    assert block.block_flops(block.full_case("llama3_8b", "gpu")) == 3 * (2 * s * kernels + 4 * s**2 * h)
