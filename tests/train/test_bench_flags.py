"""The flags that tell a process of the benchmark which it is come together or not at all."""

import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.measure.pinned import check_process


@pytest.mark.parametrize(
    ("process", "coordinator"), [(0, None), (None, "localhost:1"), (2, "localhost:1"), (-1, "localhost:1")]
)
def test_half_of_them_or_a_number_outside_is_refused(process, coordinator):
    with pytest.raises(ConfigError, match=r"rule bench-process"):
        check_process(process, coordinator, num_processes=2)


def test_both_or_none_is_legal():
    check_process(None, None, num_processes=1)
    check_process(1, "localhost:1", num_processes=2)
