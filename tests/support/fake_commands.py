"""Shell scripts in place of commands."""

from pathlib import Path

import pytest


class FakeCommands:
    """Folder of scripts that the PATH of a test begins with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._folder = folder
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    def add(self, name: str, script: str) -> None:
        """Add a command that runs lines of a shell script."""
        path = self._folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
