"""The study of estimators: measures of runs, their comparison over seeds, and the teams of its code book."""

import asyncio
import csv
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_mas.config.estimators import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import to_samples
from mcore_mas.pipeline.suite import Suite
from mcore_mas.reports.step_metrics import MetricsError
from mcore_mas.reports.study import (
    norm_measures,
    skill_measures,
    squared_advantages_by_agent,
    study_stability,
    validation_measures,
)
from mcore_mas.training.metrics import credit_metrics
from rollout.config.agents import AgentConfig, build_team
from rollout.engines import EngineClient
from rollout.records.trajectory import Group, Task, Trajectory
from rollout.rewards import ALLOCATORS
from rollout.teams.collect import Collector
from rollout.teams.roles import ROLES
from tests.support.play import Bytes
from tests.support.played import TASK, failed, group, trajectory, turn
from tests.support.scripted_engine import ScriptedEngine
from tests.workflow.test_dag import planned_jobs

STUDIES = Path(__file__).parents[2] / "workflow" / "studies"


def metric_rows(norms: list[float], moments: list[float]) -> list[dict[str, float]]:
    """Return a row of metrics for each gradient norm and second moment of agent `a`."""
    return [
        {"step": step, "agent/a/grad_norm": norm, "agent/a/advantage_second_moment": moment}
        for step, (norm, moment) in enumerate(zip(norms, moments, strict=True))
    ]


def test_norms_are_absolute_and_by_agent() -> None:
    rows = metric_rows([1.0, 3.0, 2.0, math.nan, 0.0], [1.0, 1.0, 3.0, 3.0, 2.0])
    del rows[4]["agent/a/grad_norm"]  # a step without a gradient has only a moment
    assert norm_measures(rows) == {
        "norm a": 2.0,
        "largest norm a": 3.0,
        "norms not finite a": 1.0,
        "A² a": 2.0,
    }


def test_shares_of_the_gradient_are_means_over_steps() -> None:
    rows = [{"step": 0, "agent/a/gradient_share": 0.5}, {"step": 1, "agent/a/gradient_share": 1.0}]
    assert norm_measures(rows) == {"share of the gradient a": 0.75}


def test_the_fall_of_the_validation_accuracy_is_from_its_highest_to_its_last_value() -> None:
    rows = [
        {"step": step, "validation/accuracy": accuracy}
        for step, accuracy in ((9, 0.25), (19, 0.75), (29, 0.5))
    ]
    assert validation_measures(rows) == {
        "highest validation accuracy": 0.75,
        "fall of the validation accuracy": 0.25,
    }
    assert validation_measures(rows[:1]) == {}


def group_with_rescuer() -> Group:
    """Return three solved trajectories, one in which the rescuer fails twice, and one that failed."""
    solved = [trajectory(turn(0, reward=1.0), sample=sample) for sample in range(3)]
    rescuer_turns = [turn(index, "rescuer", reward=0.0) for index in (1, 2)]
    return group(
        *solved,
        trajectory(turn(0, reward=0.0), *rescuer_turns, sample=3, outcome=0.0),
        failed(turn(0), sample=4),
    )


def test_lemma_factors_by_hand_are_the_second_moments_of_grpo() -> None:
    # The trajectories have the rewards 1, 1, 1, 0: μ = 3/4 and σ² = (3 · 1/16 + 9/16) / 3 = 1/4.
    # The squared advantage is (1/4)² / (1/4) = 1/4 for reward 1, and (3/4)² / (1/4) = 9/4 for reward 0.
    example = group_with_rescuer()
    factors = squared_advantages_by_agent([example.trajectories])
    assert factors == pytest.approx({"solver": (3 * 0.25 + 2.25) / 4, "rescuer": 2.25})

    # Two turns of a group with equal rewards count as 0.
    equal_rewards = group(*(trajectory(turn(0, reward=1.0), sample=i) for i in range(2)))
    both = squared_advantages_by_agent([example.trajectories, equal_rewards.trajectories])
    assert both["solver"] == pytest.approx(3.0 / 6)

    grpo = AdvantageConfig(name="grpo")
    samples = add_advantages(to_samples([example]), {"solver": grpo, "rescuer": grpo})
    metrics = credit_metrics(samples)
    moments = {agent: metrics[f"agent/{agent}/advantage_second_moment"] for agent in factors}
    assert moments == pytest.approx(factors, rel=1e-5)  # GRPO adds ε to σ


