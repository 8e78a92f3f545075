"""Every shipped team takes two training steps on a tiny model, along the diagram that the catalogue draws of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from docs.writers.catalogue import FLOWS
from rollout.orchestras import ORCHESTRAS
from tests.support import lessons, ranks
from tests.support.run_folder import make_run
from tests.support.shipped import TEAMS, sharings

SHARED = [(team, sharing) for team in TEAMS for sharing in sharings(team)]
pytestmark = [pytest.mark.slow, pytest.mark.multirank]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two lessons of every team, all given in one process."""
    folder = tmp_path_factory.mktemp("taught")
    sizes = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "positions": 8192}
    model = (
        make_run(folder, *(f"++cold_start.base.{name}={size}" for name, size in sizes.items()))
        / "base"
    )
    ranks.run_jobs(
        [
            ranks.Job(
                function=lessons.teach,
                arguments={"out": folder, "team": team, "sharing": sharing, "model": str(model)},
            )
            for team, sharing in SHARED
        ]
    )
    return folder


def test_every_orchestra_is_taught() -> None:
    assert set(ORCHESTRAS) <= set(TEAMS)


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_its_diagram_is_what_it_plays(name: str, taught: Path) -> None:
    drawn = follows(FLOWS[name])
    steps = json.loads((taught / f"{name}_shared.json").read_text())
    assert set(drawn) - {"task"} == set(lessons.team_config(name, "shared", "m", taught).agents)
    for speakers in (speakers for step in steps for speakers in step["speakers"]):
        for before, after in pairwise(("task", *speakers, "answer")):
            assert after in drawn[before], f"{before} --> {after} in {speakers}"


def follows(edges: Sequence[str]) -> dict[str, set[str]]:
    """Who may come after whom in a line of turns; those side by side come in any order, and all before the next."""
    after: dict[str, set[str]] = {}
    for edge in edges:
        sources, targets = (
            re.sub(r"\|.*?\|", "", side).strip().split(" & ") for side in edge.split("-->")
        )
        for source in sources:
            after.setdefault(source, set()).update(targets)
        for together in (sources, targets):
            for agent in together:
                if len(together) > 1:
                    after.setdefault(agent, set()).update(together)
    return after


def test_a_flow_is_read_with_its_labels_and_groups() -> None:
    assert follows(("task --> a & b", "a & b -->|again| c", "c --> answer")) == {
        "task": {"a", "b"},
        "a": {"a", "b", "c"},
        "b": {"a", "b", "c"},
        "c": {"answer"},
    }


@pytest.mark.parametrize(("team", "sharing"), SHARED)
def test_the_team_takes_two_training_steps(team: str, sharing: str, taught: Path) -> None:
    config = lessons.team_config(team, sharing, "m", taught)
    steps = json.loads((taught / f"{team}_{sharing}.json").read_text())
    assert [step["failed"] for step in steps] == [[], []]
    speakers = {agent for step in steps for turns in step["speakers"] for agent in turns}
    assert speakers == set(config.agents)
    for step in steps:
        assert step["rewards_finite"]
        for policy, update in step["updates"].items():
            # the engine sampled with the weights that the trainer holds, those of the first update included
            assert update["gap"] < 1e-4, policy
            if update["signal"]:
                assert update["grad_norm"] > 0 and update["change"] > 0, policy
    for policy in config.policies:
        assert any(step["updates"].get(policy, {}).get("signal") for step in steps), (
            f"{policy} had nothing to learn from"
        )
