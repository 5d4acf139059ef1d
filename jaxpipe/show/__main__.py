"""Runs `python -m jaxpipe.show`."""

import sys

from jaxpipe.show.command import main

if __name__ == "__main__":
    sys.exit(main())
