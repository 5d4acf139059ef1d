"""Runs `python -m jaxpipe.prepare`."""

if __name__ == "__main__":  # worker processes import this file
    import sys

    from jaxpipe.prepare.command import main

    sys.exit(main())
