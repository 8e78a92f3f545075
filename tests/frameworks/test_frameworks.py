"""Unchanged programs of agent frameworks are played through the gateway; how their table is kept."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.frameworks.__main__ import BEGIN, END, PAGE, UNCLEAR, page, row, version_of
from tests.frameworks.training import (
    FRAMEWORKS,
    RIGHT,
    Lesson,
    Teacher,
    right,
    warm,
)

FOUND = {"before": 0.25, "after": 0.75, "low": 0.4, "high": 0.6, "turns": 2.0, "minutes": 3.14}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_program_of_the_framework_is_played_as_it_is(name: str, tmp_path: Path) -> None:
    framework = FRAMEWORKS[name]
    if not framework.python.exists():
        pytest.skip(f"needs {framework.python}; `make test-frameworks` sets it up")
    with warm(framework, tmp_path) as command:
        lesson = Lesson(command, seed=1, framework=framework)
        teachers = {agent: Teacher(reply) for agent, reply in framework.agents.items()}
        groups = asyncio.run(lesson.play(teachers, step=0, group_size=2))
    played = [trajectory for group in groups for trajectory in group.trajectories]
    replies = sum(len(teacher.said) for teacher in teachers.values())
    assert sum(len(trajectory.turns) for trajectory in played) == replies
    assert all(
        any("What is " in message.content for message in t.turns[-1].messages) for t in played
    )
    # The last agent's answer is the program's, and is right if every agent's reply is.
    share = RIGHT ** len(teachers)
    assert abs(sum(right(groups)) / len(groups) - share) < 0.34


def test_the_page_keeps_the_rows_of_frameworks_that_were_not_run() -> None:
    first = page(
        {
            "AG2": row("AG2", "0.1", "a" * 64, FOUND),
            "LangGraph": row("LangGraph", "1.0", "b" * 64, FOUND),
        },
        f"# A page\n\n{BEGIN}{END}\nThe rest.\n",
    )
    assert first.startswith("# A page\n") and first.endswith("\nThe rest.\n")
    again = page({"AG2": row("AG2", "0.2", "c" * 64, FOUND)}, first)
    rows = [line for line in again.splitlines() if " | [" in line]
    assert [line.split(" | ")[1] for line in rows] == [
        "ag2 0.2",
        "langgraph 1.0",
    ]  # in the order of FRAMEWORKS
    assert rows[0].endswith(f"{'c' * 64} | 2.0 | 25.0 | 75.0 | +50.0 | [+40.0, +60.0] | 3.1 |")


def test_the_page_says_which_frameworks_have_learnt_for_sure() -> None:
    clear, _, rest = PAGE.read_text().partition(UNCLEAR)
    for part, learnt in ((clear, True), (rest, False)):
        rows = re.findall(
            r"^\| ([^|]+) \| (\S+) (\S+) \|.*\| \[([+-][\d.]+), .*$", part, re.MULTILINE
        )
        assert rows or not learnt
        for name, package, version, low in rows:
            framework = FRAMEWORKS[name]
            assert (float(low) > 0) == learnt
            assert (package, version) == (framework.package, version_of(framework))
