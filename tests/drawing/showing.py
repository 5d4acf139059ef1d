"""The command `show`, run in process: what it prints, and what it says where it refuses."""

from jaxpipe.show import main


def shown(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    for part in ("Error: ", "\n  rule ", "\n  repair: "):
        assert part in output.err
    return output.err