def test_skill_and_entropy_are_of_completed_turns() -> None:
    trajectories = [
        trajectory(
            turn(0, scores={"right": 1.0}, logprobs=(-0.5, -1.5)),
            turn(1, "rescuer", logprobs=(-3.0,)),
        ),
        trajectory(turn(0, scores={"right": 0.0}, logprobs=(-1.0,))),
        failed(turn(0, scores={"right": 1.0}, logprobs=(-9.0,))),
    ]
    assert skill_measures(trajectories) == {
        "skill solver": 0.5,
        "entropy solver": 1.0,
        "entropy rescuer": 3.0,
    }


def make_run(
    results: Path, advantage: str, seed: int, accuracy: float
) -> tuple[str, dict[str, Any]]:
    """Write the metrics and evaluations of a run; return its name and its config."""
    name = f"{advantage}_{seed}"
    folder = results / name
    (folder / "train").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    last_norm = 9.0 if advantage == "grpo" else 1.0
    rows = [{"step": -1}, *metric_rows([1.0] * 6 + [last_norm], [2.0] * 7)]
    metrics_file = folder / "train" / "metrics.jsonl"
    metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for state, value in (("base", 0.25), ("trained", accuracy)):
        tasks = [
            {"task_id": "a", "metrics": {"avg@2": value, "pass@2": 1.0}},
            {"task_id": "b", "metrics": {"avg@2": value}},
        ]
        (folder / "evaluation" / f"{state}.json").write_text(json.dumps({"tasks": tasks}))
    config = {
        "run": name,
        "results": str(results),
        "seed": seed,
        "trainer": {"branching": None, "replays": None},
        "advantage": {"name": advantage},
        "orchestra": {"name": "duo"},
    }
    return name, config


def test_estimators_are_compared_by_seed(tmp_path: Path) -> None:
    accuracies = {("grpo", 1): 0.5, ("grpo", 2): 0.7, ("drmas", 2): 0.8, ("drmas", 1): 0.7}
    runs = dict(
        make_run(tmp_path, advantage, seed, accuracy)
        for (advantage, seed), accuracy in accuracies.items()
    )
    table, text = run_study(tmp_path, runs)
    assert float(table["accuracy", "grpo"]["value"]) == pytest.approx(0.6)
    gain = table["accuracy", "drmas - grpo"]
    # The seeds gain 0.2 and 0.1, with a standard error of 0.05. Student's t of two seeds is 12.7062.
    half_width = 12.7062 * 0.05
    assert float(gain["value"]) == pytest.approx(0.15)
    assert float(gain["ci_low"]) == pytest.approx(0.15 - half_width)
    assert float(gain["ci_high"]) == pytest.approx(0.15 + half_width)
    # In both seeds the largest norm is 9 with GRPO and 1 with Dr. MAS.
    assert float(table["largest norm a", "drmas - grpo"]["value"]) == -8.0
    assert float(table["norm a", "grpo"]["value"]) == pytest.approx((6 * 1 + 9) / 7)
    assert float(table["accuracy before", "grpo"]["value"]) == 0.25
    assert "**duo**, 2 seeds" in text
    assert "| largest norm a | 9 [9, 9] | 1 [1, 1] | -8 [-8, -8] |" in text


