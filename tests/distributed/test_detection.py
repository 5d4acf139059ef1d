"""jax finds the processes of SLURM, Open MPI and Kubernetes by itself, from what these set in the environment."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jax._src.clusters.k8s_cluster import K8sCluster

from jaxpipe.distributed.ports import free_port

ROOT = Path(__file__).parents[2]
JOINS = """
import time
from jaxpipe.distributed.process_group import ProcessGroup
with ProcessGroup(lost_after_s=60.0) as processes:
    import jax
    from jax._src.xla_bridge import CUDA_VISIBLE_DEVICES
    first = processes.agree("first", f"process {processes.index}")
    begun = time.monotonic()
    time.sleep(2 * processes.index)
    processes.meet("late")
    assert time.monotonic() - begun > processes.count - 1, "process 0 has not waited"
    print(processes.index, processes.count, jax.process_index(), first, CUDA_VISIBLE_DEVICES.value)
"""


def slurm(process):
    """What srun sets for a task."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "localhost,node[2-3]",  # process 0 is on the first
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


def open_mpi(process):
    """What mpirun 4 sets for a process; the address is mpirun's own."""
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1,10.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


def both(process):
    """An mpirun within a job of SLURM, whose own numbers say nothing of the processes."""
    return slurm(0) | open_mpi(process)


@pytest.fixture
def without_cluster():
    """The environment without what a cluster that runs the tests may have set."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "KUBERNETES_"))
    }


@pytest.mark.parametrize("cluster", [*(pytest.param(each, marks=pytest.mark.ci) for each in (slurm, open_mpi)), both])
def test_two_processes_join_without_any_flag(cluster, without_cluster):
    port = {"JAX_COORDINATOR_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOINS], env=without_cluster | port | cluster(process), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for process in range(2)
    ]  # fmt: skip
    for process, child in enumerate(processes):
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        assert out == f"{process} 2 {process} process 0 {process}\n"


@pytest.mark.parametrize(
    "cluster", [{}, pytest.param(slurm(0) | {"SLURM_NTASKS": "1"}, id="one task of SLURM", marks=pytest.mark.ci)]
)
def test_alone_a_process_joins_nothing_and_sees_all_gpus(cluster, without_cluster):
    environment = without_cluster | {"PYTHONPATH": str(ROOT)} | cluster
    result = subprocess.run([sys.executable, "-c", JOINS], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "0 1 0 process 0 all\n", result.stderr


def test_pods_of_our_jobset_find_each_other(monkeypatch):
    documents = yaml.safe_load_all((ROOT / "configs/launch/jobset.yaml").read_text())
    (jobset,) = (document for document in documents if document["kind"] == "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    name, spec = jobset["metadata"]["name"], replicated["template"]["spec"]
    # As the JobSet controller names and labels the job that it makes, and the service of its pods.
    metadata = SimpleNamespace(name=f"{name}-{replicated['name']}-0", labels={"jobset.sigs.k8s.io/jobset-name": name})
    job = SimpleNamespace(metadata=metadata, spec=SimpleNamespace(parallelism=spec["parallelism"]))
    monkeypatch.setattr(K8sCluster, "_controller", lambda: SimpleNamespace(kind="Job"))
    monkeypatch.setattr(K8sCluster, "_job", lambda: job)
    monkeypatch.setattr(K8sCluster, "_pod", lambda: None)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert K8sCluster.get_coordinator_address(None, None) == "jaxpipe-train-0-0.jaxpipe:55527"
    assert K8sCluster.get_process_count() == spec["completions"] == 4
    assert K8sCluster.get_process_id() == 3
    assert spec["completionMode"] == "Indexed"
    # No number within the node: a process takes all GPUs of its pod, so there is one process a pod.
    assert K8sCluster.get_local_process_id() is None
