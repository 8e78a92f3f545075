"""Workflow graph from the config: agents and actions as nodes, conditions on the edges, checked at the door."""

from __future__ import annotations

import ast
import asyncio
import keyword
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from rollout.base.section import StrictSection
from rollout.environments.protocol import Env
from rollout.records.trajectory import Task
from rollout.teams.team import TeamSession

GIVEN = ("problem", "history")  # what every template may use besides the nodes


def _template(text: str) -> str:
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{error}; write a brace itself as {{{{ or }}}}") from error
    if any(form or conversion for _, _, form, conversion in parts):
        raise ValueError("expected names alone between braces")
    return text


def _node_name(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name) or name in (*GIVEN, "len"):
        raise ValueError(
            f"expected a name of letters, digits and _ that is not {', '.join((*GIVEN, 'len'))}"
        )
    return name


Template = Annotated[str, AfterValidator(_template)]  # with named gaps, written {name}


class GraphNode(StrictSection):
    """An agent who is asked, with the slots of the user template; or an action that is taken in the environment."""

    agent: str | None = None
    slots: Mapping[str, Template] = Field(default_factory=dict)
    action: Template | None = None
    wait: Literal["any", "all"] = "any"  # edges into it

    @model_validator(mode="after")
    def _one_of_both(self) -> GraphNode:
        if (self.agent is None) == (self.action is None) or (
            self.action is not None and self.slots
        ):
            raise ValueError("expected either agent, with its slots, or action")
        return self


class Edge(StrictSection):
    """What may follow what."""

    source: str = Field(alias="from")
    target: str = Field(alias="to")
    when: Annotated[str, AfterValidator(lambda text: read_expression(text).text)] | None = (
        None  # null: always
    )


class Graph(StrictSection):
    """Nodes by name in the config's order, edges, and the nodes that come first.

    Raises:
        ValueError: it names what is not there, has a node that is never reached, a cycle without a condition, or no
            action.
    """

    nodes: Mapping[Annotated[str, AfterValidator(_node_name)], GraphNode] = Field(min_length=1)
    edges: Sequence[Edge] = ()
    start: Annotated[
        Sequence[str],
        BeforeValidator(
            lambda start: [start] if isinstance(start, str) else start, Sequence[str] | str
        ),
    ] = ()

    @model_validator(mode="after")
    def _playable(self) -> Graph:
        for name in self.start:
            _known("start", name, self.nodes)
        for number, edge in enumerate(self.edges, start=1):
            _known(f"edge {number}, from", edge.source, self.nodes)
            _known(f"edge {number}, to", edge.target, self.nodes)
        if not any(node.action is not None for node in self.nodes.values()):
            raise ValueError("no node has an action; something must step the environment")
        self._check_names()
        self._check_reached()
        self._check_cycles()
        return self

    def blank(self) -> dict[str, str | int]:
        """Every name that templates and conditions may use, with its value before the start."""
        values: dict[str, str | int] = dict.fromkeys(GIVEN, "")
        for name in self.nodes:
            values |= {name: "", f"{name}.text": "", f"{name}.runs": 0}
        return values

    def check_agents(self, templates: Mapping[str, str]) -> None:
        """Refuse nodes that do not fit a team.

        Args:
            templates: the user template of every agent in the team.

        Raises:
            ValueError: a node asks for an agent who is not there, or leaves a slot of the agent's template open.
        """
        for name, node in self.nodes.items():
            if node.agent is None:
                continue
            if node.agent not in templates:
                known = ", ".join(templates)
                raise ValueError(
                    f"graph: node '{name}' asks agent '{node.agent}', who is not in the team; agents: {known}"
                )
            for slot in _gaps(templates[node.agent]):
                if slot not in node.slots:
                    raise ValueError(
                        f"graph: node '{name}' leaves slot '{slot}' of agent '{node.agent}' open; add it to its slots"
                    )

    def _check_names(self) -> None:
        """Refuse a template or condition over names that are not there, or over values that cannot be compared."""
        values = self.blank()
        for name, node in self.nodes.items():
            texts = {
                **{f"slot '{slot}'": text for slot, text in node.slots.items()},
                "action": node.action or "",
            }
            for place, text in texts.items():
                for gap in _gaps(text):
                    _known(f"node '{name}', {place}", gap, values)
        for number, edge in enumerate(self.edges, start=1):
            if edge.when is not None:
                condition = read_expression(edge.when)
                for name in condition.names:
                    _known(f"edge {number}", name, values)
                condition.holds(values)

    def _check_reached(self) -> None:
        reached = list(self.start)
        for name in reached:
            reached += [
                edge.target
                for edge in self.edges
                if edge.source == name and edge.target not in reached
            ]
        for name in self.nodes:
            if name not in reached:
                raise ValueError(
                    f"node '{name}' is never reached from start ({', '.join(self.start) or 'empty'})"
                )

    def _check_cycles(self) -> None:
        """Refuse a way along unconditional edges that comes back to where it was."""
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
    """Play one task along `graph`, in at most `max_steps` waves.

    The first wave is the nodes in `start`. In a wave every node sees what there was before it: agents are asked side
    by side, then actions step the environment one after another, in the order of the nodes. Then every edge is taken
    that leaves a node of the wave and whose condition holds. The next wave is the nodes with a taken edge into them,
    or, with `wait: all`, with all edges into them taken since they ran. The end is a done environment or an empty wave.

    Templates and conditions may use `problem` (as `reset` gave it), `history` (every action with its observation) and
    of every node its latest value by its name: what the role's parser made of the reply, "" when it is malformed, or
    the action's observation; `<node>.text` is the whole reply, `<node>.runs` how often the node ran. A graph that ends
    without an action steps the environment with "", which scores it as an empty reply.

    Args:
        graph: nodes, edges and the node or nodes that come first.
        max_steps: waves, at most.
    """
    values = graph.blank() | {"problem": env.reset(task)}
    wave = list(dict.fromkeys(graph.start))
    taken: set[int] = set()
    acted = False
    for _ in range(max_steps):
        nodes = [(name, graph.nodes[name]) for name in wave]
        actions = [
            (name, fill(node.action, values)) for name, node in nodes if node.action is not None
        ]
        asked = {
            name: team.act(
                node.agent, **{slot: fill(text, values) for slot, text in node.slots.items()}
            )
            for name, node in nodes
            if node.agent is not None
        }
        for name, reply in zip(asked, await asyncio.gather(*asked.values()), strict=True):
            _note(values, name, reply.value or "", reply.text)
        for name, action in actions:
            step = await env.step(action)
            acted = True
            values["history"] = f"{values['history']}{action}\n{step.observation}\n"
            _note(values, name, step.observation, step.observation)
            if step.done:
                return
        wave = _next(graph, wave, values, taken)
        if not wave:
            break
    if not acted:
        await env.step("")


