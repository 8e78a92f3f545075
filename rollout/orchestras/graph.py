"""Orchestra `graph`: a workflow that the config states as a graph.

The nodes of a `Graph` ask agents or step the environment, and conditions on its edges decide which
nodes run next. A graph is validated when the config is read.
"""

from __future__ import annotations

import asyncio
import keyword
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from rollout.base.section import StrictSection
from rollout.environments.protocol import Env
from rollout.orchestras.conditions import parse_condition
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession

_EPISODE_NAMES = ("problem", "history")  # names of templates and conditions that are not nodes
_RESERVED_NAMES = (*_EPISODE_NAMES, "len")


def _check_template(text: str) -> str:
    """Validate a template, in which braces may contain names only."""
    try:
        fields = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{error}; write a brace itself as {{{{ or }}}}") from error
    if any(format_spec or conversion for _, _, format_spec, conversion in fields):
        raise ValueError("expected names alone between braces, without a conversion or format")
    return text


def _check_node_name(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED_NAMES:
        raise ValueError(
            f"expected a name of letters, digits and _ that is not {', '.join(_RESERVED_NAMES)}"
        )
    return name


def _check_condition(text: str) -> str:
    return parse_condition(text).text


def _as_list(start: object) -> object:
    """Convert the name of a single first node to a list."""
    return [start] if isinstance(start, str) else start


Template = Annotated[str, AfterValidator(_check_template)]  # text with names in braces, as {name}


class GraphNode(StrictSection):
    """A node: either an agent to ask, or an action with which the environment is stepped."""

    agent: str | None = None
    slots: Mapping[str, Template] = Field(default_factory=dict)  # of the agent's user template
    action: Template | None = None
    wait: Literal["any", "all"] = "any"  # which of the edges into the node must have been taken

    @model_validator(mode="after")
    def _check_kind(self) -> GraphNode:
        has_agent = self.agent is not None
        has_action = self.action is not None
        if has_agent == has_action or (has_action and self.slots):
            raise ValueError("expected either agent, with its slots, or action")
        return self


class Edge(StrictSection):
    """An edge between two nodes, which is taken after its source has run if its condition holds."""

    source: str = Field(alias="from")
    target: str = Field(alias="to")
    when: Annotated[str, AfterValidator(_check_condition)] | None = None  # null: always


class Graph(StrictSection):
    """Nodes by name, the edges between them, and the nodes that run first.

    Raises:
        ValueError: a name is unknown, a node cannot be reached, a cycle has no condition, or no
            node has an action.
    """

    nodes: Mapping[Annotated[str, AfterValidator(_check_node_name)], GraphNode] = Field(
        min_length=1
    )
    edges: Sequence[Edge] = ()
    start: Annotated[Sequence[str], BeforeValidator(_as_list, Sequence[str] | str)] = ()

    @model_validator(mode="after")
    def _check_graph(self) -> Graph:
        for name in self.start:
            _check_name("start", name, self.nodes)
        for number, edge in enumerate(self.edges, start=1):
            _check_name(f"edge {number}, from", edge.source, self.nodes)
            _check_name(f"edge {number}, to", edge.target, self.nodes)
        if all(node.action is None for node in self.nodes.values()):
            raise ValueError("no node has an action, so nothing would step the environment")
        self._check_templates()
        self._check_conditions()
        self._check_reachable()
        self._check_cycles()
        return self

    def initial_values(self) -> dict[str, str | int]:
        """Return the names that templates may use, with their values before the first wave."""
        values: dict[str, str | int] = dict.fromkeys(_EPISODE_NAMES, "")
        for name in self.nodes:
            values[name] = ""
            values[f"{name}.text"] = ""
            values[f"{name}.runs"] = 0
        return values

    def check_agents(self, templates: Mapping[str, str]) -> None:
        """Refuse nodes that do not fit a team.

        Args:
            templates: user template of every agent in the team, by agent.

        Raises:
            ValueError: a node asks an agent who is not in the team, or does not fill a slot of the
                agent's template.
        """
        for name, node in self.nodes.items():
            if node.agent is None:
                continue
            if node.agent not in templates:
                raise ValueError(
                    f"graph: node '{name}' asks agent '{node.agent}', who is not in the team; "
                    f"agents: {', '.join(templates)}"
                )
            for slot in _names_in(templates[node.agent]):
                if slot not in node.slots:
                    raise ValueError(
                        f"graph: node '{name}' does not fill slot '{slot}' of agent "
                        f"'{node.agent}'; add it to the node's slots"
                    )

    def _check_templates(self) -> None:
        """Refuse a template with an unknown name."""
        known_names = self.initial_values()
        for node_name, node in self.nodes.items():
            for slot, template in node.slots.items():
                for name in _names_in(template):
                    _check_name(f"node '{node_name}', slot '{slot}'", name, known_names)
            for name in _names_in(node.action or ""):
                _check_name(f"node '{node_name}', action", name, known_names)

    def _check_conditions(self) -> None:
        """Refuse a condition with an unknown name, or that compares values of different types."""
        values = self.initial_values()
        for number, edge in enumerate(self.edges, start=1):
            if edge.when is None:
                continue
            condition = parse_condition(edge.when)
            for name in condition.names:
                _check_name(f"edge {number}", name, values)
            # The values' types do not change later, so a condition that can be evaluated now can
            # be evaluated in every wave.
            condition.holds(values)

    def _check_reachable(self) -> None:
        """Refuse a node to which no edges lead from the start."""
        reached: set[str] = set()
        pending = list(self.start)
        while pending:
            name = pending.pop()
            if name not in reached:
                reached.add(name)
                pending += [edge.target for edge in self.edges if edge.source == name]
        for name in self.nodes:
            if name not in reached:
                start = ", ".join(self.start) or "empty"
                raise ValueError(f"node '{name}' is never reached from start ({start})")

    def _check_cycles(self) -> None:
        """Refuse a cycle of edges without a condition, which only `max_steps` or the environment would end."""
        sorter = TopologicalSorter[str]()
        for edge in self.edges:
            if edge.when is None:
                sorter.add(edge.target, edge.source)
        try:
            sorter.prepare()
        except CycleError as error:
            cycle = " -> ".join(error.args[1])
            raise ValueError(
                f"the cycle {cycle} has no condition; give one of its edges a when"
            ) from error


async def graph(
    task: Task, team: TeamSession, env: Env, *, graph: Graph, max_steps: PositiveInt = 16
) -> None:
    """Play one task along `graph`, in at most `max_steps` waves of nodes.

    The first wave is the nodes in `start`. All nodes of a wave use the values from before it. First
    the agents are asked at the same time, then the actions step the environment one after the
    other, in the order of `nodes` (in the first wave, of `start`). Then the edges are taken that
    leave a node of the wave and whose condition holds. The next wave is the nodes with a taken edge
    into them; with `wait: all`, those into which all edges were taken since they last ran. The task
    ends if the environment is done or a wave is empty.

    Templates and conditions may use these names: `problem`, the result of `reset`; `history`, every
    action with its observation; `<node>`, the latest value of a node: the parsed reply ("" if it is
    malformed) or the observation of the action, and "" before the node has run; `<node>.text`, the whole
    reply, or again the observation;
    `<node>.runs`, how often the node has run. If no action was taken, the environment is stepped
    with "" at the end, which is scored as an empty reply.

    Args:
        graph: nodes, edges, and the node or nodes that run first.
        max_steps: maximum number of waves; after them the task ends.
    """
    values = graph.initial_values() | {"problem": env.reset(task)}
    wave = list(dict.fromkeys(graph.start))
    taken_edges: set[int] = set()  # indices of edges that were taken since their target last ran
    has_acted = False
    for _ in range(max_steps):
        calls = {}
        actions = {}
        for name in wave:
            node = graph.nodes[name]
            if node.agent is not None:
                slots = {slot: fill_template(text, values) for slot, text in node.slots.items()}
                calls[name] = team.act(node.agent, **slots)
            elif node.action is not None:
                actions[name] = fill_template(node.action, values)

        replies = await asyncio.gather(*calls.values())
        for name, reply in zip(calls, replies, strict=True):
            _record_run(values, name, value=reply.value or "", text=reply.text)
        for name, action in actions.items():
            step = await env.step(action)
            has_acted = True
            values["history"] = f"{values['history']}{action}\n{step.observation}\n"
            _record_run(values, name, value=step.observation, text=step.observation)
            if step.done:
                return

        taken_edges |= _edges_taken_from(wave, graph, values)
        wave = _ready_nodes(graph, taken_edges)
        taken_edges -= {index for index in taken_edges if graph.edges[index].target in wave}
        if not wave:
            break
    if not has_acted:
        await env.step("")


def _record_run(values: dict[str, str | int], name: str, *, value: str, text: str) -> None:
    """Update the values of a node that has run."""
    values[name] = value
    values[f"{name}.text"] = text
    values[f"{name}.runs"] = int(values[f"{name}.runs"]) + 1


def _edges_taken_from(wave: Sequence[str], graph: Graph, values: Mapping[str, object]) -> set[int]:
    """Return the indices of the edges that leave a node of the wave and whose condition holds."""
    taken = set()
    for index, edge in enumerate(graph.edges):
        if edge.source in wave and (edge.when is None or parse_condition(edge.when).holds(values)):
            taken.add(index)
    return taken


def _ready_nodes(graph: Graph, taken_edges: set[int]) -> list[str]:
    """Return the nodes into which enough edges were taken, in the order of the config."""
    ready = []
    for name, node in graph.nodes.items():
        incoming = {index for index, edge in enumerate(graph.edges) if edge.target == name}
        taken = incoming & taken_edges
        if taken and (node.wait == "any" or taken == incoming):
            ready.append(name)
    return ready


def fill_template(template: str, values: Mapping[str, object]) -> str:
    """Return a template with the value of every name in braces.

    Braces in a value have no meaning. `str.format` cannot be used because it would read `node.text`
    as an attribute.
    """
    text = ""
    for literal, name, _, _ in Formatter().parse(template):
        text += literal
        if name is not None:
            text += str(values[name])
    return text


def _names_in(template: str) -> list[str]:
    """Return the names in the braces of a template."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def _check_name(location: str, name: str, known_names: Iterable[str]) -> None:
    """Raise ValueError if a name is not known."""
    if name not in known_names:
        raise ValueError(f"{location}: unknown name {name!r}; known: {', '.join(known_names)}")
