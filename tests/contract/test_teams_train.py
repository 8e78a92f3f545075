"""Every shipped team takes two training steps on a tiny model and follows its diagram in the catalogue."""

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

# The most varied way to share policies comes last: with `partly`, some policies have several agents and others one;
# with `separate`, each agent has a policy. The composition of the others is a test in test_config.py.
SHARING = {team: sharings(team)[-1] for team in TEAMS}

pytestmark = [pytest.mark.slow, pytest.mark.multirank]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every team for two steps, all in one process; return the folder of their results."""
    folder = tmp_path_factory.mktemp("taught")
    sizes = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "positions": 8192}
    settings = [f"++cold_start.base.{name}={size}" for name, size in sizes.items()]
    model = make_run(folder, *settings) / "base"
    jobs = [
        ranks.Job(
            function=lessons.teach,
            arguments={"out": folder, "team": team, "sharing": sharing, "model": str(model)},
        )
        for team, sharing in SHARING.items()
    ]
    ranks.run_jobs(jobs)
    return folder


def test_every_orchestra_has_a_team() -> None:
    assert set(ORCHESTRAS) <= set(TEAMS)


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_agents_speak_in_an_order_of_their_diagram(name: str, results: Path) -> None:
    successors = possible_successors(FLOWS[name])
    assert set(successors) - {"task"} == set(TEAMS[name]["agents"])
    for step in json.loads((results / f"{name}_{SHARING[name]}.json").read_text()):
        for speakers in step["speakers"]:
            for before, after in pairwise(("task", *speakers, "answer")):
                assert after in successors[before], f"{before} --> {after} in {speakers}"


def possible_successors(edges: Sequence[str]) -> dict[str, set[str]]:
    """Return the agents that may speak next after each agent, from the edges of a diagram.

    Agents of one group, such as `a & b`, speak in any order, and all of them before the next agent.
    """
    successors: dict[str, set[str]] = {}
    for edge in edges:
        without_labels = re.sub(r"\|.*?\|", "", edge)
        sources, targets = (side.strip().split(" & ") for side in without_labels.split("-->"))
        for source in sources:
            successors.setdefault(source, set()).update(targets)
        for agent_group in (sources, targets):
            if len(agent_group) == 1:
                continue
            for agent in agent_group:
                successors.setdefault(agent, set()).update(agent_group)
    return successors


def test_edges_of_a_diagram_have_labels_and_groups() -> None:
    assert possible_successors(("task --> a & b", "a & b -->|again| c", "c --> answer")) == {
        "task": {"a", "b"},
        "a": {"a", "b", "c"},
        "b": {"a", "b", "c"},
        "c": {"answer"},
    }


@pytest.mark.parametrize(("team", "sharing"), SHARING.items())
def test_the_team_takes_two_training_steps(team: str, sharing: str, results: Path) -> None:
    steps = json.loads((results / f"{team}_{sharing}.json").read_text())
    assert [step["failed"] for step in steps] == [[], []]
    all_speakers: set[str] = set()
    for step in steps:
        all_speakers.update(*step["speakers"])
    assert all_speakers == set(TEAMS[team]["agents"])
    for step in steps:
        assert step["rewards_finite"]
        for policy, update in step["updates"].items():
            # The engine has the weights of the trainer, also after the first update.
            assert update["gap"] < 1e-4, policy
            if update["signal"]:
                assert update["grad_norm"] > 0, policy
                assert update["change"] > 0, policy
    for policy in steps[0]["policies"]:
        has_signal = [step["updates"].get(policy, {}).get("signal") for step in steps]
        assert any(has_signal), f"{policy} had nothing to learn from"
