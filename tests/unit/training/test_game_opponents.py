"""Opponents of a trained policy: who plays whom, ratings, and a training against earlier weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.training.opponents import Opponents, expected_score
from mcore_mas.training.train import train
from rollout.engines.embedded.batching import EmbeddedEngine
from rollout.models.tensors import read_tensors
from rollout.records.files import read_trajectories
from tests.support.chat_server import chat_server, says
from tests.support.in_process import training_here
from tests.support.replay import sample_again
from tests.support.run_folder import make_run, metrics_of

RIVAL = "+policies.rival={model: ${results}/${run}/bootstrap/model}"
PAST = "past: {of: shared, every: 2, size: 3, choose: uniform}"


def config_of(*overrides: str) -> RunConfig:
    values = resolve(["experiment=demo_poker", *overrides])
    return RunConfig.from_values(values, "config")


def opponents_of(settings: str, ratings: dict[str, float] | None = None) -> Opponents:
    return Opponents(config_of(RIVAL, f"opponents={{policy: rival, {settings}}}"), None, ratings)


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


def test_members_are_the_newest_weights_that_were_kept() -> None:
    opponents = opponents_of(PAST)
    assert opponents.members(0) == opponents.members(1) == [0]
    assert opponents.members(2) == [0, 2]
    assert opponents.members(9) == [4, 6, 8]
    assert {opponents.choose(step) for step in range(100, 102)} <= {96, 98, 100}
    assert opponents_of(PAST.replace("uniform", "newest")).choose(9) == 8
    assert opponents_of("share: 1").choose(9) == 0


def test_members_are_chosen_by_the_scores_that_their_ratings_expect() -> None:
    # A difference of 400 points: expected scores of 10/11 and 1/11.
    assert expected_score(1400, 1000) == pytest.approx(10 / 11)
    assert expected_score(1000, 1400) == pytest.approx(1 / 11)
    ratings = {"trained": 1400.0, "0": 1000.0, "2000": 1400.0}
    opponents = opponents_of("past: {of: shared, every: 2000, choose: rating}", ratings)
    draws = [opponents.choose(step) for step in range(2000, 4000)]
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
        "opponent/score": 0.75,
        "opponent/member": 0.0,
        "opponent/rating": 1008.0,
    }
    # Equal ratings expect 1/2; a quarter of 32 points goes from one to the other.
    assert opponents.ratings == {"trained": 1008.0, "0": 992.0}
    assert opponents.record(0, []) == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["opponents={policy: rival}"], "opponents.policy is 'rival', which is not defined"),
        (["opponents={policy: shared}"], "opponents.policy is 'shared', which is trained"),
        (
            ["+policies.rival={model: elsewhere}", f"opponents={{policy: rival, {PAST}}}"],
            "policies.rival plays with earlier weights of 'shared', and starts from another model",
        ),
        (
            [RIVAL, f"opponents={{policy: rival, {PAST.replace('shared', 'rival')}}}"],
            "opponents.past.of is 'rival'; expected a trained policy: shared",
        ),
        (
            [RIVAL, f"opponents={{policy: rival, {PAST}}}", "trainer.staleness=1"],
            "use trainer.staleness: 0",
        ),
        ([RIVAL], "policy 'rival' is played by no agent"),
    ],
)
def test_opponents_that_cannot_play_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)


def test_other_teams_have_no_opponents() -> None:
    with pytest.raises(ConfigError, match="opponents play an agent of the team 'duel'"):
        resolve(["experiment=demo_math", "opponents={policy: solver}"])


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
        "opponents={policy: rival, share: 1, past: {of: shared, every: 2, size: 2, choose: newest}}",
        experiment="demo_poker",
    )
    config = run / "config.yaml"
    with training_here(monkeypatch):
        train(config)
    rows = metrics_of(run)[1:]
    # The opponent plays with the weights that were kept after every second step.
    assert [row.get("opponent/member") for row in rows] == [0, 0, 2, 2, 4]
    kept_weights = run / "train" / "opponents"
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
            "opponents={policy: rival, share: 1}",
            experiment="demo_poker",
        )
        train(run / "config.yaml")
    file = run / "train" / "trajectories" / "step_000000.parquet"
    turns = [turn for played in read_trajectories(file) for turn in played.turns]
    assert {turn.text for turn in turns if turn.policy == "rival"} == {"bet"}
    assert metrics_of(run)[-1]["opponent/member"] == 0
