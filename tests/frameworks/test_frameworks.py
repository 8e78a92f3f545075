"""Unchanged programs of agent frameworks are played through the gateway; their results are kept in a table."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from statistics import fmean

import pytest

from rollout.records.trajectory import Message, Sampling
from tests.frameworks.__main__ import (
    BEGIN,
    END,
    PAGE,
    UNCERTAIN,
    row,
    training_error,
    update_page,
    version_of,
)
from tests.frameworks.training import (
    FRAMEWORKS,
    TEACHER_ACCURACY,
    FrameworkTeam,
    accuracy_by_task,
    framework_teachers,
    program_command,
)

RESULTS = {"before": 0.25, "after": 0.75, "low": 0.4, "high": 0.6, "turns": 2.0, "minutes": 3.14}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_unchanged_program_of_the_framework_is_played(name: str, tmp_path: Path) -> None:
    framework = FRAMEWORKS[name]
    if not framework.installed:
        pytest.skip("`make test-frameworks` installs the framework")
    with program_command(framework, tmp_path) as command:
        team = FrameworkTeam(command, seed=1, framework=framework)
        teachers = framework_teachers(framework)
        groups = asyncio.run(team.play(teachers, step=0, group_size=2))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    replies = sum(len(teacher.demonstrations) for teacher in teachers.values())
    assert sum(len(trajectory.turns) for trajectory in trajectories) == replies
    for trajectory in trajectories:
        prompt = "".join(message.content for message in trajectory.turns[-1].messages)
        assert "What is " in prompt

    # The last agent's answer is the program's answer. It is right if every agent's reply is right.
    expected_accuracy = TEACHER_ACCURACY ** len(teachers)
    assert abs(fmean(accuracy_by_task(groups)) - expected_accuracy) < 0.34


def test_the_teacher_of_a_coding_agent_ends_after_the_result_of_its_call() -> None:
    (teacher,) = framework_teachers(FRAMEWORKS["Claude Code"]).values()
    question = Message(role="user", content="What is 1+1?")
    call = asyncio.run(teacher.say((question,), Sampling())).text
    result = Message(role="tool", content="", answers="1")
    messages = (question, Message(role="assistant", content="", raw=call), result)
    last = asyncio.run(teacher.say(messages, Sampling())).text
    assert re.fullmatch(
        r'```tool\n{"name": "Bash", "arguments": {"command": "echo \'print\(\d\)\' > answer.py"}}\n```',
        call,
    )
    assert last == "Done."


def test_the_page_keeps_the_rows_of_frameworks_that_were_not_run() -> None:
    empty_page = f"# A page\n\n{BEGIN}{END}\nThe rest.\n"
    rows = {
        "LangGraph": row("LangGraph", "1.0", "b" * 64, RESULTS),
        "AG2": row("AG2", "0.1", "a" * 64, RESULTS),
    }
    page = update_page(empty_page, rows)
    assert page.startswith("# A page\n")
    assert page.endswith("\nThe rest.\n")

    page = update_page(page, {"AG2": row("AG2", "0.2", "c" * 64, RESULTS)})
    codex = row("Codex", "0.171.0", "", RESULTS)
    page = update_page(update_page(page, {"Codex": codex}), {"Codex": codex})
    lines = [line for line in page.splitlines() if " | [" in line]
    packages = [line.split(" | ")[1] for line in lines]
    assert packages == [
        "ag2 0.2",
        "langgraph 1.0",
        "@openai/codex 0.171.0",
    ]  # in the order of FRAMEWORKS
    assert lines[0].endswith(f"{'c' * 64} | 2.0 | 25.0 | 75.0 | +50.0 | [+40.0, +60.0] | 3.1 |")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (0, ""),
        (1, "the training failed with exit status 1; its error is above"),
        (-9, "the training was killed by SIGKILL"),
    ],
)
def test_a_training_that_failed_is_not_said_to_have_learned_nothing(
    status: int, error: str
) -> None:
    assert training_error(status) == error


def test_the_page_separates_certain_gains_and_has_the_pinned_versions() -> None:
    certain_part, _, uncertain_part = PAGE.read_text().partition(UNCERTAIN)
    row_pattern = r"^\| ([^|]+) \| (\S+) (\S+) \|.*\| \[([+-][\d.]+), .*$"
    certain = re.findall(row_pattern, certain_part, re.MULTILINE)
    uncertain = re.findall(row_pattern, uncertain_part, re.MULTILINE)
    assert certain
    assert all(float(low) > 0 for *_, low in certain)
    assert all(float(low) <= 0 for *_, low in uncertain)
    for name, package, version, _ in certain + uncertain:
        framework = FRAMEWORKS[name]
        assert package == framework.package
        assert version == version_of(framework)
