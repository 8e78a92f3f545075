"""Generated documents: the catalogue of teams and the page of options, from the registries and the shipped configs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from mcore_mas.config.compose import CONFIGS
from mcore_mas.config.credit import AdvantageConfig, CorrectionConfig, FilterConfig, LossConfig
from mcore_mas.reports.pages import render_page
from mcore_mas.rollout.base.options import descriptions
from mcore_mas.rollout.base.schema_words import expected, json_schema
from mcore_mas.rollout.config.sections import PENALTY_REGISTRY, TOOL_REGISTRY, EnvConfig, OrchestraConfig, RewardConfig
from mcore_mas.rollout.environments import ENVS
from mcore_mas.rollout.orchestras import FLOWS, ORCHESTRAS
from mcore_mas.rollout.rewards import ALLOCATORS
from mcore_mas.rollout.rewards.penalties import PENALTIES
from mcore_mas.rollout.tasks import GENERATORS
from mcore_mas.rollout.teams.roles import ROLES

ROOT = CONFIGS.parent
CATALOGUE = ROOT / "docs" / "catalogue.md"
OPTIONS = ROOT / "docs" / "options.md"
_REGISTRIES = {
    "Orchestras": ("`orchestra.name`, `orchestra.options`", OrchestraConfig.registry),
    "Environments": ("`env.name`, `env.options`", EnvConfig.registry),
    "Tools": ("`agents.<name>.tools`, options by name", TOOL_REGISTRY),
    "Rewards": ("`reward.name`, `reward.options`", RewardConfig.registry),
    "Penalties": ("`reward.penalties`, options by name", PENALTY_REGISTRY),
    "Estimators": ("`advantage.name`, `advantage.options`", AdvantageConfig.registry),
    "Filters": ("`filter.name`, `filter.options`", FilterConfig.registry),
    "Losses": ("`loss.name`, `loss.options`", LossConfig.registry),
    "Corrections": ("`loss.correction.name`, `loss.correction.options`", CorrectionConfig.registry),
}


def render_catalogue() -> str:
    """The page, a section for each orchestra in alphabetical order."""
    return render_page("catalogue.md.jinja", teams=[_team(name) for name in sorted(ORCHESTRAS)])


def _team(name: str) -> dict[str, Any]:
    """What the page says of the team in configs/team/`name`.yaml."""
    file = CONFIGS / "team" / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    team = yaml.safe_load(text)
    # the first line names the schema
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
    roles = {agent: ROLES[str(section.get("role") or agent)] for agent, section in team["agents"].items()}
    return {
        "name": name,
        "summary": _summary(ORCHESTRAS[name]),
        "comment": " ".join(line.lstrip("# ") for line in comment),
        "edges": list(flow(name, team)),
        "agents": [(agent, role.name, _summary(role.parse).strip()) for agent, role in roles.items()],
        "env": (team["env"]["name"], _summary(ENVS[team["env"]["name"]])),
        "reward": (team["reward"]["name"], _summary(ALLOCATORS[team["reward"]["name"]])),
        "penalties": [(penalty, _summary(PENALTIES[penalty])) for penalty in team["reward"].get("penalties", {})],
        "sharings": _sharings(team),
        "source": Path(inspect.getfile(ORCHESTRAS[name])).resolve().relative_to(ROOT),
        "roles": list({role.name: role for role in roles.values()}.values()),
    }


def render_options() -> str:
    """The page of every option: a table for each registry, a row for each option."""
    tables = []
    for title, (text, registry) in _REGISTRIES.items():
        options = {name: (registry.model(name), registry.find(name)) for name in registry.known}
        tables.append({"title": title, "text": f"{text}.", "rows": list(_option_rows(options))})
    tasks = {name: (made.task_options, made.options or made.tasks) for name, made in GENERATORS.items()}
    tables.append({"title": "Task generators", "text": "`data.options`.", "rows": list(_option_rows(tasks))})
    starts = {
        name: (made.demonstration_options, made.demonstrations)
        for name, made in GENERATORS.items()
        if made.demonstrations is not None and made.demonstration_options is not None
    }
    tables.append({"title": "Cold starts", "text": "`cold_start.options`.", "rows": list(_option_rows(starts))})
    return render_page("options.md.jinja", tables=tables)


def _option_rows(options: Mapping[str, tuple[type[BaseModel], Callable[..., Any]]]) -> Iterator[tuple[str, ...]]:
    """Cells of each name's options: what it takes, its default, and what the docstring says of it."""
    for name, (model, function) in options.items():
        schema, said = json_schema(model), descriptions(function)
        for option, part in schema.get("properties", {}).items():
            default = "required" if option in schema.get("required", ()) else f"`{_value(part.get('default'))}`"
            takes = expected(part, schema.get("$defs", {}))
            yield f"`{name}`", f"`{option}`", takes, default, said.get(option, "").replace("|", "/")
        if not model.model_fields:
            yield f"`{name}`", "none", "", "", ""


def _value(default: Any) -> str:
    """A default as YAML writes it, in one line."""
    text: str = yaml.safe_dump(default, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("...\n").strip()


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
