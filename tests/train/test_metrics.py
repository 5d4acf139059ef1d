"""Numbers that are not finite never reach a file."""

import json

import pytest

from jaxpipe.errors import TrainingError
from jaxpipe.training.metrics import MetricsWriter, check_finite

NUMBERS = {"loss": 1.0, "grad_norm": 2.0, "tokens_per_s": 3.0}


@pytest.mark.parametrize(("name", "number"), [("loss", float("nan")), ("grad_norm", float("inf"))])
def test_the_step_and_the_number_are_named(name, number):
    check_finite(7, NUMBERS)
    with pytest.raises(TrainingError, match=rf"step 7: {name}={number}\n *rule finite-numbers[^@]*\n *repair: "):
        check_finite(7, NUMBERS | {name: number})


def test_a_row_with_nan_is_not_written(tmp_path):
    with MetricsWriter(tmp_path, num_steps=2) as metrics:
        metrics.write(1, NUMBERS)
        with pytest.raises(ValueError, match="not JSON compliant"):
            metrics.write(2, NUMBERS | {"loss": float("nan")})
    assert [json.loads(row)["step"] for row in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]
