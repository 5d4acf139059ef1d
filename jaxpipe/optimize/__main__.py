"""Runs `python -m jaxpipe.optimize`."""

import sys

from jaxpipe.optimize.command import main

if __name__ == "__main__":
    sys.exit(main())
