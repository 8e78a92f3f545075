"""Training of a program whose calls require JSON, with the grammar of the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_mas.training.train import train
from rollout.records.files import read_trajectories
from tests.support.run_folder import make_run, metrics_of


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ray_workers")
def test_a_training_under_a_grammar_agrees_with_its_engine(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        "team=program",
        "orchestra.options.call=tests.support.agent_programs:in_json",
        "reward.name=tests.support.rewards:by_number",
        "agents.solver.max_tokens=48",
        "engine.max_length=512",
        "engine.grammar=true",
        "trainer.steps=2",
    )
    train(run / "config.yaml")
    rows = [row for row in metrics_of(run) if row["step"] >= 0]
    assert len(rows) == 2
    for row in rows:
        assert row["gateway/off_schema"] == 0
        # the largest difference that a run in float32 allows
        assert row["agent/solver/logprob_gap_max"] < 1e-4
        assert row["agent/solver/logprob_gap_count"] > 0

    files = sorted((run / "train" / "trajectories").glob("*.parquet"))
    turns = [
        turn
        for file in files
        for trajectory in read_trajectories(file)
        for turn in trajectory.turns
    ]
    solver_turns = [turn for turn in turns if turn.agent == "solver"]
    verifier_turns = [turn for turn in turns if turn.agent == "verifier"]
    assert len(solver_turns) == len(verifier_turns) >= 8
    assert all(turn.grammar for turn in solver_turns)
    assert not any(turn.grammar for turn in verifier_turns)
