"""A fixture that calls the command line in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mcore_mas.cli.main import main


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command."""

    status: int
    stdout: str
    stderr: str


CallCommand = Callable[..., CommandResult]


@pytest.fixture
def call_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CallCommand:
    """Call `mcore-mas` with some arguments."""

    def call(*arguments: str) -> CommandResult:
        monkeypatch.setattr("sys.argv", ["mcore-mas", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        output = capsys.readouterr()
        return CommandResult(int(exit_info.value.code or 0), output.out, output.err)

    return call