def run_study(
    folder: Path, runs: dict[str, dict[str, Any]]
) -> tuple[dict[tuple[str, str], dict[str, str]], str]:
    """Compare runs; return the CSV table by measure and setting, and the page without extra blanks."""
    csv_file = folder / "study.csv"
    page = folder / "study.md"
    study_stability(runs, {run: run for run in runs}, [csv_file, page])
    with csv_file.open() as file:
        table = {(row["measure"], row["setting"]): row for row in csv.DictReader(file)}
    return table, "\n".join(" ".join(line.split()) for line in page.read_text().splitlines())


def test_runs_with_one_estimator_are_compared_by_their_names_without_the_seed(
    tmp_path: Path,
) -> None:
    runs = {}
    for name, accuracy in (("shared", 0.5), ("balanced", 0.75)):
        for seed in (1, 2):
            run, config = make_run(tmp_path, name, seed, accuracy)
            runs[run] = config | {"advantage": {"name": "drmas"}}
    table, _ = run_study(tmp_path, runs)
    assert float(table["accuracy", "shared"]["value"]) == 0.5
    assert float(table["accuracy", "balanced - shared"]["value"]) == 0.25


def test_two_experiments_of_a_team_with_the_same_estimators_are_not_pooled(tmp_path: Path) -> None:
    accuracies = {"math_grpo": 0.5, "math_drmas": 0.75, "code_grpo": 0.25, "code_drmas": 0.125}
    runs = {}
    for name, accuracy in accuracies.items():
        for seed in (1, 2):
            run, config = make_run(tmp_path, name, seed, accuracy)
            runs[run] = config | {"advantage": {"name": name.partition("_")[2]}}
    table, text = run_study(tmp_path, runs)
    settings = {
        setting: float(row["value"])
        for (measure, setting), row in table.items()
        if measure == "accuracy"
    }
    assert settings == {
        **accuracies,
        "math_drmas - math_grpo": 0.25,
        "code_grpo - math_grpo": -0.25,
        "code_drmas - math_grpo": -0.375,
    }
    assert "**duo**, 2 seeds" in text


def test_a_measure_that_a_run_does_not_have_is_unknown_and_not_0(tmp_path: Path) -> None:
    """Agent `b` speaks in one run only: its norm is that run's, and there is no difference of estimators."""
    runs = dict(
        [
            make_run(tmp_path, "grpo", 1, 0.5),
            make_run(tmp_path, "grpo", 2, 0.5),
            make_run(tmp_path, "drmas", 1, 0.5),
            make_run(tmp_path, "drmas", 2, 0.5),
        ]
    )
    with (tmp_path / "grpo_1" / "train" / "metrics.jsonl").open("a") as metrics_file:
        for step, norm in ((7, 4.0), (8, 8.0)):
            metrics_file.write(f"{json.dumps({'step': step, 'agent/b/grad_norm': norm})}\n")
    table, text = run_study(tmp_path, runs)
    assert float(table["norm b", "grpo"]["value"]) == 6.0
    assert table["norm b", "grpo"]["seeds"] == "1"
    assert ("norm b", "drmas") not in table
    assert ("norm b", "drmas - grpo") not in table
    assert "**duo**, 2 seeds" in text
    assert "| norm b | 6 [6, 6] of 1 seeds | | |" in text


def test_runs_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    runs = dict(make_run(tmp_path, "grpo", seed, 0.5) for seed in (1, 2))
    with pytest.raises(MetricsError, match="orchestra 'duo' has only the setting 'grpo'"):
        study_stability(runs, {run: run for run in runs}, [])
    runs |= dict([make_run(tmp_path, "drmas", 1, 0.5)])
    message = r"'grpo' has seeds \[1, 2\], 'drmas' \[1\]; expected the same"
    with pytest.raises(MetricsError, match=message):
        study_stability(runs, {run: run for run in runs}, [])
    evaluation = tmp_path / "drmas_1" / "evaluation" / "base.json"
    evaluation.write_text(json.dumps({"tasks": [{"task_id": "a", "metrics": {}}]}))
    with pytest.raises(MetricsError, match=r"base.json: no task has a score; see why"):
        study_stability(runs, {run: run for run in runs}, [])
    evaluation.unlink()
    with pytest.raises(MetricsError, match=r"base.json: no such file; evaluate the run first"):
        study_stability(runs, {run: run for run in runs}, [])


