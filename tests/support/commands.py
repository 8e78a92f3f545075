"""Commands of the command line, called one after the other by one process: what they import is imported once."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_BEGINS = "\N{SYMBOL FOR START OF TEXT}"


def called(
    lines: Sequence[str], folder: Path, env: Mapping[str, str], typed: str = ""
) -> list[str]:
    """What each line prints, called in `folder`; `typed` is what the first who reads reads.

    Raises:
        AssertionError: one of them ended with an error; those behind it were not called.
    """
    command = [sys.executable, "-P", "-m", __name__, *lines]
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = done.stdout.split(_BEGINS)[1:]
    assert done.returncode == 0, f"{lines[len(said) - 1]}\n{said[-1:] or done.stdout}"
    return said


def main() -> None:
    """Call what `called` gives."""
    from mcore_mas.cli.main import main as call

    for line in sys.argv[1:]:
        sys.argv = shlex.split(line)
        print(end=_BEGINS, flush=True)
        try:
            call()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main()
