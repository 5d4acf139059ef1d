"""Numbers of a row from the time of a step; which are left out where they are not known."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.models import BertConfig, GPTConfig, LanguageModel
from jaxpipe.models.flops import model_flops
from jaxpipe.training.speed import Speed, bytes_in_use, format_flops

GPT = GPTConfig(num_layers=2, hidden=16, num_heads=2, vocab_size=32, num_positions=8)
BERT = BertConfig(num_layers=2, hidden=16, num_heads=2, vocab_size=32, num_positions=8)
# 3 microbatches of 4 sequences of 8 tokens.
BATCH = {"tokens": jax.ShapeDtypeStruct((3, 4, 8), np.int32)}


def device(kind: str, memory: dict[str, int] | None = None) -> Any:
    return SimpleNamespace(device_kind=kind, memory_stats=lambda: memory)


def pipeline(*devices: Any, dtype: str = "bfloat16") -> Any:
    mesh = SimpleNamespace(devices=np.array(devices, object), local_devices=devices[:2], size=len(devices))
    return SimpleNamespace(mesh=mesh, dtype=dtype)


def test_rates_are_counts_over_the_time():
    numbers = Speed(LanguageModel(GPT), pipeline(device("cpu")), BATCH).numbers(0.5)
    assert numbers == {"tokens_per_s": 192.0, "samples_per_s": 24.0, "step_time_s": 0.5}


@pytest.mark.parametrize(("dtype", "peak"), [("bfloat16", 989.5e12), ("float32", 494.7e12)])
def test_mfu_is_of_the_peak_of_all_devices(dtype, peak):
    speed = Speed(LanguageModel(GPT), pipeline(*[device("NVIDIA H200")] * 4, dtype=dtype), BATCH)
    assert speed.numbers(0.5)["mfu"] == pytest.approx(12 * model_flops(GPT, seq_len=8) / (0.5 * 4 * peak))


def test_mfu_is_left_out_where_one_device_is_not_known():
    assert "mfu" not in Speed(LanguageModel(GPT), pipeline(device("NVIDIA H200"), device("cpu")), BATCH).numbers(0.5)


def test_bytes_are_the_largest_of_this_processs_devices():
    memory = [{"bytes_in_use": n, "peak_bytes_in_use": 10 * n, "bytes_limit": 99} for n in (3, 5, 7)]
    devices = [device("NVIDIA H200", each) for each in memory]
    numbers = Speed(LanguageModel(GPT), pipeline(*devices), BATCH).numbers(0.5)
    assert (numbers["bytes_in_use"], numbers["peak_bytes_in_use"]) == (5, 50)


def test_devices_that_do_not_count_their_memory_have_no_bytes():
    assert bytes_in_use(jax.local_devices()) == {}
    assert bytes_in_use([device("other", {"num_allocs": 3})]) == {}


def test_a_bert_is_counted_with_the_words_that_it_predicts():
    batch = {**BATCH, "predicted": jax.ShapeDtypeStruct((3, 4, 2), np.int32)}
    few, many = (12 * model_flops(BERT, seq_len=8, num_predicted=num) for num in (2, 8))
    assert LanguageModel(BERT).flops(batch) == few
    assert few < many


def test_the_spread_is_that_of_the_last_hundred_steps():
    speed = Speed(LanguageModel(GPT), pipeline(device("cpu")), BATCH)
    assert speed.spread() == {}
    for step_time_s in [1000.0] * 7 + list(range(1, 101)):
        speed.numbers(step_time_s)
    # Of 1 ... 100: the value at (100 - 1) q of the ordered ones, counted from 0, between its neighbours.
    expected = {"step_time_median_s": 50.5, "step_time_p10_s": 10.9, "step_time_p90_s": 90.1}
    assert speed.spread() == pytest.approx(expected)
    assert speed.format_spread() == (
        "the last 100 steps took 50.5 s each in the median, 10.9 to 90.1 s from 10 % to 90 % of them"
    )


def test_the_report_says_what_mfu_is_counted_against():
    known = format_flops(LanguageModel(GPT), pipeline(*[device("NVIDIA H200")] * 4), BATCH)
    assert known.endswith("MFU is of 4 x 989.5 TFLOP/s, the peak of 'NVIDIA H200'")
    # Two layers: 12 hidden^2 + 2 seq hidden multiplications a token; the words: hidden x 32. Two FLOPs each, thrice.
    assert 6 * (2 * (12 * 16**2 + 2 * 8 * 16) + 16 * 32) == 43008
    assert known.startswith("43,008 per token")
    assert format_flops(LanguageModel(GPT), pipeline(device("cpu")), BATCH).endswith("the peak of 'cpu' is not known")
