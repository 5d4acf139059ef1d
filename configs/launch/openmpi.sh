#!/bin/bash
# Trains on several nodes with Open MPI, one process per GPU; from the root of the repository, which all nodes see, on the
# first of them (jax's processes meet on the machine of mpirun, and there must be process 0):
#
#     HOSTS=node1:8,node2:8 configs/launch/openmpi.sh --config=configs/gpt_96.py --workdir=runs/gpt_96 \
#         --config.data.files=indexed:data/all --config.data.tokenizer=data/all.tokenizer.json
#
# jax finds the processes of mpirun 4 and older by itself: by OMPI_MCA_orte_hnp_uri, which mpirun 5 does not set any more
# (jax issue 14576). There the processes get their flags here.

HOSTS="${HOSTS:?give the hosts and their GPUs, as HOSTS=node1:8,node2:8}"
PYTHON="${PYTHON:-.venv/bin/python}"
PORT="${PORT:-55527}" # of mpirun 5 alone
MAX_RESTARTS="${MAX_RESTARTS:-20}"

source configs/launch/nccl.sh

# What mpirun does when the first process has ended with another code than 0, also with 75, the checkpoint saved: waits so
# many seconds, sends SIGTERM to the others, waits again, kills them, and ends only then. By itself it gives them one.
export OMPI_MCA_odls_base_sigkill_timeout=15 PRTE_MCA_odls_base_sigkill_timeout=15 # of mpirun 4, and 5

command=("$PYTHON" -m jaxpipe.train)
version=$(mpirun --version | grep -oE '[0-9]+' | head -n 1)
if ((version >= 5)); then
    export JAXPIPE_ADDRESS="${HOSTS%%[:,]*}:$PORT"
    # shellcheck disable=SC2016  # for each process to expand
    command=(bash -c 'export JAX_LOCAL_DEVICE_IDS="$OMPI_COMM_WORLD_LOCAL_RANK"
        exec "$@" --coordinator_address="$JAXPIPE_ADDRESS" --num_processes="$OMPI_COMM_WORLD_SIZE" \
            --process_id="$OMPI_COMM_WORLD_RANK"' "process" "${command[@]}")
fi
exported=()
for name in $(compgen -e | grep -E '^(NCCL_|JAX_|JAXPIPE_|XLA_)'); do
    exported+=(-x "$name")
done

# One process on each of the slots that HOSTS gives, those of a node in a row.
# SIGTERM and SIGINT reach the processes as SIGUSR1, which mpirun hands on at once; SIGTERM it would keep for the time
# above, and end with 1. In a process group of its own (set -m) mpirun gets no SIGINT from the terminal besides.
set -m
is_stopped=false
for ((restarts = 0; ; restarts++)); do
    mpirun --host "$HOSTS" --map-by slot --bind-to none "${exported[@]}" "${command[@]}" "$@" </dev/null &
    trap 'is_stopped=true; kill -USR1 $!' TERM INT HUP
    while kill -0 $! 2>/dev/null; do wait $!; done # a signal ends the waiting, but not mpirun
    wait $!
    code=$?
    if "$is_stopped" || ((code != 76 && code <= 128 || restarts >= MAX_RESTARTS)); then
        exit "$code"
    fi
    echo "exit code $code: started again, restart $((restarts + 1))" >&2
done
