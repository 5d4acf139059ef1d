"""Starts several local processes of one program and lives as long as they do.

    python -m jaxpipe.launch --num_processes=P [--module=jaxpipe.train] [--grace_s=10] -- ARGUMENTS OF THE MODULE

Each process is `python -m MODULE ARGUMENTS --coordinator_address=localhost:PORT --num_processes=P --process_id=i`, and
takes the i-th GPU where there are GPUs. What it prints comes out here, every line with its number: `[2] ...`. SIGTERM,
SIGINT and SIGHUP (a terminal that closes; as SIGTERM) are handed on to all, once; SIGINT after that kills. When one
fails, the others get SIGTERM and, --grace_s later, SIGKILL. The exit code is that of the first that failed, 128 + n
where signal n ended it; 75 where all have stopped on request; 0. No process outlives this one.
"""

from __future__ import annotations

from jaxpipe.launch.command import run

if __name__ == "__main__":
    run()
