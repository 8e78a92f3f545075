"""The code of docs/own_reward.md computes the rewards that one computes by hand."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from mcore_mas.api.rewards import allocator_of
from mcore_mas.cli.main import app
from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.credit.assign import add_advantages, mean_advantages
from mcore_mas.credit.samples import to_samples
from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.records.files import write_trajectories
from tests.support.hub import FakeHub, running
from tests.support.played import failed, group, rewards, trajectory, turn

PAGE = Path(__file__).parents[3] / "docs" / "own_reward.md"
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
---
"""


def gsm8k(first: int, rows: int) -> bytes:
    """Return a parquet file in the format of GSM8K: solutions with sums, and answers after ####."""
    bears = range(first, first + rows)
    questions = [f"{number} bears eat 2 pies each. How many pies?" for number in bears]
    solution = "They eat {0}*2=<<{0}*2={1}>>{1} pies.\n#### {1:,}"
    answers = [solution.format(number, 2 * number) for number in bears]
    stream = pa.BufferOutputStream()
    pq.write_table(pa.table({"question": questions, "answer": answers}), stream)
    return bytes(stream.getvalue())


@pytest.fixture(scope="module", autouse=True)
def _downloads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the quickstart's model, and download the data set from a fake hub by the page's command.

    The tests then run without a hub.
    """
    folder = tmp_path_factory.mktemp("work")
    make_tiny_model(folder / "models" / "tiny")
    files = {
        "main/train-0.parquet": gsm8k(500, 70),
        "main/test-0.parquet": gsm8k(900, 9),
        "README.md": CARD.encode(),
    }
    (arguments,) = re.findall(r"```sh\nhf (.*)\n```", PAGE.read_text())
    with running(FakeHub(repositories={"datasets/openai/gsm8k": files})) as hub, chdir(folder):
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "NO_PROXY": "*"}
        command = [sys.executable, "-m", "huggingface_hub.cli.hf", *shlex.split(arguments)]
        subprocess.run(command, env={**os.environ, **settings}, check=True, capture_output=True)
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hf" / "hub"))
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the page's code; return its global variables."""
    script = tmp_path_factory.mktemp("page") / "own_reward.py"
    script.write_text(CODE)
    return runpy.run_path(str(script))


def test_long_replies_cost(page: dict[str, Any]) -> None:
    long = turn(1, completion_ids=(1,) * 99, logprobs=(0.0,) * 99)
    allocate = allocator_of(page["priced"])
    allocated = allocate(group(trajectory(turn(0), long), failed(turn(0))))
    assert rewards(allocated) == [[pytest.approx(0.9)] * 2, [None]]


def test_a_reviewer_is_paid_for_being_right(page: dict[str, Any]) -> None:
    verdicts = [("APPROVE", 1.0), ("REJECT", 1.0), ("REJECT", 0.0)]
    trajectories = [
        trajectory(turn(0, "writer"), turn(1, "reviewer", text=verdict), outcome=outcome)
        for verdict, outcome in verdicts
    ]
    allocated = allocator_of(page["roles"])(group(*trajectories))
    assert rewards(allocated) == [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]


def test_rare_successes_are_worth_more(page: dict[str, Any]) -> None:
    trajectories = [trajectory(turn(0), outcome=outcome) for outcome in (1.0, 0.0, 0.0, 0.0)]
    allocated = allocator_of(page["rare"])(group(*trajectories, failed(turn(0))))
    assert rewards(allocated) == [[1.8], [0.0], [0.0], [0.0], [None]]


def test_the_run_has_the_reward(page: dict[str, Any]) -> None:
    assert page["run"].config.reward.options["reward"].endswith(":roles")


def test_the_tasks_are_those_of_the_data_set(page: dict[str, Any]) -> None:
    tasks = page["graded"]._tasks
    sizes = {split: len(tasks_of_split) for split, tasks_of_split in tasks.items()}
    assert sizes == {"train": 20, "validation": 50, "test": 9}
    assert tasks["train"][0].prompt == "550 bears eat 2 pies each. How many pies?"
    assert tasks["train"][0].answers == ("1,100",)
    assert tasks["test"][8].answers == ("1,816",)


def test_a_turn_is_compared_with_the_median_of_its_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advantage is twice the difference.

    Agent a has rewards 0, 0 and 1, with median 0; agent b has 10, 20 and 60, with median 20.
    """
    (tmp_path / "own_credit.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    trajectories = [
        trajectory(turn(0, "a", reward=reward_a), turn(1, "b", reward=reward_b), sample=sample)
        for sample, (reward_a, reward_b) in enumerate([(0.0, 10.0), (0.0, 20.0), (1.0, 60.0)])
    ]
    rule = AdvantageConfig(name="own_credit:median", options={"scale": 2.0})
    samples = add_advantages(to_samples([group(*trajectories)]), {"a": rule, "b": rule})
    advantages = mean_advantages(samples)
    assert [advantages[(trajectory.id, "", 0)] for trajectory in trajectories] == [0.0, 0.0, 2.0]
    assert [advantages[(trajectory.id, "", 1)] for trajectory in trajectories] == [-20.0, 0.0, 80.0]

    with pytest.raises(ValidationError, match="scal"):
        AdvantageConfig(name="own_credit:median", options={"scal": 2.0})
    file = tmp_path / "step_000000.parquet"
    write_trajectories(file, trajectories)
    command = ["explain", str(file), "--advantage", "own_credit:median", "--option", "scale=2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "+80.0000" in result.stdout
