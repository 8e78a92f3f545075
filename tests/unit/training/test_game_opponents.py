"""Opponents of a trained policy: who plays whom, ratings, and a training against earlier weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.training.opponents import Opponent, Opponents, expected_score
from mcore_mas.training.train import train
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.models.tensors import read_tensors
from rollout.records.files import read_trajectories
from tests.support.chat_server import chat_server, says
from tests.support.checkpoints import open_, save
from tests.support.in_process import training_here
from tests.support.replay import sample_again
from tests.support.run_folder import make_run, metrics_of

OTHER = "+policies.other={model: elsewhere}"
TENSOR = ["engine=sglang", "engine.transport=tensor", "cluster.pool=shared"]
RIVAL = "+policies.rival={model: ${results}/${run}/bootstrap/model}"
BOTH = [RIVAL, OTHER]
PAST = "past: {of: shared, every: 2, size: 3, choose: uniform}"


def config_of(*overrides: str) -> RunConfig:
    values = resolve(["experiment=demo_poker", *overrides])
    return RunConfig.from_values(values, "config")


def opponents_of(settings: str, ratings: dict[str, float] | None = None) -> Opponents:
    return Opponents(config_of(RIVAL, f"opponents={{rival: {{{settings}}}}}"), {}, ratings)


def opponent_of(settings: str) -> Opponent:
    [opponent] = opponents_of(settings).with_past
    return opponent


def test_the_opponent_plays_each_agent_in_a_share_of_the_tasks() -> None:
    opponents = opponents_of("share: 0.5")
    played = [opponents.policies_of(step, f"task {n}") for step in range(20) for n in range(50)]
    # 1,000 draws: 500 games of self-play and 250 with the opponent as each agent, with standard
    # deviations of 16 and 14.
    assert abs(played.count({}) - 500) < 70
    assert abs(played.count({"first": "rival"}) - 250) < 60
    assert abs(played.count({"second": "rival"}) - 250) < 60
    assert played[:50] == [opponents.policies_of(0, f"task {n}") for n in range(50)]
    assert opponents_of("share: 1").policies_of(0, "t") != {}


def test_opponents_share_the_tasks_and_play_their_own_agents() -> None:
    config = config_of(
        *BOTH, "opponents={rival: {share: 0.4}, other: {share: 0.2, agents: [second]}}"
    )
    opponents = Opponents(config, {})
    played = [opponents.policies_of(step, f"task {n}") for step in range(20) for n in range(50)]
    # 1,000 draws with standard deviations of at most 16
    assert abs(played.count({}) - 400) < 70
    assert abs(played.count({"first": "rival"}) - 200) < 60
    assert abs(played.count({"second": "rival"}) - 200) < 60
    assert abs(played.count({"second": "other"}) - 200) < 60
    assert {"first": "other"} not in played


def test_each_opponent_has_ratings_of_its_own() -> None:
    config = config_of(*BOTH, "opponents={rival: {share: 0.5}, other: {share: 0.5}}")
    opponents = Opponents(config, {})
    groups = []
    for policy, score in (("rival", 1.0), ("other", 0.5)):
        task = next(
            str(n) for n in range(99) if opponents.policies_of(0, str(n)) == {"second": policy}
        )
        groups.append(
            SimpleNamespace(
                task=SimpleNamespace(id=task), trajectories=[SimpleNamespace(score=score)]
            )
        )
    metrics: Any = opponents.record(0, groups)  # type: ignore[arg-type]
    # Against `rival`, half a point more than expected: 16 points. Then 1016 against 1000 expects
    # 1/(1 + 10^(-16/400)) = 0.5230, so a draw costs 32 * 0.0230 = 0.7364 points.
    assert opponents.ratings == {
        "trained": pytest.approx(1015.2636, abs=1e-4),
        "rival/0": 984.0,
        "other/0": pytest.approx(1000.7364, abs=1e-4),
    }
    assert metrics["opponent/rating"] == opponents.ratings["trained"]
    assert (metrics["opponent/rival/score"], metrics["opponent/other/score"]) == (1.0, 0.5)


def test_members_are_the_newest_weights_that_were_kept() -> None:
    opponent = opponent_of(PAST)
    assert opponent.members(0) == opponent.members(1) == [0]
    assert opponent.members(2) == [0, 2]
    assert opponent.members(9) == [4, 6, 8]
    opponents = opponents_of(PAST)
    assert {opponents.members(step)["rival"] for step in range(100, 102)} <= {96, 98, 100}
    assert opponents_of(PAST.replace("uniform", "newest")).members(9) == {"rival": 8}
    assert opponents_of("share: 1").members(9) == {"rival": 0}


def test_members_are_chosen_by_the_scores_that_their_ratings_expect() -> None:
    # A difference of 400 points: expected scores of 10/11 and 1/11.
    assert expected_score(1400, 1000) == pytest.approx(10 / 11)
    assert expected_score(1000, 1400) == pytest.approx(1 / 11)
    ratings = {"trained": 1400.0, "rival/0": 1000.0, "rival/2000": 1400.0}
    opponents = opponents_of("past: {of: shared, every: 2000, choose: rating}", ratings)
    draws = [opponents.members(step)["rival"] for step in range(2000, 4000)]
    # Member 2000 is as good as the trained policy: 1/2 against 1/11, so it plays in 11 of 13 steps.
    assert draws.count(2000) / len(draws) == pytest.approx(11 / 13, abs=0.04)
    assert set(draws) == {0, 2000}


def test_ratings_follow_the_scores() -> None:
    opponents = opponents_of("share: 1")
    task_id = next(str(n) for n in range(99) if "second" in opponents.policies_of(0, str(n)))
    other_id = next(str(n) for n in range(99) if "first" in opponents.policies_of(0, str(n)))

    def group(task: str, *scores: float | None) -> Any:
        trajectories = [SimpleNamespace(score=score) for score in scores]
        return SimpleNamespace(task=SimpleNamespace(id=task), trajectories=trajectories)

    # The trained policy wins as `first`, and as `second` whenever `first` does not: a mean of 3/4.
    groups = [group(task_id, 1.0, 1.0, None), group(other_id, 0.0, 1.0)]
    assert opponents.record(0, groups) == {
        "opponent/rival/score": 0.75,
        "opponent/rival/member": 0.0,
        "opponent/rating": 1008.0,
    }
    # Equal ratings expect 1/2; a quarter of 32 points goes from one to the other.
    assert opponents.ratings == {"trained": 1008.0, "rival/0": 992.0}
    assert opponents.record(0, []) == {}


class WeightsOfSteps:
    """A trainer whose models are empty folders."""

    async def write_model(self, folder: Path) -> None:
        folder.mkdir(parents=True)


def test_weights_that_a_restart_may_play_with_are_kept(tmp_path: Path) -> None:
    config = config_of(
        RIVAL,
        "opponents={rival: {past: {of: shared, every: 2, size: 1}}}",
        f"results={tmp_path}",
    )
    kept_weights = config.folder / "train" / "opponents" / "rival"
    trainers: Any = {"shared": WeightsOfSteps()}
    checkpoints = open_(tmp_path / "checkpoints", keep=2)

    def keep(*steps: int) -> set[str]:
        opponents = Opponents(config, {})
        for step in steps:
            oldest = checkpoints.oldest_restart
            asyncio.run(opponents.keep(step, trainers, oldest_restart=oldest))
        return {folder.name for folder in kept_weights.iterdir()}

    assert checkpoints.oldest_restart == 0
    # A restart from the beginning plays all steps again, and keeps all weights again.
    assert keep(2, 4) == {"2", "4"}
    # If the checkpoint of step 4 is damaged, the run continues from step 2, with the weights of step 2.
    save(checkpoints, 2, 4)
    assert keep(6, 8) == {"2", "4", "6", "8"}
    save(checkpoints, 6)
    assert keep(10) == {"4", "6", "8", "10"}


def test_a_rank_that_was_killed_while_it_wrote_weights_stops_no_later_step(tmp_path: Path) -> None:
    config = config_of(
        RIVAL, "opponents={rival: {past: {of: shared, every: 1}}}", f"results={tmp_path}"
    )
    kept_weights = config.folder / "train" / "opponents" / "rival"
    (kept_weights / ".2.partial").mkdir(parents=True)
    trainers: Any = {"shared": WeightsOfSteps()}
    asyncio.run(Opponents(config, {}).keep(1, trainers, oldest_restart=0))
    assert {folder.name for folder in kept_weights.iterdir()} == {".2.partial", "1"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["opponents={policy: rival}"], "opponents.policy was removed: name the policy as a key"),
        (["opponents={rival: {}}"], "opponents names 'rival', which is not defined"),
        (["opponents={shared: {}}"], "opponents names 'shared', which is trained"),
        (
            [RIVAL, "opponents={rival: {agents: [third]}}"],
            "opponents.rival.agents names 'third'; expected trained agents: first, second",
        ),
        (
            [*BOTH, "opponents={rival: {share: 0.7}, other: {share: 0.4}}"],
            "the shares of opponents add up to 1.1; expected at most 1",
        ),
        (
            ["+policies.rival={model: elsewhere}", f"opponents={{rival: {{{PAST}}}}}"],
            "policies.rival plays with earlier weights of 'shared', and starts from another model",
        ),
        (
            [RIVAL, f"opponents={{rival: {{{PAST.replace('shared', 'rival')}}}}}"],
            "opponents.rival.past.of is 'rival'; expected a trained policy: shared",
        ),
        (
            [RIVAL, f"opponents={{rival: {{{PAST}}}}}", "trainer.staleness=1"],
            "gives the opponent's engine new weights before each step; use a staleness of 0",
        ),
        (
            [RIVAL, f"opponents={{rival: {{{PAST}}}}}", *TENSOR],
            "opponents.rival.past: its weights come from files, and transport 'tensor' sends",
        ),
        ([RIVAL], "policy 'rival' is played by no agent"),
        (
            [
                *[RIVAL, "opponents={rival: {}}"],
                *[f"+agents.{name}.loss_weight=0" for name in ("first", "second")],
            ],
            "opponents play in place of trained agents, and this run trains none",
        ),
    ],
)
def test_opponents_that_cannot_play_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)


def test_other_teams_have_no_opponents() -> None:
    with pytest.raises(ConfigError, match="this run's is 'solver_verifier'; choose team=duel"):
        resolve(["experiment=demo_math", "opponents={solver: {}}"])


@pytest.mark.slow
def test_a_policy_trains_against_its_earlier_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(
        tmp_path,
        "data.train=6",
        "trainer.tasks_per_step=6",
        "trainer.steps=5",
        "trainer.checkpoint_every=1",
        "trainer.validate_every=5",
        "policies.shared.lr=1.0e-2",
        # A random model never replies with a legal action.
        "reward.name=tests.support.rewards:by_first_token",
        "~reward.options",
        "policies.shared.warmup_steps=0",
        f"+policies.rival={{model: {tmp_path}/demo_poker/base}}",
        "opponents={rival: {share: 1, past: {of: shared, every: 2, size: 2, choose: newest}}}",
        experiment="demo_poker",
    )
    config = run / "config.yaml"
    with training_here(monkeypatch):
        train(config)
    rows = metrics_of(run)[1:]
    # The opponent plays with the weights that were kept after every second step.
    assert [row.get("opponent/rival/member") for row in rows] == [0, 0, 2, 2, 4]
    kept_weights = run / "train" / "opponents" / "rival"
    assert {folder.name for folder in kept_weights.iterdir()} == {"2", "4"}
    folders = {0: run / "base", 2: kept_weights / "2", 4: kept_weights / "4"}
    [first, last] = [dict(read_tensors(folders[member])) for member in (0, 4)]
    assert any(not torch.equal(first[name], last[name]) for name in first)

    engine = EmbeddedEngine.from_folder(run / "base", rows=1, max_length=512)
    for step, member in enumerate([0, 0, 2, 2, 4]):
        file = run / "train" / "trajectories" / f"step_{step:06d}.parquet"
        turns = [turn for played in read_trajectories(file) for turn in played.turns]
        assert {turn.policy for turn in turns} == {"shared", "rival"}
        assert {turn.policy_version for turn in turns if turn.policy == "shared"} == {step}
        opponents_turns = [turn for turn in turns if turn.policy == "rival"]
        assert {turn.policy_version for turn in opponents_turns} == {member}
        for turn in opponents_turns[:3]:
            tokens, logprobs = sample_again(
                engine, turn, lambda version: read_tensors(folders[version])
            )
            assert tokens == turn.completion_ids
            assert logprobs == pytest.approx(turn.logprobs, abs=1e-4)


@pytest.mark.slow
def test_a_policy_trains_against_a_remote_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chat_server(says("bet")) as server, training_here(monkeypatch):
        run = make_run(
            tmp_path,
            "data.train=6",
            "trainer.tasks_per_step=6",
            "trainer.steps=1",
            "policies.shared.warmup_steps=0",
            f"+policies.rival={{remote: {{model: big, url: '{server.url}'}}}}",
            "opponents={rival: {share: 1}}",
            experiment="demo_poker",
        )
        train(run / "config.yaml")
    file = run / "train" / "trajectories" / "step_000000.parquet"
    turns = [turn for played in read_trajectories(file) for turn in played.turns]
    assert {turn.text for turn in turns if turn.policy == "rival"} == {"bet"}
    assert metrics_of(run)[-1]["opponent/rival/member"] == 0


@pytest.mark.slow
def test_a_run_with_opponents_continues_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {}
    for name, parts in (("whole", [4]), ("restarted", [2, 4])):
        (tmp_path / name).mkdir()
        for steps in parts:
            overrides = [
                "data.train=6",
                "trainer.tasks_per_step=6",
                f"trainer.steps={steps}",
                "trainer.checkpoint_every=1",
                "trainer.validate_every=4",
                "policies.shared.lr=1.0e-2",
                "reward.name=tests.support.rewards:by_first_token",
                "~reward.options",
                "policies.shared.warmup_steps=0",
                "policies.shared.schedule=constant",  # does not depend on trainer.steps
                "engine.deterministic=true",
                f"+policies.rival={{model: {tmp_path}/{name}/demo_poker/base}}",
                f"+policies.other={{model: {tmp_path}/{name}/demo_poker/base}}",
                "opponents={rival: {share: 0.5, past: {of: shared, every: 1, choose: rating}},"
                " other: {share: 0.25, agents: [second]}}",
            ]
            if steps == parts[0]:
                runs[name] = make_run(tmp_path / name, *overrides, experiment="demo_poker")
            config = runs[name] / "config.yaml"
            values = yaml.safe_load(config.read_text())
            values["trainer"]["steps"] = steps
            config.write_text(yaml.safe_dump(values))
            with training_here(monkeypatch):
                train(config)
    rows = {name: metrics_of(run)[1:] for name, run in runs.items()}
    for key in ("opponent/rating", "opponent/rival/member", "opponent/other/score", "reward/mean"):
        assert [row.get(key) for row in rows["whole"]] == [
            row.get(key) for row in rows["restarted"]
        ], key
    assert len({row.get("opponent/rival/member") for row in rows["whole"]}) > 1
    [whole, restarted] = [
        dict(read_tensors(run / "train" / "models" / "shared")) for run in runs.values()
    ]
    assert whole.keys() == restarted.keys()
    assert all(torch.equal(whole[name], restarted[name]) for name in whole)
