"""Small schedules as text, compared whole.

After a change that is meant, write them anew with `python tests/schedules/test_golden.py` and read the diff.
"""

from pathlib import Path
from types import MappingProxyType

import pytest

from jaxpipe.drawing import text
from jaxpipe.schedules import build, simulate, to_csv
from jaxpipe.schedules.methods.option import Options, written_options

FOLDER = Path(__file__).parent.parent / "golden"
# method, devices, microbatches, and options where they are not the defaults
CASES = [
    ("gpipe", 2, 3),
    ("gpipe", 4, 4),
    ("1f1b", 1, 3),
    ("1f1b", 2, 3),
    ("1f1b", 4, 8),
    ("1f1b", 5, 3),
    ("bpipe", 4, 8),
    ("interleaved_1f1b", 2, 4),
    ("interleaved_1f1b", 3, 5),
    ("interleaved_1f1b", 2, 4, {"extra_warm_up": True}),
    ("interleaved_1f1b", 3, 5, {"extra_warm_up": True}),
    ("breadth_first", 2, 3),
    ("gems", 2, 3),
    ("chimera", 4, 4),
    ("chimera", 4, 7),
    ("bitpipe", 4, 4),
    ("bitpipe", 2, 3),
    ("dualpipe", 4, 8),
    ("dualpipe", 2, 3),
    ("dualpipe_v", 2, 4),
    ("dualpipe_v", 3, 4),
    ("zb_h1", 4, 8),
    ("zb_h2", 3, 6),
    ("zb_v", 4, 8),
    ("zb_v", 3, 2),
    ("v_half", 4, 6),
    ("v_min", 4, 6),
]
# rows with their EVICT and LOAD actions
ROWS = [
    ("bpipe", 4, 8, {}),
    ("bpipe", 4, 8, {"unit": "microbatch"}),
    ("bpipe", 8, 12, {}),
]


def path_of(name: str, num_devices: int, num_microbatches: int, options: Options = MappingProxyType({})) -> Path:
    which = "_".join([name, *filter(None, [written_options(options)])])
    return FOLDER / f"{which}_D{num_devices}_N{num_microbatches}.txt"


def grid_of(name: str, num_devices: int, num_microbatches: int, options: Options = MappingProxyType({})) -> str:
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
    return text(simulate(schedule))


@pytest.mark.parametrize("case", CASES, ids=lambda case: path_of(*case).stem)
def test_grid_is_as_it_was(case):
    assert grid_of(*case) == path_of(*case).read_text()


def csv_path_of(name: str, num_devices: int, num_microbatches: int, options: dict[str, str]) -> Path:
    return FOLDER / f"{'_'.join([name, *options.values()])}_D{num_devices}_N{num_microbatches}.csv"


def csv_of(name: str, num_devices: int, num_microbatches: int, options: dict[str, str]) -> str:
    return to_csv(build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options))


@pytest.mark.parametrize("case", ROWS, ids=lambda case: csv_path_of(*case).stem)
def test_rows_are_as_they_were(case):
    assert csv_of(*case) == csv_path_of(*case).read_text()


if __name__ == "__main__":
    for case in CASES:
        path_of(*case).write_text(grid_of(*case))
    for case in ROWS:
        csv_path_of(*case).write_text(csv_of(*case))
