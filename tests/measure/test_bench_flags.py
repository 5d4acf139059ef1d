"""The flags that number a launched process of the benchmark come together or not at all."""

import pytest
from absl.flags import FlagValues

from jaxpipe.bench import of_processes
from jaxpipe.config import RunConfig, base_config
from jaxpipe.errors import ConfigError
from jaxpipe.measure.pinned import define_flags, is_launched


def is_launched_with(*flags):
    values = FlagValues()
    define_flags(values)
    values(["bench", "--num_processes=2", *flags])
    return is_launched(values)


@pytest.mark.parametrize(
    ("process_id", "address"), [(0, None), (None, "localhost:1"), (2, "localhost:1"), (-1, "localhost:1")]
)
def test_half_of_them_or_a_number_outside_is_refused(process_id, address):
    flags = {"process_id": process_id, "coordinator_address": address}
    with pytest.raises(ConfigError, match=r"rule processes"):
        is_launched_with(*(f"--{name}={value}" for name, value in flags.items() if value is not None))


def test_both_or_none_is_legal():
    assert not is_launched_with()
    assert is_launched_with("--process_id=1", "--coordinator_address=localhost:1")


def test_processes_are_divided_among_copies_of_the_pipeline():
    config = base_config()
    config.mesh.update(data=2, pipe=8, tensor=2)
    axes = of_processes(RunConfig.of(config), 4).mesh.axes
    assert {axis: size for axis, size in axes.items() if size > 1} == {"data": 2, "pipe": 2}
    with pytest.raises(ConfigError, match=r"mesh.data=2 with --num_processes=3"):
        of_processes(RunConfig.of(config), 3)
