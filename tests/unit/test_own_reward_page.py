"""The rewards of docs/own_reward.md, run as they stand there, give what one can work out by hand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from mcore_mas.api.objects import allocator_of
from tests.support.played import failed, group, rewards, trajectory, turn

PAGE = Path(__file__).parents[2] / "docs" / "own_reward.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = tmp_path_factory.mktemp("page") / "own_reward.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)))
    return runpy.run_path(str(script))


def test_long_replies_cost(page: dict[str, Any]) -> None:
    long = turn(1, completion_ids=(1,) * 99, logprobs=(0.0,) * 99)
    paid = rewards(allocator_of(page["priced"])(group(trajectory(turn(0), long), failed(turn(0)))))
    assert paid == [[pytest.approx(0.9)] * 2, [None]]


def test_a_reviewer_is_paid_for_being_right(page: dict[str, Any]) -> None:
    said = [("APPROVE", 1.0), ("REJECT", 1.0), ("REJECT", 0.0)]
    played = [trajectory(turn(0, "writer"), turn(1, "reviewer", text=t), outcome=o) for t, o in said]
    assert rewards(allocator_of(page["roles"])(group(*played))) == [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]


def test_what_few_siblings_found_is_worth_more(page: dict[str, Any]) -> None:
    played = group(*(trajectory(turn(0), outcome=outcome) for outcome in (1.0, 0.0, 0.0, 0.0)), failed(turn(0)))
    assert rewards(allocator_of(page["rare"])(played)) == [[1.8], [0.0], [0.0], [0.0], [None]]


def test_the_run_has_the_reward(page: dict[str, Any]) -> None:
    assert page["run"].config.reward.name.endswith("run.reward")
