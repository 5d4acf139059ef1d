"""Pages on hosts in estimates: bytes of the device counted by hand, and time where PCIe is too slow."""

from dataclasses import replace

import pytest
from settings_of_gpts import gpt_setting
from test_step_estimate import Given

from jaxpipe.estimate import estimate, memory
from jaxpipe.estimate.traced import traced_layer

PIPE = 8
HOST = {"schedule": "bpipe", "options": "to=host", "pipe": PIPE, "num_microbatches": 32}
PLAIN = {**HOST, "schedule": "1f1b", "options": ""}


def with_pcie(setting, bytes_per_s: float):
    hardware = replace(setting.topology.hardware, host_bytes_per_s=bytes_per_s)
    return replace(setting, topology=replace(setting.topology, hardware=hardware))


def test_three_microbatches_and_a_block_stay_on_the_device():
    setting = gpt_setting(**HOST)
    num_layers = setting.layers_per_stage[0]
    page_bytes = traced_layer(setting).page_bytes
    held, plain = memory(setting), memory(gpt_setting(**PLAIN))
    assert num_layers == 3
    assert held.slots == 3 * num_layers * page_bytes
    assert held.transit == 3 * page_bytes  # 5/6 of three layers, in whole pages
    assert plain.slots == PIPE * num_layers * page_bytes
    assert plain.transit == 0


def test_copies_take_time_where_they_are_longer_than_what_hides_them():
    setting = gpt_setting(**HOST)
    plain_s = estimate(gpt_setting(**PLAIN), Given()).step_s
    num_bytes = 5 / 6 * setting.layers_per_stage[0] * traced_layer(setting).page_bytes
    # A forward takes 3 s, a backward 6; four fifths of PCIe's bandwidth are reached.
    for copy_s, is_longer in ((2.9, False), (9.0, True)):
        step_s = estimate(with_pcie(setting, num_bytes / copy_s / 0.8), Given()).step_s
        if is_longer:
            assert step_s >= 32 * 2 * copy_s
        else:
            assert step_s == pytest.approx(plain_s, rel=1e-9)
