"""The formula of the re-evaluation against cases worked by hand, and against the simulator where it must agree."""

from dataclasses import replace

import pytest
from settings_of_gpts import gpt_setting
from test_step_estimate import Given

from experiments.reevaluation import reevaluate, speedup, step_mfu
from jaxpipe.cluster.hardware import HARDWARE
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Roofline


def test_the_formula_by_hand():
    # B = 128 sequences, p = 8, b = 2: 64 microbatches and 7 more that fill the pipeline.
    assert step_mfu(1.0, batch_size=128, microbatch_size=2, pipe=8) == pytest.approx(64 / 71, rel=1e-12)
    # Twice as large a microbatch costs 135 / 142, so that a stage must become a nineteenth faster.
    assert speedup(142 / 135, batch_size=128, microbatch_sizes=(2, 1), pipe=8) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_without_links_and_ends_the_simulator_says_the_same(size):
    setting = gpt_setting(pipe=4, num_microbatches=32)
    (found,) = reevaluate(setting, Given(), [size])
    assert found.microbatch_size == size
    assert found.simulated.setting.num_microbatches == 32 // size
    assert found.formula_mfu == pytest.approx(found.simulated.mfu, rel=1e-9)
    assert found.stage_mfu == pytest.approx(found.formula_mfu * (32 / size + 3) / (32 / size), rel=1e-12)


def test_copies_of_the_pipeline_share_the_batch():
    setting = gpt_setting(pipe=4, num_microbatches=8, data=4)
    for found in reevaluate(setting, Given(), [1, 2, 8]):
        assert found.formula_mfu == pytest.approx(found.simulated.mfu, rel=1e-9)


def test_what_the_formula_leaves_out_costs_time():
    source = Roofline(HARDWARE["a100-80g"])
    for found in reevaluate(gpt_setting(pipe=8, num_microbatches=32), source, [1, 2, 4]):
        assert found.simulated.mfu < found.formula_mfu < found.stage_mfu


def test_a_size_that_does_not_divide():
    with pytest.raises(ConfigError, match=r"microbatch_size=5 .*\n.*microbatch-divides(.|\n)*set microbatch_size=4"):
        reevaluate(replace(gpt_setting(num_microbatches=8)), Given(), [5])