@pytest.mark.slow
def test_the_study_is_a_target_and_shares_cold_starts(tmp_path: Path) -> None:
    axes = {"experiment": ["demo_math"], "advantage": ["grpo", "drmas"], "seed": [1, 2]}
    suite = {"suite": "small", "share_cold_starts": True, "grid": {"axes": axes}}
    jobs = planned_jobs(tmp_path, suite, target="study_stability")
    assert jobs["study_stability"] == 1
    assert jobs["train"] == 4
    assert jobs["bootstrap"] == 2
    assert jobs["make_base_model"] == 2
    assert jobs["evaluate"] == 4 + 2  # each trained team, and the untrained team of each seed
    assert "report" not in jobs


@pytest.fixture
def codebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the module of the study's teams; remove it and its roles after the test."""
    monkeypatch.syspath_prepend(str(STUDIES))
    monkeypatch.setenv("PYTHONPATH", "")
    earlier_roles = dict(ROLES)
    yield __import__("codebook")
    ROLES.clear()
    ROLES.update(earlier_roles)
    del sys.modules["codebook"]


PROBLEM = "12 30 5"


def play(codebook: Any, orchestra: Any, agents: tuple[str, ...], letters: list[str]) -> Trajectory:
    """Play the problem with these letters as the replies, in the order of the calls."""
    engine = ScriptedEngine(lambda _, call: (*letters[call].encode(), 0))
    team = build_team(
        {name: AgentConfig(role=f"code_{name}", policy="p", max_tokens=4) for name in agents},
        {"p": EngineClient(engine=engine, renderer=Bytes())},  # type: ignore[arg-type]
    )
    task = Task(id="t", prompt=PROBLEM, answers=("",), env="codes", source="codes", split="train")
    collector = Collector(team=team, make_env=codebook.guess, orchestra=orchestra, seed=1, step=0)
    (played_group,) = asyncio.run(collector.collect([task], 1))
    return played_group.trajectories[0]


def letters_of(codebook: Any, agents: tuple[str, str]) -> tuple[str, str, str]:
    """Return the right letter of each agent for the problem, and a letter that is wrong for both."""
    first, second = (codebook.letter(PROBLEM, agent) for agent in agents)
    wrong = next(letter for letter in codebook.LETTERS if letter not in (first, second))
    return first, second, wrong


def test_the_rescuer_is_called_only_if_the_solver_fails(codebook: Any) -> None:
    agents = ("solver", "rescuer")
    solver_letter, rescuer_letter, wrong = letters_of(codebook, agents)
    solved = play(codebook, codebook.rescue, agents, [solver_letter])
    assert [turn.agent for turn in solved.turns] == ["solver"]
    assert solved.outcome == 1.0
    rescued = play(codebook, codebook.rescue, agents, [wrong, wrong, rescuer_letter])
    assert [turn.scores["right"] for turn in rescued.turns] == [0.0, 0.0, 1.0]
    assert rescued.outcome == 1.0
    lost = play(codebook, codebook.rescue, agents, [wrong] * 5)
    assert [turn.agent for turn in lost.turns] == ["solver", *["rescuer"] * 4]
    assert lost.outcome == 0.0


def test_agents_are_rewarded_on_scales_of_different_size(codebook: Any) -> None:
    agents = ("solver", "spender")
    solver_letter, spender_letter, wrong = letters_of(codebook, agents)
    right = play(codebook, codebook.scale, agents, [solver_letter, spender_letter])
    assert [turn.scores["local"] for turn in right.turns] == [1.0, 0.0]
    costly = play(codebook, codebook.scale, agents, [solver_letter, wrong])
    scores = [turn.scores["local"] for turn in costly.turns]
    assert scores[0] == 1.0
    assert -50.0 < scores[1] < 0.0

    assert costly.task_id == TASK.id
    rewarded = ALLOCATORS["local_team"](group(costly), alpha=0.0)
    assert [turn.reward for turn in rewarded.trajectories[0].turns] == scores


