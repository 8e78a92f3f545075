"""Studies of estimators: measures of runs, their comparison over seeds, and the code-book teams."""

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

from mcore_mas.config.credit import AdvantageConfig
from mcore_mas.credit.assign import add_advantages
from mcore_mas.credit.samples import to_samples
from mcore_mas.pipeline.suite import Suite
from mcore_mas.reports.step_metrics import MetricsError
from mcore_mas.reports.study import lemma_factors, norm_measures, skills, study_stability
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
from tests.workflow.test_dag import planned

STUDIES = Path(__file__).parents[2] / "workflow" / "studies"


def rows(norms: list[float], moments: list[float]) -> list[dict[str, float]]:
    return [
        {"step": i, "agent/a/grad_norm": norm, "agent/a/advantage_second_moment": moment}
        for i, (norm, moment) in enumerate(zip(norms, moments, strict=True))
    ]


def test_norms_are_absolute_and_by_agent() -> None:
    table = rows([1.0, 3.0, 2.0, math.nan, 0.0], [1.0, 1.0, 3.0, 3.0, 2.0])
    del table[4]["agent/a/grad_norm"]  # a step without a gradient counts its moment only
    assert norm_measures(table) == {
        "norm a": 2.0,
        "largest norm a": 3.0,
        "norms not finite a": 1.0,
        "A² a": 2.0,
    }


def rescued() -> Group:
    """Three tries are right at once; in the fourth a rescuer is called twice, in vain."""
    right = [trajectory(turn(0, reward=1.0), sample=i) for i in range(3)]
    calls = [turn(1 + i, "rescuer", reward=0.0) for i in range(2)]
    return group(
        *right,
        trajectory(turn(0, reward=0.0), *calls, sample=3, outcome=0.0),
        failed(turn(0), sample=4),
    )


def test_lemma_factors_by_hand_are_the_second_moments_of_grpo() -> None:
    # votes 1, 1, 1, 0: μ = 3/4, σ² = (3 · 1/16 + 9/16) / 3 = 1/4; the rescuer's are (0 - 3/4)² / (1/4) = 9/4
    factors = lemma_factors([rescued().trajectories])
    assert factors == pytest.approx({"solver": (3 * 0.25 + 2.25) / 4, "rescuer": 2.25})
    flat = group(*(trajectory(turn(0, reward=1.0), sample=i) for i in range(2)))
    assert lemma_factors([rescued().trajectories, flat.trajectories])["solver"] == pytest.approx(
        3.0 / 6
    )
    credited = add_advantages(
        to_samples([rescued()]), dict.fromkeys(("solver", "rescuer"), AdvantageConfig(name="grpo"))
    )
    measured = credit_metrics(credited)
    assert {
        agent: measured[f"agent/{agent}/advantage_second_moment"] for agent in factors
    } == pytest.approx(
        factors,
        rel=1e-5,  # of ε beside σ
    )


def test_skill_and_entropy_are_of_completed_turns() -> None:
    played = [
        trajectory(
            turn(0, scores={"right": 1.0}, logprobs=(-0.5, -1.5)),
            turn(1, "rescuer", logprobs=(-3.0,)),
        ),
        trajectory(turn(0, scores={"right": 0.0}, logprobs=(-1.0,))),
        failed(turn(0, scores={"right": 1.0}, logprobs=(-9.0,))),
    ]
    assert skills(played) == {"skill solver": 0.5, "entropy solver": 1.0, "entropy rescuer": 3.0}


def make(results: Path, advantage: str, seed: int, accuracy: float) -> tuple[str, dict]:
    name = f"{advantage}_{seed}"
    folder = results / name
    (folder / "train").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    lines = rows([1.0] * 6 + [9.0 if advantage == "grpo" else 1.0], [2.0] * 7)
    (folder / "train" / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in [{"step": -1}, *lines])
    )
    for state, value in (("base", 0.25), ("trained", accuracy)):
        tasks = {
            "tasks": [
                {"task_id": "a", "metrics": {"avg@2": value, "pass@2": 1.0}},
                {"task_id": "b", "metrics": {"avg@2": value}},
            ]
        }
        (folder / "evaluation" / f"{state}.json").write_text(json.dumps(tasks))
    config = {
        "run": name,
        "results": str(results),
        "seed": seed,
        "advantage": {"name": advantage},
        "orchestra": {"name": "duo"},
    }
    return name, config


