"""Costs of a run whose numbers can be added up by hand."""

from __future__ import annotations

import json
from pathlib import Path

from mcore_mas.reports.costs import run_costs, sampled_tokens
from rollout.records.files import write_trajectories
from rollout.records.trajectory import Status, Trajectory, Turn


def turn(agent: str, tokens: int, started: float, took: float) -> Turn:
    return Turn(
        index=0,
        agent=agent,
        policy="p",
        policy_version=0,
        node="",
        state_key="",
        messages=(),
        prompt_ids=(1, 2, 3),
        completion_ids=(7,) * tokens,
        logprobs=(-1.0,) * tokens,
        temperature=1.0,
        text="",
        finish_reason="stop",
        valid=True,
        seed=1,
        started_s=started,
        took_s=took,
    )


def trajectory(number: int, *turns: Turn, status: Status = Status.COMPLETED) -> Trajectory:
    name = f"t{number}"
    return Trajectory(
        id=name, task_id=name, source="s", sample=0, step=-2, turns=turns, status=status
    )


def test_a_training_and_its_answers_by_hand(tmp_path: Path) -> None:
    run = tmp_path / "duo"
    (run / "train").mkdir(parents=True)
    steps = [
        {"step": -1, "validation/accuracy": 0.0},  # before training: takes no step
        {"step": 0, "time/collect_s": 500.0, "time/update_s": 400.0, "rollout/tokens": 1000.0},
        {"step": 1, "time/collect_s": 600.0, "time/update_s": 300.0, "rollout/tokens": 500.0},
    ]
    (run / "train" / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    devices = {"kind": "GPU", "count": 4, "name": "NVIDIA H100"}
    (run / "train" / "done.json").write_text(json.dumps({"devices": devices}))
    solver, verifier = turn("solver", 10, 100.0, 2.0), turn("verifier", 4, 103.0, 1.0)
    write_trajectories(
        run / "evaluation" / "trained" / "part_000000.parquet",
        [
            trajectory(0, solver, verifier),
            trajectory(1, turn("solver", 20, 200.0, 5.0), status=Status.FAILED),
        ],
    )
    write_trajectories(
        run / "evaluation" / "trained" / "part_000001.parquet",
        [
            trajectory(
                2,
                turn("solver", 6, 10.0, 1.0),
                turn("verifier", 2, 11.0, 1.0),
                turn("solver", 8, 12.0, 2.0),
            )
        ],
    )
    assert run_costs(run, "trained") == {
        "experiment": "duo",
        "trained on": "4 x NVIDIA H100",
        "GPU hours": "2",  # 4 x (900 + 900) s
        "tokens sampled in training": "1500",
        "tokens of an answer": "15",  # (14 + 16) / 2: what failed does not count
        "seconds of an answer": "4",  # 100 to 104, and 10 to 14
        "calls, tokens and seconds by agent": "solver 1.5 calls, 12 tokens, 2.5 s; verifier 1 calls, 3 tokens, 1 s",
    }


def test_costs_that_were_not_recorded_are_left_out(tmp_path: Path) -> None:
    assert run_costs(tmp_path / "solo", "base") == {"experiment": "solo"}


def test_the_tokens_of_a_training_include_those_that_follow_an_alternative() -> None:
    steps = [
        {"step": 0, "rollout/tokens": 100.0},
        {"step": 1, "rollout/tokens": 80.0, "rollout/replayed_tokens": 30.0},
    ]
    assert sampled_tokens(steps) == 210.0
