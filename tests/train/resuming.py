"""A run that is stopped early, and what two runs must have in common to be the same run, bit for bit."""

import re
import signal

import numpy as np
from running import metrics

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.checkpoints.arrays import read_array, shapes
from jaxpipe.training.metrics import MetricsWriter

CLOCK = re.compile("time|per_s")


def stop_after(step, monkeypatch):
    """A signal comes while the row of `step` is written."""
    write = MetricsWriter.write

    def write_and_stop(self, number, *given, **more):
        write(self, number, *given, **more)
        if number == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(MetricsWriter, "write", write_and_stop)


def numbers(workdir):
    """The rows of metrics, without what depends on the clock."""
    return [{name: value for name, value in row.items() if not CLOCK.search(name)} for row in metrics(workdir)]


def assert_same_arrays(workdir, other, *, step):
    """Parameters, optimizer state and counters in the checkpoints of a step."""
    ours, theirs = (arrays(folder / CHECKPOINTS / str(step)) for folder in (workdir, other))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name, strict=True)


def arrays(folder):
    """All arrays of a checkpoint."""
    return {name: read_array(folder, name) for name in shapes(folder)}
