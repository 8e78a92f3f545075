"""Command `chat`: the end of the input ends it; an end of file elsewhere is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation import converse as chats
from rollout.records.trajectory import Trajectory
from tests.support.played import trajectory
from tests.unit.cli.conftest import CallCommand


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the config of a run, and type two lines and Ctrl-D; return the run's folder."""
    typed = iter(["a?", "b?"])

    def type_line(question: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", type_line)
    # The process of the tests keeps its own handler of Ctrl-C.
    monkeypatch.setattr("mcore_mas.cli.runs.end_at_second_interrupt", lambda message: None)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(resolve(["experiment=demo_math"])))
    return str(tmp_path)


def test_the_end_of_the_input_ends_a_chat(
    run: str, call_command: CallCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = []

    def converse(config: RunConfig, state: str, prompts: Iterator[str]) -> Iterator[Trajectory]:
        for prompt in prompts:
            played.append(prompt)
            yield trajectory()

    monkeypatch.setattr(chats, "converse", converse)
    assert call_command("chat", run).status == 0
    assert played == ["a?", "b?"]


def test_an_end_of_file_in_the_team_is_an_error(
    run: str, call_command: CallCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def converse(config: RunConfig, state: str, prompts: Iterator[str]) -> Iterator[Trajectory]:
        yield trajectory()
        raise EOFError(f"the engine's pipe ended before {next(prompts)}")

    monkeypatch.setattr(chats, "converse", converse)
    result = call_command("chat", run)
    assert result.status == 1
    assert "the engine's pipe ended before a?" in result.stderr
