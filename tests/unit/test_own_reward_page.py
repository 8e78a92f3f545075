"""The rewards of docs/own_reward.md, run as they stand there, give what one can work out by hand."""

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
from mcore_mas.config.credit import AdvantageConfig
from mcore_mas.credit.assign import add_advantages, mean_advantages
from mcore_mas.credit.samples import to_samples
from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.records.files import write_trajectories
from tests.support.hub import FakeHub, running
from tests.support.played import failed, group, rewards, trajectory, turn

PAGE = Path(__file__).parents[2] / "docs" / "own_reward.md"
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
    """A file of GSM8K as it is published: a solution with its sums, and the number behind ####."""
    solution = "They eat {0}*2=<<{0}*2={1}>>{1} pies.\n#### {1:,}"
    questions = [f"{n} bears eat 2 pies each. How many pies?" for n in range(first, first + rows)]
    answers = [solution.format(n, 2 * n) for n in range(first, first + rows)]
    pq.write_table(
        pa.table({"question": questions, "answer": answers}), sink := pa.BufferOutputStream()
    )
    return bytes(sink.getvalue())


@pytest.fixture(scope="module", autouse=True)
def _given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The page's model is that of the quickstart, and its data set one that its own command downloads; then no hub."""
    folder = tmp_path_factory.mktemp("work")
    make_tiny_model(folder / "models" / "tiny")
    files = {
        "main/train-0.parquet": gsm8k(500, 70),
        "main/test-0.parquet": gsm8k(900, 9),
        "README.md": CARD.encode(),
    }
    (line,) = re.findall(r"```sh\nhf (.*)\n```", PAGE.read_text())
    with running(FakeHub(repositories={"datasets/openai/gsm8k": files})) as hub, chdir(folder):
        asked = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "NO_PROXY": "*"}
        command = [sys.executable, "-m", "huggingface_hub.cli.hf", *shlex.split(line)]
        subprocess.run(command, env={**os.environ, **asked}, check=True, capture_output=True)
    with chdir(folder), pytest.MonkeyPatch.context() as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hf" / "hub"))
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = tmp_path_factory.mktemp("page") / "own_reward.py"
    script.write_text(CODE)
    return runpy.run_path(str(script))


def test_long_replies_cost(page: dict[str, Any]) -> None:
    long = turn(1, completion_ids=(1,) * 99, logprobs=(0.0,) * 99)
    paid = rewards(allocator_of(page["priced"])(group(trajectory(turn(0), long), failed(turn(0)))))
    assert paid == [[pytest.approx(0.9)] * 2, [None]]


def test_a_reviewer_is_paid_for_being_right(page: dict[str, Any]) -> None:
    said = [("APPROVE", 1.0), ("REJECT", 1.0), ("REJECT", 0.0)]
    played = [
        trajectory(turn(0, "writer"), turn(1, "reviewer", text=t), outcome=o) for t, o in said
    ]
    assert rewards(allocator_of(page["roles"])(group(*played))) == [
        [1.0, 1.0],
        [1.0, 0.0],
        [0.0, 1.0],
    ]


def test_what_few_siblings_found_is_worth_more(page: dict[str, Any]) -> None:
    played = group(
        *(trajectory(turn(0), outcome=outcome) for outcome in (1.0, 0.0, 0.0, 0.0)), failed(turn(0))
    )
    assert rewards(allocator_of(page["rare"])(played)) == [[1.8], [0.0], [0.0], [0.0], [None]]


def test_the_run_has_the_reward(page: dict[str, Any]) -> None:
    assert page["run"].config.reward.options["reward"].endswith(":roles")


def test_the_tasks_are_those_of_the_data_set(page: dict[str, Any]) -> None:
    tasks = page["graded"]._tasks
    assert {split: len(own) for split, own in tasks.items()} == {
        "train": 20,
        "validation": 50,
        "test": 9,
    }
    assert (tasks["train"][0].prompt, tasks["train"][0].answers) == (
        "550 bears eat 2 pies each. How many pies?",
        ("1,100",),
    )
    assert tasks["test"][8].answers == ("1,816",)


def test_a_turn_is_compared_with_the_median_of_its_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one agent 0, 0 and 1, median 0; of the other 10, 20 and 60, median 20; twice the difference."""
    (tmp_path / "own_credit.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    paid = [(0.0, 10.0), (0.0, 20.0), (1.0, 60.0)]
    played = [
        trajectory(turn(0, "a", reward=one), turn(1, "b", reward=other), sample=n)
        for n, (one, other) in enumerate(paid)
    ]
    rule = AdvantageConfig(name="own_credit:median", options={"scale": 2.0})
    found = mean_advantages(add_advantages(to_samples([group(*played)]), {"a": rule, "b": rule}))
    assert [found[(t.id, "", n)] for n in (0, 1) for t in played] == [
        0.0,
        0.0,
        2.0,
        -20.0,
        0.0,
        80.0,
    ]
    with pytest.raises(ValidationError, match="scal"):
        AdvantageConfig(name="own_credit:median", options={"scal": 2.0})
    file = tmp_path / "step_000000.parquet"
    write_trajectories(file, played)
    said = CliRunner().invoke(
        app, ["explain", str(file), "--advantage", "own_credit:median", "--option", "scale=2"]
    )
    assert said.exit_code == 0 and "+80.0000" in said.stdout, said.output
