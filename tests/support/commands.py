"""Commands of the command line, called one after another in one process to save imports."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SEPARATOR = "\N{SYMBOL FOR START OF TEXT}"  # printed before the output of each command


def called(
    lines: Sequence[str], folder: Path, env: Mapping[str, str], typed: str = ""
) -> list[str]:
    """Call the command lines in `folder`; return what each prints.

    Args:
        typed: standard input of the process.

    Raises:
        AssertionError: a command failed; later ones were not called.
    """
    command = [sys.executable, "-P", "-m", __name__, *lines]
    result = subprocess.run(
        command,
        cwd=folder,
        env=env,
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    outputs = result.stdout.split(_SEPARATOR)[1:]
    assert result.returncode == 0, f"{lines[len(outputs) - 1]}\n{outputs[-1:] or result.stdout}"
    return outputs


def main() -> None:
    """Call the command lines that are this process's arguments."""
    from mcore_mas.cli.main import main as call

    for line in sys.argv[1:]:
        sys.argv = shlex.split(line)
        print(end=_SEPARATOR, flush=True)
        try:
            call()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main()
