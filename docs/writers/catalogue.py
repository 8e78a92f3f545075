"""The page docs/catalogue.md: every team that ships, from the registries and configs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from docs.writers import DOCS, ROOT, rendered
from mcore_mas.config.experiments import CONFIGS
from rollout.base.yaml_files import read_yaml
from rollout.environments import ENVS
from rollout.orchestras import ORCHESTRAS
from rollout.rewards import ALLOCATORS
from rollout.rewards.penalties import PENALTIES
from rollout.teams.roles import ROLES

CATALOGUE = DOCS / "catalogue.md"
FLOWS: dict[str, list[str]] = read_yaml(
    Path(__file__).with_name("flows.yaml")
)  # edges by orchestra


def pages() -> dict[Path, str]:
    """The page, a section for each orchestra in alphabetical order."""
    return {CATALOGUE: rendered("catalogue", teams=[_team(name) for name in sorted(ORCHESTRAS)])}


def _team(name: str) -> dict[str, Any]:
    """What the page says of the team in configs/team/`name`.yaml."""
    file = CONFIGS / "team" / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    team = yaml.safe_load(text)
    # the first line names the schema
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
    roles = {
        agent: ROLES[str(section.get("role") or agent)] for agent, section in team["agents"].items()
    }
    return {
        "name": name,
        "summary": _summary(ORCHESTRAS[name]),
        "comment": " ".join(line.lstrip("# ") for line in comment),
        "edges": list(flow(name, team)),
        "agents": [
            (agent, role.name, _summary(role.parse).strip()) for agent, role in roles.items()
        ],
        "env": (team["env"]["name"], _summary(ENVS[team["env"]["name"]])),
        "reward": (team["reward"]["name"], _summary(ALLOCATORS[team["reward"]["name"]])),
        "penalties": [
            (penalty, _summary(PENALTIES[penalty]))
            for penalty in team["reward"].get("penalties", {})
        ],
        "sharings": _sharings(team),
        "source": Path(inspect.getfile(ORCHESTRAS[name])).resolve().relative_to(ROOT),
        "roles": list({role.name: role for role in roles.values()}.values()),
    }


def flow(name: str, team: Mapping[str, Any]) -> Iterator[str]:
    """The Mermaid edges of an orchestra; of `graph` those of the graph in its team's config."""
    if name != "graph":
        yield from FLOWS[name]
        return
    graph = team["orchestra"]["options"]["graph"]
    starts = graph["start"] if isinstance(graph["start"], list) else [graph["start"]]
    yield from (f"task --> {start}" for start in starts)
    for node, what in graph["nodes"].items():
        yield f'{node}["{node}: {what["agent"]}"]' if "agent" in what else f"{node}([{node}])"
    for edge in graph["edges"]:
        when = f'|"{edge["when"]}"| ' if "when" in edge else ""
        yield f"{edge['from']} -->{when or ' '}{edge['to']}"


def _sharings(team: Mapping[str, Any]) -> str:
    """How the agents of a team may share policies."""
    if "partly" not in team:
        return "shared or separate" if len(team["agents"]) > 1 else "shared"
    players: dict[str, list[str]] = {}
    for agent, policy in team["partly"].items():
        players.setdefault(policy, []).append(agent)
    shares = "; ".join(f"`{policy}` for {', '.join(agents)}" for policy, agents in players.items())
    return f"shared, separate or partly ({shares})"


def _summary(thing: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, as one line."""
    text = inspect.getdoc(thing) or ""
    return " ".join(text.split("\n\n")[0].split())
