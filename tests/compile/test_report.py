"""The sums of a report, and whether a step fits."""

import dataclasses

import pytest

from jaxpipe.compile import Prediction, Report
from jaxpipe.compile.report import to_text

GIBIBYTE = 2**30
REPORT = Report(
    argument_bytes=20 * GIBIBYTE,
    temp_bytes=50 * GIBIBYTE,
    output_bytes=19 * GIBIBYTE,
    alias_bytes=18 * GIBIBYTE,
    hardware_bytes=74 * GIBIBYTE,
    num_slots=5,
    slot_bytes=GIBIBYTE,
    transit_bytes=0,
    waits_per_action=5.4,
    compile_s=1.5,
    transfers={
        "permutes": (8, 7),
        "evict_load_permutes": (4, 3),
        "exchange_permutes": (2, 1),
        "expert_collectives": (6, 5),
        "data_collectives": (9, 4),
    },
    data_bytes={"layer": (8 * GIBIBYTE, 6 * GIBIBYTE), "ends": (2 * GIBIBYTE, 0)},
    pair_bytes={"all-gather": (10 * GIBIBYTE, 9 * GIBIBYTE)},
    link=(2, 3),
    link_bytes_asked=3 * GIBIBYTE,
    link_bytes_sent=4 * GIBIBYTE,
    prediction=Prediction(
        state=18 * GIBIBYTE,
        batch=2 * GIBIBYTE,
        held={"pages": 40 * GIBIBYTE, "messages": GIBIBYTE},
        workspace={"head": 2 * GIBIBYTE, "layer_forward": 4 * GIBIBYTE},
    ),
)


def test_total_counts_what_is_updated_in_place_once():
    assert REPORT.total_bytes == (20 + 19 - 18 + 50) * GIBIBYTE


def test_a_step_fits_with_its_reserve_to_the_last_byte():
    assert REPORT.reserve_bytes == 3 * GIBIBYTE
    assert REPORT.fits  # 71 + 3 = 74
    assert not dataclasses.replace(REPORT, temp_bytes=REPORT.temp_bytes + 1).fits


def test_of_the_parts_of_an_action_the_largest_counts():
    assert REPORT.prediction.total_bytes == (18 + 2 + 40 + 1 + 4) * GIBIBYTE
    assert REPORT.prediction.temp_bytes == (40 + 1 + 4) * GIBIBYTE


def test_json_has_every_number_once():
    numbers = REPORT.to_json()
    assert numbers["total_bytes"] == 71 * GIBIBYTE
    assert numbers["predicted_bytes"] == sum(numbers["predicted"].values()) == 65 * GIBIBYTE
    assert numbers["fits"] is True
    assert (numbers["layer_data_bytes"], numbers["overlapped_layer_data_bytes"]) == (8 * GIBIBYTE, 6 * GIBIBYTE)
    assert (numbers["permutes"], numbers["overlapped_permutes"]) == (8, 7)
    assert (numbers["expert_collectives"], numbers["overlapped_expert_collectives"]) == (6, 5)
    assert "prediction" not in numbers


def test_text_says_what_is_spare_or_too_much():
    assert "fits, spare 0.00" in to_text(REPORT)
    assert "does not fit, too much 6.00" in to_text(dataclasses.replace(REPORT, temp_bytes=56 * GIBIBYTE))
    assert "8; 7 travel" in to_text(REPORT)
    assert "4 of these; 3 travel" in to_text(REPORT)
    assert "2 of these carry them to the stage's owner; 1 travel" in to_text(REPORT)
    assert "6 collectives bring rows to them and back; 5 travel" in to_text(REPORT)
    assert "9 gather layers and sum their gradients; 4 travel" in to_text(REPORT)
    assert "4.000  a step from device 2 of pipe to 3" in to_text(REPORT)
    assert "asks for    3.000" in to_text(REPORT)
    assert "of layers over data, in each traced action once; 75.0% of these travel" in to_text(REPORT)
    assert "2.000  of embedding and head; 0.0%" in to_text(REPORT)


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        ({"transit_bytes": 0}, "in transit"),
        ({"transfers": REPORT.transfers | {"evict_load_permutes": (0, 0)}}, "evict, load"),
        ({"transfers": REPORT.transfers | {"exchange_permutes": (0, 0)}}, "carry them"),
        ({"transfers": REPORT.transfers | {"expert_collectives": (0, 0)}}, "experts"),
        ({"transfers": REPORT.transfers | {"data_collectives": (0, 0)}}, "gather layers"),
        ({"data_bytes": {"layer": (0, 0), "ends": (0, 0)}}, "data bytes"),
        ({"link_bytes_asked": 0, "link_bytes_sent": 0}, "link"),
    ],
)
def test_text_has_no_line_of_a_transfer_that_the_program_does_not_have(absent, line):
    everything = dataclasses.replace(REPORT, transit_bytes=GIBIBYTE)
    without = dataclasses.replace(everything, **absent)
    assert line in to_text(everything)
    assert line not in to_text(without)
    assert list(without.to_json().values()).count(0) >= 1
