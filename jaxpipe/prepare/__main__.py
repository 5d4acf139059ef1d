"""Runs `python -m jaxpipe.prepare`."""

if __name__ == "__main__":  # worker processes import this file
    from jaxpipe.config.command_line import run
    from jaxpipe.prepare.command import define_flags, main

    run(main, define_flags=define_flags)
