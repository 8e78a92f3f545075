"""Opponents in a game: an agent that another model plays, which is not trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.strategies import game_of
from rollout.environments.games.kuhn_poker import KuhnPoker

EXPERIMENT = {
    "defaults": [{"override /team": "duel"}],
    "run": "poker",
    "cold_start": None,
    "data": {"generator": "kuhn_poker", "train": 6, "validation": 6, "test": 6},
    "sharing": "separate",
    "policy_defaults": {"lr": 1.0e-6},
    "agents": {"second": {"loss_weight": 0}},
    "engine": {"max_length": 512},
    "evaluation": {"samples": 1},
    "trainer": {"steps": 2, "tasks_per_step": 6, "group_size": 8},
}
REMOTE = {"provider": "openai", "model": "m", "key_variable": "KEY"}


@pytest.mark.parametrize("opponent", [{"model": "/models/old"}, {"remote": REMOTE}])
def test_an_opponent_is_a_policy_without_training(
    tmp_path: Path, opponent: dict[str, object]
) -> None:
    experiment = EXPERIMENT | {"policies": {"first": {"model": "/models/new"}, "second": opponent}}
    file = tmp_path / "configs" / "experiment" / "poker.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(experiment))
    resolved = tmp_path / "config.yaml"
    resolved.write_text(yaml.safe_dump(resolve(["experiment=poker"], folder=tmp_path / "configs")))
    config = RunConfig.load(resolved)
    assert config.trained == ("first",)
    assert config.remotes.keys() == ({"second"} if "remote" in opponent else set())
    assert isinstance(game_of(config), KuhnPoker)
