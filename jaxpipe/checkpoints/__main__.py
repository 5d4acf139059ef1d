"""Looks at the checkpoints of a run.

    python -m jaxpipe.checkpoints list DIR
    python -m jaxpipe.checkpoints verify DIR

DIR is the --workdir of a run. `verify` reads every file; it exits with 2 where one is damaged.
"""

import sys

from jaxpipe.checkpoints.command import main

if __name__ == "__main__":
    sys.exit(main())