def test_the_suite_of_the_claim_composes_and_its_demonstrations_have_the_requested_slips(
    codebook: Any,
) -> None:
    suite = Suite.load(yaml.safe_load((STUDIES / "claim.yaml").read_text()), STUDIES)
    assert len(suite.runs) == 32
    assert len(set(suite.cold_start_owner.values())) == 16  # one for each team and seed

    roles = {agent: ROLES[f"code_{agent}"] for agent in ("solver", "rescuer")}
    slips = {"solver": 0.0, "rescuer": 1.0}
    is_right: dict[str, list[bool]] = {agent: [] for agent in roles}
    for demonstration in codebook.demonstrations(1, 4000, roles=roles, slips=slips):
        problem = demonstration.messages[0].content.partition(" ")[2]
        reply = demonstration.messages[-1].content
        right_letter = codebook.letter(problem, demonstration.agent)
        is_right[demonstration.agent].append(reply == right_letter)
    assert all(is_right["solver"])
    # Slips are random letters of eight. The bound is 5 standard errors of 2000 guesses.
    share = sum(is_right["rescuer"]) / len(is_right["rescuer"])
    assert abs(share - 1 / 8) < 0.03

    tasks = codebook.tasks(1, {"train": 100, "test": 50})
    assert len({task.prompt for task in tasks}) == 150


def test_the_suite_of_the_balance_composes(
    codebook: Any,
) -> None:
    suite = Suite.load(yaml.safe_load((STUDIES / "balance.yaml").read_text()), STUDIES)
    assert len(suite.runs) == 24
    assert suite.cold_start_owner["balance_balanced_1"] == "balance_shared_1"
    assert suite.base_evaluation_owner["balance_balanced_1"] == "balance_shared_1"
    assert suite.base_evaluation_owner["balance_separate_1"] == "balance_separate_1"
    settings = {
        run: (len(suite.runs[run]["policies"]), suite.runs[run]["loss"]["balance"])
        for run in ("balance_shared_1", "balance_balanced_1", "balance_separate_1")
    }
    assert settings == {
        "balance_shared_1": (1, "none"),
        "balance_balanced_1": (1, "agents"),
        "balance_separate_1": (2, "none"),
    }


@pytest.mark.slow
def test_the_suite_of_the_replays_on_sums_takes_more_steps_of_fewer_tokens() -> None:
    """A step of GRPO sampled 1 / 0.63 times the tokens of one of C3, and 1 / 0.87 times those of AT-GRPO."""
    suite = load_replays("replays_math")
    steps = {
        config["advantage"]["name"]: config["trainer"]["steps"] for config in suite.runs.values()
    }
    assert steps == {"c3": 95, "grpo": 60, "drmas": 60, "at_grpo": 69}


@pytest.mark.slow
def test_the_suite_of_the_replays_on_grids_takes_more_steps_of_fewer_tokens() -> None:
    suite = load_replays("replays_path")
    steps = {
        config["advantage"]["name"]: config["trainer"]["steps"] for config in suite.runs.values()
    }
    # Of the tokens of GRPO, a step of C3 samples 0.73 to 0.75, and one of AT-GRPO 0.78.
    assert steps == {"grpo": 36, "drmas": 36, "c3": 48, "at_grpo": 45}


def load_replays(study: str) -> Suite:
    """Load a suite of replays after checking its runs, and that those of a seed start as one model."""
    suite = Suite.load(yaml.safe_load((STUDIES / f"{study}.yaml").read_text()), STUDIES)
    assert len(suite.runs) == 4 * 8
    assert len(set(suite.cold_start_owner.values())) == 8
    assert len(set(suite.base_evaluation_owner.values())) == 8
    return suite
