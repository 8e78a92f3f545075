"""docs/catalogue.md, written from the registries and the shipped configs: `python -m mcore_mas.reports.catalogue`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mcore_mas.config.compose import CONFIGS
from rollout.base.files import write_text
from rollout.environments import ENVS
from rollout.orchestras import ORCHESTRAS
from rollout.orchestras.flows import FLOWS
from rollout.rewards import ALLOCATORS
from rollout.rewards.penalties import PENALTIES
from rollout.teams.team import ROLES, Role

ROOT = CONFIGS.parent
PAGE = ROOT / "docs" / "catalogue.md"

_HEAD = """# Catalogue of teams

Every orchestra that ships: who speaks after whom, what each role is told and how its reply is read, what is rewarded,
and the configs to start from. Written by `python -m mcore_mas.reports.catalogue` from the registries and `configs/`; a
test plays every team against its diagram, and another takes two training steps with each config named here.

Choose a team with `team=<config>` and who plays which policy with [`sharing`](configuration.md#three-scopes);
[configuration.md](configuration.md) lists the options of orchestras, environments and
rewards, [experiments.md](experiments.md) the published runs.

"""

Section = Mapping[str, Any]


def page() -> str:
    """The page, a section for each orchestra in alphabetical order."""
    index = "".join(f"- [`{name}`](#{name}): {_first(ORCHESTRAS[name])}\n" for name in sorted(ORCHESTRAS))
    return _HEAD + index + "".join(f"\n{text}" for text in map(_section, sorted(ORCHESTRAS)))


def _section(name: str) -> str:
    file = CONFIGS / "team" / f"{name}.yaml"
    team = yaml.safe_load(file.read_text(encoding="utf-8"))
    reward, env = team["reward"]["name"], team["env"]["name"]
    penalties = "".join(f" Penalty `{p}`: {_first(PENALTIES[p])}" for p in team["reward"].get("penalties", {}))
    source = Path(inspect.getfile(ORCHESTRAS[name])).relative_to(ROOT)
    return (
        f"## {name}\n\n{_comment(file)}\n\n"
        f"```mermaid\nflowchart LR\n{''.join(f'    {edge}{chr(10)}' for edge in flow(name, team))}```\n\n"
        "| agent | role | a well-formed reply |\n|---|---|---|\n"
        + "".join(_agent_row(agent, section) for agent, section in team["agents"].items())
        + f"\n- environment `{env}`: {_first(ENVS[env])}\n"
        f"- reward `{reward}`: {_first(ALLOCATORS[reward])}{penalties}\n"
        f"- config: [{name}](../configs/team/{name}.yaml), with `sharing` {_sharings(team)}\n"
        f"- source: [{source}](../{source})\n\n"
        + "".join(_prompts(role) for role in dict.fromkeys(map(_role, team["agents"], team["agents"].values())))
    )


def flow(name: str, team: Section) -> Iterator[str]:
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


def _sharings(team: Section) -> str:
    """How the agents of a team may share policies."""
    if "partly" not in team:
        return "shared or separate" if len(team["agents"]) > 1 else "shared"
    players: dict[str, list[str]] = {}
    for agent, policy in team["partly"].items():
        players.setdefault(policy, []).append(agent)
    shares = "; ".join(f"`{policy}` for {', '.join(agents)}" for policy, agents in players.items())
    return f"shared, separate or partly ({shares})"


def _role(agent: str, section: Section) -> str:
    return str(section.get("role") or agent)


def _agent_row(agent: str, section: Section) -> str:
    role = ROLES[_role(agent, section)]
    return f"| `{agent}` | `{role.name}` | {_first(role.parse).strip().replace('|', chr(92) + '|')} |\n"


def _prompts(name: str) -> str:
    role: Role = ROLES[name]
    told = "\n\n".join(f"[{who}]\n{text}" for who, text in (("system", role.system), ("user", role.user)) if text)
    return f"<details><summary>What <code>{name}</code> is told</summary>\n\n````text\n{told}\n````\n\n</details>\n\n"


def _comment(file: Path) -> str:
    """The comment at the top of a config, as one paragraph."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def _first(thing: Callable[..., Any]) -> str:
    """The first sentence of a docstring, as one line."""
    text = inspect.getdoc(thing) or ""
    return " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    write_text(PAGE, page())
