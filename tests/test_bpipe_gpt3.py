"""BPipe on GPT-3: bytes and kernels of Megatron-LM are the literature's, and estimates are near what was compiled."""

import json
import runpy
from dataclasses import replace

import numpy as np
import pytest
from experiment_modules import EXPERIMENTS

from experiments import megatron_bytes
from experiments.megatron_kernels import MegatronKernels
from jaxpipe.cluster import RESERVE_BYTES, parse_topology
from jaxpipe.config import check
from jaxpipe.estimate import Roofline, memory, setting_of

TOPOLOGY = parse_topology("a100-80g:6x8")
ROOFLINE = Roofline(TOPOLOGY.hardware)
COMPILED = json.loads((EXPERIMENTS / "019_bpipe_gpt3/compiled.json").read_text())


def cell(recompute, microbatch_size=1, schedule="1f1b", model="gpt3_96b", mesh=(1, 12, 4)):
    """A setting of 128 sequences a step, `mesh` being data, pipe and tensor."""
    config = runpy.run_path(str(EXPERIMENTS.parent / f"configs/{model}.py"))["get_config"]()
    data, pipe, tensor = mesh
    config.mesh.update(data=data, pipe=pipe, tensor=tensor, order="pair_adjacent" if tensor < 8 else "contiguous")
    config.data.batch_size = 128
    config.pipeline.update(schedule=schedule, num_microbatches=128 // (data * microbatch_size))
    config.model.update(attention="xla", recompute=recompute)
    check(config)
    return setting_of(config, TOPOLOGY)


@pytest.mark.ci
def test_a_layer_keeps_what_korthikanti_et_al_count():
    """MLSys 2023: s b h (10 + 24/t + 5 a s / (h t)); with sequence parallelism s b h (34 + 5 a s / h) / t."""
    h, a, s, t, b = 9984, 104, 2048, 4, 2
    kept = megatron_bytes.kept_bytes
    assert kept(cell("none", b)) == pytest.approx(s * b * h * (34 + 5 * a * s / h) / t)
    assert kept(cell("attention", b)) == pytest.approx(34 * s * b * h / t)
    assert kept(cell("full", b)) == pytest.approx(2 * s * b * h / t)
    assert kept(cell("none", b), sequence_parallel=False) == pytest.approx(
        s * b * h * (10 + 24 / t + 5 * a * s / h / t)
    )
    assert kept(cell("full", b), sequence_parallel=False) == pytest.approx(2 * s * b * h)
    assert kept(cell("attention", b), mlp_again=True) == pytest.approx(18 * s * b * h / t)


def test_parameters_are_those_of_the_literature():
    """Narayanan et al., SC 2021, equation 2, and the last norm."""
    layers, h, s, v = 80, 9984, 2048, 51200
    expected = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h)) + 2 * h
    assert megatron_bytes.num_parameters(cell("none")) == pytest.approx(expected, rel=1e-9)


def test_stages_hold_as_many_slots_as_their_schedule():
    of = cell("attention", 2)
    states = 18 * megatron_bytes.num_parameters(of) / 48
    layer = 34 * 2048 * 2 * 9984 / 4
    layers = np.array(of.layers_per_stage)
    assert megatron_bytes.stage_bytes(of) == pytest.approx(states + np.arange(12, 0, -1) * layers * layer)
    balanced = megatron_bytes.stage_bytes(cell("attention", 2, "bpipe"))
    assert balanced.max() <= states + 7 * layers.max() * layer * (1 + 1e-9)  # ceil((D+2)/2) slots


def test_the_feed_forwards_share_of_a_layer():
    """24 s b h^2 (1 + s / (6 h)) of a layer's forward, of which its two products have 8 each."""
    layer = 24 * (1 + 2048 / (6 * 9984))
    assert megatron_bytes.mlp_share(cell("none"), with_last=True) == pytest.approx(16 / layer)
    assert megatron_bytes.mlp_share(cell("none"), with_last=False) == pytest.approx(8 / layer)


def test_the_chain_costs_its_bytes_where_heads_do_not_divide():
    source, always = MegatronKernels(ROOFLINE), MegatronKernels(ROOFLINE, always_fused=True)
    of = cell("attention", 1)  # 26 heads of a GPU
    chain, kernel = source.times(of), always.times(of)
    score_s = 26 * 2048**2 / (ROOFLINE.memory_fraction * 2.03904e12)
    assert chain.layer_forward_s - kernel.layer_forward_s == pytest.approx((37 - 4) * score_s)
    # Recomputed, then backward.
    assert chain.layer_backward_s - kernel.layer_backward_s == pytest.approx((37 - 4 + 41 - 6) * score_s)
    of = cell("none", 1)
    assert source.times(of).layer_backward_s - always.times(of).layer_backward_s == pytest.approx((41 - 6) * score_s)
    for fused in (cell("attention", 2), replace(of, tensor=2)):
        assert source.times(fused) == always.times(fused)


def test_without_the_chain_times_are_the_rooflines():
    """But for the masks of dropout, which Megatron-LM does not draw as jaxpipe does."""
    of = cell("attention", 2)
    dry = replace(of, model=replace(of.model, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0))
    assert MegatronKernels(ROOFLINE).times(of) == ROOFLINE.times(dry)


def test_bpipe_fits_what_1f1b_does_not_as_compiled():
    limit_bytes = TOPOLOGY.hardware.memory_bytes - RESERVE_BYTES
    fits = {(row["model"], row["schedule"]): row["total_bytes"] <= limit_bytes for row in COMPILED}
    for model in ("gpt3_96b", "gpt3_134b"):
        assert not fits[model, "1f1b"]
        assert fits[model, "bpipe"]
    for row in COMPILED:
        assert row["overlapped"] == row["evict_load_permutes"]
        setting = cell(row["recompute"], row["microbatch_size"], row["schedule"], row["model"], row["mesh"])
        assert memory(setting).total == pytest.approx(row["total_bytes"], rel=0.05)
