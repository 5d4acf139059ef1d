"""The rows of every method, over a grid of devices and microbatches, are legal, and byte for byte those of 33dd3c0.

`tests/golden/rows.json` holds, for each method with options and each number of devices, a digest of the JSON forms of
its schedules of 1, 2, 3, D, D + 1, 2D + 1 and 4D microbatches. A method whose rows change on purpose gets new digests:
`python tests/schedules/test_rows_unchanged.py`, and a line in CHANGELOG.md.
"""

import hashlib
import json
from pathlib import Path

import pytest
from tiers import tiers

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import build, check, to_json
from jaxpipe.schedules.methods.option import parse_options

GOLDEN = Path(__file__).parents[1] / "golden" / "rows.json"
DIGESTS = json.loads(GOLDEN.read_text())
PLAIN, WITH_OPTIONS = ([name for name in DIGESTS if ("," in name) == has] for has in (False, True))
FEW_DEVICES = (1, 2, 3, 4, 5, 6)
MANY_DEVICES = (8, 12)


def digest(method, num_devices):
    name, *options = method.split(",")
    whole = hashlib.sha256()
    for num_microbatches in sorted({1, 2, 3, num_devices, num_devices + 1, 2 * num_devices + 1, 4 * num_devices}):
        try:
            schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **parse_options(options))
        except ScheduleError:
            text = "refused"
        else:
            text = to_json(check(schedule))
        whole.update(text.encode())
    return whole.hexdigest()[:16]


@pytest.mark.parametrize("method", tiers(PLAIN, ci=WITH_OPTIONS[::2], slow=WITH_OPTIONS[1::2]))
def test_rows_of_few_devices(method):
    assert {d: digest(method, d) for d in FEW_DEVICES} == {d: DIGESTS[method][str(d)] for d in FEW_DEVICES}


@pytest.mark.parametrize("method", tiers([], ci=PLAIN, slow=WITH_OPTIONS))
def test_rows_of_many_devices(method):
    assert {d: digest(method, d) for d in MANY_DEVICES} == {d: DIGESTS[method][str(d)] for d in MANY_DEVICES}


if __name__ == "__main__":
    GOLDEN.write_text(
        json.dumps({m: {d: digest(m, d) for d in (*FEW_DEVICES, *MANY_DEVICES)} for m in DIGESTS}, indent=1) + "\n"
    )
