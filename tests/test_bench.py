"""The benchmark runs, in one process and in two, and prints what it says it prints. Nothing timed is asserted."""

import json
import os
import subprocess
import sys

import pytest

KEYS = {
    *("schedule", "num_devices", "num_microbatches", "pipelined_cpu_s", "unpipelined_cpu_s", "work_ratio"),
    *("pipelined_wall_s", "unpipelined_wall_s", "compile_s", "argument_bytes", "temp_bytes", "alias_bytes"),
    *("slot_bytes", "num_slots", "hlo_slot_copies"),
}
SMALL = {"model.hidden": 128, "data.seq_len": 64, "model.num_layers": 4, "mesh.pipe": 4, "pipeline.num_microbatches": 8}


def bench(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    small = [f"--config.{field}={value}" for field, value in SMALL.items()]
    command = [
        sys.executable,
        "-m",
        "jaxpipe.bench",
        "--config=configs/bench_cpu.py",
        "--format=json",
        "--num_repeats=1",
    ]
    ran = subprocess.run([*command, *small, *arguments], capture_output=True, text=True, env=environment, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_one_process():
    numbers = bench()
    assert numbers.keys() >= KEYS
    assert numbers["num_devices"] == numbers["num_slots"] == 4
    assert numbers["hlo_slot_copies"] == 0
    assert numbers["temp_bytes"] <= numbers["expected_temp_bytes"]
    assert numbers["alias_bytes"] > 0.9 * numbers["argument_bytes"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_processes():
    numbers = bench("--num_processes=2")
    assert numbers.keys() >= KEYS | {"efficiency"}
    assert numbers["num_devices"] == numbers["num_slots"] == 2
    assert 0 < numbers["efficiency"] < 2
