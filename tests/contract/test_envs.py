"""Environments and task generators of the registries: they are documented and used by a shipped team."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rollout.environments
from rollout.environments import ENVS
from rollout.environments.games import GAMES, ZERO_SUM_GAMES
from rollout.tasks.generators import GENERATORS
from tests.support.shipped import TEAMS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(ENVS) - set(GAMES)))
def test_an_environment_is_described(name: str) -> None:
    docstring = rollout.environments.__doc__ or ""
    match = re.search(rf"(^|[ ,]){name}\b", docstring, re.MULTILINE)
    assert match, f"{name} is not in the docstring of rollout.environments"


# The team `duel` plays all zero-sum games.
@pytest.mark.parametrize("name", sorted(set(ENVS) - set(GAMES) - set(ZERO_SUM_GAMES)))
def test_a_shipped_team_plays_in_each_environment(name: str) -> None:
    assert name in {team["env"]["name"] for team in TEAMS.values() if "env" in team}


@pytest.mark.parametrize(
    "name", sorted(set(GENERATORS) - {"arithmetic", "encyclopedia"} - set(GAMES))
)
def test_a_generator_is_described(name: str) -> None:
    # The first cell of a row may name several generators.
    assert re.search(rf"^\|[^|]*`{name}`[^|]*\|", DOCS, re.MULTILINE)
    # Of the generators that are tested here, only these make demonstrations.
    has_demonstrations = name in ("encyclopedia_chats", "programs", *ZERO_SUM_GAMES)
    assert (GENERATORS[name].demonstration_options is not None) == has_demonstrations