def test_estimators_are_compared_by_seed(tmp_path: Path) -> None:
    accuracies = {("grpo", 1): 0.5, ("grpo", 2): 0.7, ("drmas", 2): 0.8, ("drmas", 1): 0.7}
    runs = dict(
        make(tmp_path, advantage, seed, value) for (advantage, seed), value in accuracies.items()
    )
    outputs = [tmp_path / "study.csv", tmp_path / "study.md"]
    study_stability(runs, outputs)
    table = {(row["measure"], row["advantage"]): row for row in csv.DictReader(outputs[0].open())}
    assert float(table["accuracy", "grpo"]["value"]) == pytest.approx(0.6)
    gain = table["accuracy", "drmas - grpo"]
    assert float(gain["value"]) == pytest.approx(0.15)  # 0.2 and 0.1
    # Student's t of two seeds: 12.706 standard errors of 0.05
    half = 12.7062 * 0.05
    assert (float(gain["ci_low"]), float(gain["ci_high"])) == (
        pytest.approx(0.15 - half),
        pytest.approx(0.15 + half),
    )
    assert float(table["largest norm a", "drmas - grpo"]["value"]) == -8.0  # 9 and 1 in both seeds
    assert float(table["norm a", "grpo"]["value"]) == pytest.approx((6 * 1 + 9) / 7)
    assert float(table["accuracy before", "grpo"]["value"]) == 0.25
    text = "\n".join(" ".join(line.split()) for line in outputs[1].read_text().splitlines())
    assert "**duo**, 2 seeds" in text
    assert "| largest norm a | 9 [9, 9] | 1 [1, 1] | -8 [-8, -8] |" in text


def test_what_a_run_has_nothing_of_is_unknown_and_not_0(tmp_path: Path) -> None:
    """An agent that nobody called in one seed: its norm is that of the other seed, and no difference is paired."""
    runs = dict(make(tmp_path, name, seed, 0.5) for name in ("grpo", "drmas") for seed in (1, 2))
    called = [{"step": 7 + i, "agent/b/grad_norm": norm} for i, norm in enumerate((4.0, 8.0))]
    metrics = tmp_path / "grpo_1" / "train" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + "".join(f"{json.dumps(row)}\n" for row in called))
    outputs = [tmp_path / "study.csv", tmp_path / "study.md"]
    study_stability(runs, outputs)
    table = {(row["measure"], row["advantage"]): row for row in csv.DictReader(outputs[0].open())}
    assert (float(table["norm b", "grpo"]["value"]), table["norm b", "grpo"]["seeds"]) == (6.0, "1")
    assert ("norm b", "drmas") not in table and ("norm b", "drmas - grpo") not in table
    text = "\n".join(" ".join(line.split()) for line in outputs[1].read_text().splitlines())
    assert "**duo**, 2 seeds" in text and "| norm b | 6 [6, 6] of 1 seeds | | |" in text


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    runs = dict(make(tmp_path, "grpo", seed, 0.5) for seed in (1, 2))
    with pytest.raises(MetricsError, match="team 'duo' was trained with 'grpo' only"):
        study_stability(runs, [])
    runs |= dict([make(tmp_path, "drmas", 1, 0.5)])
    with pytest.raises(
        MetricsError, match=r"'grpo' has seeds \[1, 2\], 'drmas' \[1\]; expected the same"
    ):
        study_stability(runs, [])
    (tmp_path / "drmas_1" / "evaluation" / "base.json").unlink()
    with pytest.raises(MetricsError, match=r"base.json: no such file; evaluate the run first"):
        study_stability(runs, [])


@pytest.mark.slow
def test_the_study_is_a_target_and_shares_cold_starts(tmp_path: Path) -> None:
    suite = {
        "suite": "small",
        "share_cold_starts": True,
        "grid": {
            "axes": {"experiment": ["demo_math"], "advantage": ["grpo", "drmas"], "seed": [1, 2]}
        },
    }
    jobs = planned(tmp_path, suite, target="study_stability")
    assert jobs["study_stability"] == 1
    assert (jobs["train"], jobs["bootstrap"], jobs["make_base_model"]) == (4, 2, 2)
    assert "report" not in jobs


