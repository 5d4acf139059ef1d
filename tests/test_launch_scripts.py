"""The scripts of configs/launch, with stand-ins for the programs that they call."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "configs" / "launch"
LONG_S = 60.0  # what ends at once may take so long on a busy machine
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "8"}


@pytest.fixture
def stand_in(tmp_path):
    """Makes a program that writes its arguments into a file, and what is in the environment into another."""
    (tmp_path / "bin").mkdir()

    def stand_in(name, then):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/{name}.calls\n{then}\n')
        program.chmod(0o755)

    return stand_in


def run_script(script, tmp_path, *arguments, **environment):
    """The exit code of a script of configs/launch that finds the stand-ins first."""
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHON": "python"} | environment
    command = ["bash", str(SCRIPTS / script), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=LONG_S).returncode


def calls(tmp_path, name):
    """The arguments of each call of a stand-in."""
    file = tmp_path / f"{name}.calls"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.iterdir() if path.suffix in (".sh", ".sbatch")))
def test_scripts_are_bash(script):
    result = subprocess.run(["bash", "-n", SCRIPTS / script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    [(0, 0, False), (2, 0, False), (1, 0, False), (75, 0, True), (76, 0, True), (137, 3, True), (75, 500, True),
     (76, 500, False), (137, 500, False)],
)  # fmt: skip
def test_sbatch_requeues_what_can_go_on(stand_in, tmp_path, code, restarts, is_requeued):
    stand_in("srun", f"exit {code}")
    stand_in("scontrol", "")
    found = run_script(
        "train.sbatch", tmp_path, "--config=a", "--workdir=b", **SLURM | {"SLURM_RESTART_COUNT": str(restarts)}
    )
    assert found == code
    assert calls(tmp_path, "scontrol") == ["show job 4711", "requeue 4711"] * is_requeued
    (call,) = calls(tmp_path, "srun")
    assert call.endswith("python -m jaxpipe.train --config=a --workdir=b")


@pytest.mark.parametrize(("line", "said"), [("Requeue=0", "ends here"), ("Requeue=1", "requeued, restart 1")])
def test_sbatch_stopped_for_good_says_so_and_asks_for_nothing(stand_in, tmp_path, line, said):
    stand_in("srun", "exit 75")
    stand_in("scontrol", f'[ "$1" = show ] && echo "   {line} Restarts=0 BatchFlag=1"')
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"} | SLURM
    command = ["bash", str(SCRIPTS / "train.sbatch")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LONG_S
    )
    assert done.returncode == 75
    assert said in done.stdout
    assert ("requeue 4711" in calls(tmp_path, "scontrol")) == (": requeued" in done.stdout) == (line == "Requeue=1")


@pytest.mark.parametrize("codes", [[0], [2], [75], [76, 0], [137, 76, 75], [76] * 21])
def test_openmpi_starts_again_what_was_lost(stand_in, tmp_path, codes):
    count = f"$(wc -l < {tmp_path}/mpirun.calls)"
    version = 'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.6"; exit; fi'
    stand_in("mpirun", f"{version}\ncodes=(0 {' '.join(map(str, codes))})\nexit ${{codes[{count} - 1]}}")
    code = run_script("openmpi.sh", tmp_path, "--config=a", HOSTS="node1:8,node2:8")
    assert code == codes[-1]
    version_call, *runs = calls(tmp_path, "mpirun")
    assert version_call == "--version"
    assert len(runs) == len(codes)
    assert all(run.startswith("--host node1:8,node2:8 ") for run in runs)
    assert all(run.endswith(" python -m jaxpipe.train --config=a") for run in runs)


def test_openmpi_5_gives_each_process_its_flags(stand_in, tmp_path):
    version = 'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.6"; exit; fi'
    drop_own = 'while [ "$1" != bash ]; do shift; done'
    of_process = "OMPI_COMM_WORLD_SIZE=16 OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_LOCAL_RANK=1"
    stand_in("mpirun", f'{version}\n{drop_own}\n{of_process} "$@"')
    stand_in("python", f'echo "$JAX_LOCAL_DEVICE_IDS" > {tmp_path}/device')
    assert run_script("openmpi.sh", tmp_path, "--config=a b", HOSTS="node1:8,node2:8", PORT="1234") == 0
    assert calls(tmp_path, "python") == [
        "-m jaxpipe.train --config=a b --coordinator_address=node1:1234 --num_processes=16 --process_id=9"
    ]
    assert (tmp_path / "device").read_text() == "1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", [75, 138])  # saved; ended before it listened to signals
def test_openmpi_hands_a_signal_on_as_sigusr1_and_waits(stand_in, tmp_path, number, code):
    """Of SIGTERM a real mpirun makes 1, a minute later."""
    version = 'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.6"; exit; fi'
    waits = f"trap 'exit 1' TERM\ntrap 'sleep 0.5; exit {code}' USR1\necho ready\nwhile true; do sleep 0.05; done"
    stand_in("mpirun", f"{version}\n{waits}")
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOSTS": "node1:2"}
    script = subprocess.Popen(
        ["bash", str(SCRIPTS / "openmpi.sh")],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        # Tests that a shell has started in the background inherit SIGINT as ignored, which no script can trap.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert script.stdout.readline() == "ready\n"
    script.send_signal(number)
    assert script.wait(timeout=LONG_S) == code
    script.stdout.close()
    assert len(calls(tmp_path, "mpirun")) == 2


def test_the_cluster_experiment_runs_under_srun(stand_in, tmp_path):
    stand_in("python", "")
    assert run_script("cluster_experiment.sbatch", tmp_path, "--topology=a800-80g:1x8", **SLURM) == 0
    (call,) = calls(tmp_path, "python")
    assert re.fullmatch(
        r"experiments/010_cluster/run.py --write --launch=srun .* python -m jaxpipe.train --topology=a800-80g:1x8", call
    )


def test_jobset_ends_at_an_error_and_starts_again_otherwise():
    documents = list(yaml.safe_load_all((SCRIPTS / "jobset.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["ServiceAccount", "Role", "RoleBinding", "JobSet"]
    policy = documents[-1]["spec"]["failurePolicy"]
    job = documents[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    container = job["template"]["spec"]["containers"][0]
    actions = {}
    for index, rule in enumerate(rules):
        assert rule["onExitCodes"]["containerName"] == container["name"]
        # The message that Kubernetes' job controller writes (pkg/controller/job/pod_failure_policy.go).
        (code,) = rule["onExitCodes"]["values"]
        message = f"Container train for pod a/b failed with exit code {code} matching FailJob rule at index {index}"
        actions[code] = next(
            each["action"] for each in policy["rules"] if re.search(each["onJobFailureMessagePatterns"][0], message)
        )
    assert actions == {2: "FailJobSet", 75: "RestartJobSetAndIgnoreMaxRestarts"}
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # what rules by exit code need
    assert job["template"]["spec"]["serviceAccountName"] == documents[0]["metadata"]["name"]
    assert container["command"] == ["python", "-m", "jaxpipe.train"]
