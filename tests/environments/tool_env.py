"""Environment with a tool, as the package `verifiers` 0.1 makes it: sums with the tool `add`."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def is_right(completion: list[dict[str, str]], answer: str, **_: object) -> float:
    """Return 1 if the last message has the answer."""
    return float(answer in str(completion[-1]["content"]))


def load_environment() -> vf.Environment:
    """Return the environment."""
    rows = [{"question": f"What is {n} + 4?", "answer": str(n + 4)} for n in range(20)]
    rubric = vf.Rubric(funcs=[is_right])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), rubric=rubric, tools=[add], max_turns=3)
