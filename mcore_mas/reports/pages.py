"""Web pages by Jinja2 templates that escape everything: nothing is loaded, nothing runs, model text is only text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rollout.records.trajectory import ToolEvent, Trajectory, Turn

Advantages = Mapping[tuple[str, str, int], float]  # (trajectory, node, turn) -> its advantage
_HUES = 7  # agents that have a colour of their own


def render_page(template: str, **values: Any) -> str:
    """The page that `template`, a file of `templates/`, makes of `values`.

    Every value is escaped. Control characters, which a browser would drop or obey, are replaced. Should an escape ever
    be missing, the page's own content security policy still lets nothing run and nothing load.
    """
    return _TEMPLATES.get_template(template).render(values)


def _printable(value: Any) -> Any:
    if not isinstance(value, str) or hasattr(value, "__html__"):  # a macro's output has been through here
        return value
    clean = value.encode("utf-8", "replace").decode()
    return "".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in clean)


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    finalize=_printable,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def trajectory_page(trajectory: Trajectory, advantages: Advantages) -> str:
    """The page of one trajectory; of a tree, with the branches that did not go on folded where they left the path."""
    agents: dict[str, list[Turn]] = {}
    nodes: dict[str, list[Turn]] = {}
    tools: dict[tuple[str, int], list[ToolEvent]] = {}
    for turn in trajectory.turns:
        agents.setdefault(turn.agent, []).append(turn)
        nodes.setdefault(turn.node, []).append(turn)
    for event in trajectory.tools:
        tools.setdefault((event.node, event.after_turn), []).append(event)
    path = {
        node: [other for other in nodes if node and other and other != node and _parent(other) == _parent(node)]
        for node in dict.fromkeys(turn.node for turn in trajectory.path)
    }
    own = {(node, index): value for (of, node, index), value in advantages.items() if of == trajectory.id}
    return render_page(
        "trajectory.html.jinja",
        trajectory=trajectory,
        agents=agents,
        hues={agent: f"var(--a{i % _HUES})" for i, agent in enumerate(agents)},
        nodes=nodes,
        path=path,
        tools=tools,
        advantages=own,
        largest=max(map(abs, own.values()), default=0.0),
    )


def _parent(node: str) -> str:
    return node.rpartition(".")[0]