def _note(values: dict[str, str | int], name: str, value: str, text: str) -> None:
    values |= {name: value, f"{name}.text": text, f"{name}.runs": int(values[f"{name}.runs"]) + 1}


def _next(
    graph: Graph, wave: Sequence[str], values: Mapping[str, object], taken: set[int]
) -> list[str]:
    """The nodes of the next wave; edges into them are no longer in `taken`, the numbers of the edges taken so far."""
    for number, edge in enumerate(graph.edges):
        if edge.source in wave and (edge.when is None or read_expression(edge.when).holds(values)):
            taken.add(number)
    following = []
    for name, node in graph.nodes.items():
        into = {number for number, edge in enumerate(graph.edges) if edge.target == name}
        if into & taken and (node.wait == "any" or into <= taken):
            following.append(name)
            taken -= into
    return following


def fill(template: str, values: Mapping[str, object]) -> str:
    """The text with every gap filled; what fills a gap is not looked at again."""
    parts = Formatter().parse(template)
    return "".join(text + ("" if name is None else str(values[name])) for text, name, _, _ in parts)


def _gaps(template: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def _known(where: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: unknown name {name!r}; known: {', '.join(known)}")


_LIMIT = 500  # characters
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_GRAMMAR = "names, texts, numbers, comparisons, in, and, or, not, len(...)"
_Value = Callable[[Mapping[str, Any]], Any]  # of a part, given the values of names


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A condition over named values; a dotted name is one name, not an attribute."""

    text: str
    names: tuple[str, ...]
    _value: _Value

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition is true of `values`, which has all of `names`.

        Raises:
            ValueError: two values cannot be compared. As every part is evaluated, whatever the others are, this
                depends on the types of the values alone.
        """
        try:
            return bool(self._value(values))
        except TypeError as error:
            raise ValueError(f"condition '{self.text}': {error}") from error


@lru_cache(maxsize=1024)
def read_expression(text: str) -> Expression:
    """The condition that `text` writes; ValueError if it is none, or more than the grammar allows."""
    if len(text) > _LIMIT:
        raise ValueError(f"condition '{text[:20]}...': {len(text)} characters; at most {_LIMIT}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"condition '{text}': not an expression ({error})") from error
    names: list[str] = []
    value = _read(tree, text, names)
    return Expression(text, tuple(dict.fromkeys(names)), value)


def _read(node: ast.expr, text: str, names: list[str]) -> _Value:
    """What computes a part of a condition; its names are added to `names`."""

    def read(*parts: ast.expr) -> list[_Value]:
        return [_read(part, text, names) for part in parts]

    match node:
        case ast.Constant(value=str() | int() | float() as constant):  # bool is an int
            return lambda values: constant
        case ast.Name() | ast.Attribute(value=ast.Name()):
            names.append(ast.unparse(node))
            return operator.itemgetter(names[-1])
        case ast.BoolOp(op=op, values=parts):
            join, truths = all if isinstance(op, ast.And) else any, read(*parts)
            return lambda values: join([bool(truth(values)) for truth in truths])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            [denied] = read(operand)
            return lambda values: not denied(values)
        case ast.Compare(left=left, ops=ops, comparators=right) if all(
            type(op) in _COMPARISONS for op in ops
        ):
            sides, tests = read(left, *right), [_COMPARISONS[type(op)] for op in ops]

            def holds(values: Mapping[str, Any]) -> bool:
                found = [side(values) for side in sides]
                truths = [
                    test(a, b) for test, a, b in zip(tests, found[:-1], found[1:], strict=True)
                ]
                return all(truths)

            return holds
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            items = read(*parts)
            return lambda values: [item(values) for item in items]
        case ast.Call(func=ast.Name(id="len"), args=[argument], keywords=[]):
            [measured] = read(argument)
            return lambda values: len(measured(values))
    raise ValueError(
        f"condition '{text}': '{ast.unparse(node)}' is not allowed; allowed: {_GRAMMAR}"
    )
