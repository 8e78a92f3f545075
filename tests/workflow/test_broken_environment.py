"""An environment of the user that raises ends a run with one line: the call, the file, and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.records.files import read_trajectories

PRICES = """
def look_up(name):
    return {"apple": 3}[name]
"""

TEAM = """
import mcore_mas as mm
from prices import look_up


class Shop:
    def __init__(self, task):
        self.task = task

    def reset(self, task):
        return task.prompt

    async def step(self, action):
        return mm.Step(reward=look_up("pear"), done=True)


async def ask(task, team, env):
    reply = await team.act("buyer", problem=env.reset(task))
    await env.step(reply.text)


if __name__ == "__main__":
    mm.make_tiny_model("tiny")
    run = mm.Run(
        [mm.AgentSpec("buyer", "{problem}", settings={"max_tokens": 4})],
        ask,
        tasks=[(f"Buy {n}.", str(n)) for n in range(10)],
        env=Shop,
        policies="tiny",
        folder="results/shop",
        steps=1,
        group_size=2,
        tasks_per_step=2,
        engine={"max_length": 128},
    )
    for call in (run.train, lambda: run.evaluate(k=1, state="base")):
        try:
            call()
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.usefixtures("forked_programs")
def test_a_call_that_raises_is_named_with_its_line_and_the_file_of_a_trajectory(
    tmp_path: Path,
) -> None:
    (tmp_path / "prices.py").write_text(PRICES)
    (tmp_path / "team.py").write_text(TEAM)
    completed = subprocess.run(
        [sys.executable, "team.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    training, evaluation = completed.stdout.splitlines()[-2:]

    steps = tmp_path / "results/shop/train/trajectories/step_000000.parquet"
    first = read_trajectories(steps)[0]
    _, task, sample = first.id.split("/")
    assert first.error == "Defect: team:Shop.step: KeyError: 'pear' (prices.py:3)"
    assert training == (
        "TrainingError: step 1: 4 of 4 trajectories are quarantined, more than "
        "collection.max_quarantined allows, because your code raised an error; "
        f"the first, {first.title}: {first.error}; mend the code; `mcore-mas replay "
        f"results/shop/train/quarantine/0-{task}-{sample}.json` plays this trajectory again"
    )
    assert re.fullmatch(
        r"EvaluationError: 1 of 1 trajectories are lost \(1 quarantined\); the first, sample 0 of task test-0: "
        r"Defect: team:Shop.step: KeyError: 'pear' \(prices.py:3\); evaluation.max_failed is 0.05: "
        r"mend the code; `mcore-mas replay (\S+)` shows the error of sample 0 of task test-0; then "
        r"evaluate again, or raise evaluation\.max_failed",
        evaluation,
    )
    for line in (training, evaluation):
        (file,) = re.findall(r"replay (\S+?)`", line)
        replayed = subprocess.run(
            [sys.executable, "-m", "mcore_mas", "replay", file],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert replayed.returncode == 1, replayed.stderr
        assert "KeyError: 'pear'" in replayed.stdout