@pytest.fixture
def codebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the shipped study's teams, with its roles for as long as a test takes."""
    monkeypatch.syspath_prepend(str(STUDIES))
    monkeypatch.setenv("PYTHONPATH", "")
    known = dict(ROLES)
    yield __import__("codebook")
    ROLES.clear()
    ROLES.update(known)
    del sys.modules["codebook"]


def play(codebook: Any, orchestra: Any, agents: tuple[str, ...], letters: list[str]) -> Trajectory:
    engine = ScriptedEngine(lambda _, call: (*letters[call].encode(), 0))
    team = build_team(
        {name: AgentConfig(role=f"code_{name}", policy="p", max_tokens=4) for name in agents},
        {"p": EngineClient(engine=engine, renderer=Bytes())},  # type: ignore[arg-type]
    )
    task = Task(id="t", prompt="12 30 5", answers=("",), env="codes", source="codes", split="train")
    collector = Collector(team=team, make_env=codebook.guess, orchestra=orchestra, seed=1, step=0)
    [found] = asyncio.run(collector.collect([task], 1))
    return found.trajectories[0]


def test_the_rescuer_is_called_only_where_the_solver_fails(codebook: Any) -> None:
    solver, rescuer = (codebook.letter("12 30 5", agent) for agent in ("solver", "rescuer"))
    wrong = next(letter for letter in codebook.LETTERS if letter not in (solver, rescuer))
    agents = ("solver", "rescuer")
    at_once = play(codebook, codebook.rescue, agents, [solver])
    assert ([t.agent for t in at_once.turns], at_once.outcome) == (["solver"], 1.0)
    saved = play(codebook, codebook.rescue, agents, [wrong, wrong, rescuer])
    assert [t.scores["right"] for t in saved.turns] == [0.0, 0.0, 1.0] and saved.outcome == 1.0
    lost = play(codebook, codebook.rescue, agents, [wrong] * 5)
    assert ([t.agent for t in lost.turns], lost.outcome) == (["solver", *["rescuer"] * 4], 0.0)


def test_rewards_of_two_scales_are_each_agents_own(codebook: Any) -> None:
    solver, spender = (codebook.letter("12 30 5", agent) for agent in ("solver", "spender"))
    wrong = next(letter for letter in codebook.LETTERS if letter not in (solver, spender))
    agents = ("solver", "spender")
    right = play(codebook, codebook.scale, agents, [solver, spender])
    assert [t.scores["local"] for t in right.turns] == [1.0, 0.0]
    costly = play(codebook, codebook.scale, agents, [solver, wrong])
    assert costly.turns[0].scores["local"] == 1.0 and -50.0 < costly.turns[1].scores["local"] < 0.0
    paid = ALLOCATORS["local_team"](group(costly), alpha=0.0) if costly.task_id == TASK.id else None
    assert paid is not None
    assert [t.reward for t in paid.trajectories[0].turns] == [
        t.scores["local"] for t in costly.turns
    ]


def test_the_claims_suite_composes_and_its_demonstrations_slip_as_asked(codebook: Any) -> None:
    suite = Suite.load(yaml.safe_load((STUDIES / "claim.yaml").read_text()), STUDIES)
    assert (
        len(suite.runs) == 32 and len(set(suite.cold_start_owner.values())) == 16
    )  # a cold start for each team and seed
    roles = {agent: ROLES[f"code_{agent}"] for agent in ("solver", "rescuer")}
    told = list(
        codebook.demonstrations(1, 4000, roles=roles, slips={"solver": 0.0, "rescuer": 1.0})
    )
    right = {agent: [] for agent in roles}
    for demonstration in told:
        problem = demonstration.messages[0].content.partition(" ")[2]
        said = demonstration.messages[-1].content
        right[demonstration.agent].append(said == codebook.letter(problem, demonstration.agent))
    assert all(right["solver"])
    assert (
        abs(sum(right["rescuer"]) / len(right["rescuer"]) - 1 / 8) < 0.03
    )  # 5 standard errors of 2000 guesses
    by_split = codebook.tasks(1, {"train": 100, "test": 50})
    assert len({task.prompt for task in by_split}) == 150
