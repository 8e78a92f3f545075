"""The call of docs/gateway.md to the demo's team asks what the team has learned."""

import re
from pathlib import Path

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from rollout.config.tasks import make_tasks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway.md"


def form(prompt: str) -> str:
    """Return a prompt with 0 in place of every digit."""
    return re.sub(r"\d", "0", prompt)


def test_the_served_demo_is_asked_one_of_its_tasks() -> None:
    values = resolve(["experiment=demo_math", "run=demo_math"])
    config = RunConfig.from_values(values, "demo_math")
    tasks = make_tasks(config.data.model_copy(update={"train": 60}), config.seed)["train"]
    forms = {form(task.prompt) for task in tasks}
    assert "What is 00+00?" in forms
    questions = re.findall(r'"model": "demo_math".*"content": "(.*?)"', PAGE.read_text())
    assert questions
    assert {form(question) for question in questions} <= forms
