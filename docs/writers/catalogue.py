"""Writer of docs/catalogue.md: every orchestra with the team of the same name, from the registries and configs."""

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
# Mermaid edges by orchestra
FLOWS: dict[str, list[str]] = read_yaml(Path(__file__).with_name("flows.yaml"))


def pages() -> dict[Path, str]:
    """Return the text of the page: a section for each orchestra in alphabetical order."""
    return {CATALOGUE: rendered("catalogue", teams=[_team(name) for name in sorted(ORCHESTRAS)])}


def _team(name: str) -> dict[str, Any]:
    """Return the values of the section about an orchestra and the team of the same name."""
    text = (CONFIGS / "team" / f"{name}.yaml").read_text(encoding="utf-8")
    team = yaml.safe_load(text)
    lines_after_schema = text.splitlines()[1:]
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines_after_schema)

    roles = {}
    for agent, section in team["agents"].items():
        roles[agent] = ROLES[str(section.get("role") or agent)]
    # The docstring of a role's parser describes a well-formed reply.
    agents = [(agent, role.name, _summary(role.parse)) for agent, role in roles.items()]
    penalties = [
        (penalty, _summary(PENALTIES[penalty])) for penalty in team["reward"].get("penalties", {})
    ]
    return {
        "name": name,
        "summary": _summary(ORCHESTRAS[name]),
        "comment": " ".join(line.lstrip("# ") for line in comment),
        "edges": list(flow(name, team)),
        "agents": agents,
        "env": (team["env"]["name"], _summary(ENVS[team["env"]["name"]])),
        "reward": (team["reward"]["name"], _summary(ALLOCATORS[team["reward"]["name"]])),
        "penalties": penalties,
        "sharings": _sharings(team),
        "source": Path(inspect.getfile(ORCHESTRAS[name])).resolve().relative_to(ROOT),
        "roles": list({role.name: role for role in roles.values()}.values()),
    }


def flow(name: str, team: Mapping[str, Any]) -> Iterator[str]:
    """Yield the Mermaid edges of an orchestra; for `graph`, those of the graph in the team's config."""
    if name != "graph":
        yield from FLOWS[name]
        return
    graph = team["orchestra"]["options"]["graph"]
    starts = graph["start"] if isinstance(graph["start"], list) else [graph["start"]]
    for start in starts:
        yield f"task --> {start}"
    for node, settings in graph["nodes"].items():
        if "agent" in settings:
            yield f'{node}["{node}: {settings["agent"]}"]'
        else:
            yield f"{node}([{node}])"
    for edge in graph["edges"]:
        condition = f'|"{edge["when"]}"|' if "when" in edge else ""
        yield f"{edge['from']} -->{condition} {edge['to']}"


def _sharings(team: Mapping[str, Any]) -> str:
    """Return the values of `sharing` that a team allows, in words."""
    if "partly" not in team:
        return "shared or separate" if len(team["agents"]) > 1 else "shared"
    agents_of: dict[str, list[str]] = {}
    for agent, policy in team["partly"].items():
        agents_of.setdefault(policy, []).append(agent)
    parts = [f"`{policy}` for {', '.join(agents)}" for policy, agents in agents_of.items()]
    return f"shared, separate or partly ({'; '.join(parts)})"


def _summary(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring as one line."""
    text = inspect.getdoc(function) or ""
    return " ".join(text.partition("\n\n")[0].split())
