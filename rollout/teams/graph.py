"""Workflow graphs of agents and actions from a config, with conditions on edges, checked before anything runs."""

from __future__ import annotations

import ast
import keyword
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

GIVEN = ("problem", "history")  # what every template may use besides the nodes
_NODE_KEYS = ("agent", "slots", "action", "wait")
_EDGE_KEYS = ("from", "to", "when")
_WAITS = ("any", "all")


class GraphError(ValueError):
    """A graph that cannot be played: one line that says where and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A text with named gaps, written {name}."""

    pieces: tuple[tuple[str, str | None], ...]  # literal text and the name that follows it

    @property
    def names(self) -> tuple[str, ...]:
        """The gaps, in their order."""
        return tuple(name for _, name in self.pieces if name is not None)

    def fill(self, values: Mapping[str, object]) -> str:
        """The text with every gap filled; what fills a gap is not looked at again."""
        return "".join(text + ("" if name is None else str(values[name])) for text, name in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """An agent who is asked, or an action that is taken in the environment."""

    name: str
    agent: str | None
    slots: Mapping[str, Template]  # of the agent's user template
    action: Template | None
    wait: str  # for "any" edge into it, or for "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What may follow what."""

    source: str
    target: str
    when: Expression | None  # None: always


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes by name in the config's order, edges, and the nodes that come first."""

    nodes: Mapping[str, GraphNode]
    edges: tuple[Edge, ...]
    start: tuple[str, ...]

    def blank(self) -> dict[str, str | int]:
        """Every name that templates and conditions may use, with its value before the start."""
        values: dict[str, str | int] = dict.fromkeys(GIVEN, "")
        for name in self.nodes:
            values |= {name: "", f"{name}.text": "", f"{name}.runs": 0}
        return values


def read_graph(config: Any) -> Graph:
    """The graph that a config writes.

    Raises:
        GraphError: it is malformed, names what is not there, has a node that is never reached, a cycle without a
            condition, or no action.
    """
    _check_keys("graph", config, ("nodes", "edges", "start"))
    raw = config.get("nodes")
    if not isinstance(raw, Mapping) or not raw:
        raise GraphError("graph: nodes is missing; expected a mapping from names to nodes")
    graph = Graph(
        nodes={name: _node(name, value) for name, value in raw.items()},
        edges=tuple(_edge(number, value, raw) for number, value in enumerate(_list("edges", config.get("edges", ())))),
        start=tuple(_known("start", name, raw) for name in _list("start", config.get("start", ()))),
    )
    if not any(node.action for node in graph.nodes.values()):
        raise GraphError("graph: no node has an action; something must step the environment")
    _check_names(graph)
    _check_reached(graph)
    _check_cycles(graph)
    return graph


def check_agents(graph: Graph, templates: Mapping[str, str]) -> None:
    """Refuse nodes that do not fit a team.

    Args:
        templates: the user template of every agent in the team.

    Raises:
        GraphError: a node asks for an agent who is not there, or leaves a slot of the agent's template open.
    """
    for node in graph.nodes.values():
        if node.agent is None:
            continue
        if node.agent not in templates:
            raise GraphError(
                f"graph: node '{node.name}' asks agent '{node.agent}', who is not in the team; "
                f"agents: {', '.join(templates)}"
            )
        for _, slot, _, _ in Formatter().parse(templates[node.agent]):
            if slot is not None and slot not in node.slots:
                raise GraphError(
                    f"graph: node '{node.name}' leaves slot '{slot}' of agent '{node.agent}' open; add it to its slots"
                )


def _node(name: Any, config: Any) -> GraphNode:
    where = f"graph: node '{name}'"
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name in (*GIVEN, "len"):
        raise GraphError(f"{where}: expected a name of letters, digits and _ that is not {', '.join((*GIVEN, 'len'))}")
    _check_keys(where, config, _NODE_KEYS)
    agent, action, wait = config.get("agent"), config.get("action"), config.get("wait", "any")
    if (agent is None) == (action is None) or (action is not None and "slots" in config):
        raise GraphError(f"{where}: expected either agent, with its slots, or action")
    if agent is not None and not isinstance(agent, str):
        raise GraphError(f"{where}: agent is {agent!r}; expected a name")
    if wait not in _WAITS:
        raise GraphError(f"{where}: wait is {wait!r}; expected any or all")
    slots = config.get("slots", {})
    if not isinstance(slots, Mapping) or not all(isinstance(slot, str) for slot in slots):
        raise GraphError(f"{where}: slots is {slots!r}; expected a mapping from slots to templates")
    return GraphNode(
        name=name,
        agent=agent,
        slots={slot: _template(f"{where}, slot '{slot}'", text) for slot, text in slots.items()},
        action=None if action is None else _template(f"{where}, action", action),
        wait=wait,
    )


def _template(where: str, text: Any) -> Template:
    if not isinstance(text, str):
        raise GraphError(f"{where}: {text!r} is no text; put it in quotes")
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise GraphError(f"{where}: {error}; write a brace itself as {{{{ or }}}}") from error
    if any(form or conversion for _, _, form, conversion in parts):
        raise GraphError(f"{where}: expected names alone between braces")
    return Template(pieces=tuple((literal, name) for literal, name, _, _ in parts))


def _edge(number: int, config: Any, nodes: Mapping[str, Any]) -> Edge:
    where = f"graph: edge {number + 1}"
    _check_keys(where, config, _EDGE_KEYS)
    source, target = (_known(f"edge {number + 1}, {end}", config.get(end), nodes) for end in ("from", "to"))
    when = config.get("when")
    if when is not None and not isinstance(when, str):
        raise GraphError(f"{where}: when is {when!r}; expected a condition in quotes")
    try:
        return Edge(source=source, target=target, when=None if when is None else read_expression(when))
    except ExpressionError as error:
        raise GraphError(f"{where}: {error}") from error


def _check_names(graph: Graph) -> None:
    """Refuse a template or condition over names that are not there, or over values that cannot be compared."""
    values = graph.blank()
    for node in graph.nodes.values():
        texts = {f"slot '{slot}'": template for slot, template in node.slots.items()}
        if node.action is not None:
            texts["action"] = node.action
        for place, template in texts.items():
            for name in template.names:
                _known(f"node '{node.name}', {place}", name, values)
    for number, edge in enumerate(graph.edges, start=1):
        if edge.when is not None:
            for name in edge.when.names:
                _known(f"edge {number}", name, values)
            try:
                edge.when.holds(values)
            except ExpressionError as error:
                raise GraphError(f"graph: edge {number}: {error}") from error


def _check_reached(graph: Graph) -> None:
    reached = list(graph.start)
    for name in reached:
        reached += [edge.target for edge in graph.edges if edge.source == name and edge.target not in reached]
    for name in graph.nodes:
        if name not in reached:
            raise GraphError(f"graph: node '{name}' is never reached from start ({', '.join(graph.start) or 'empty'})")


def _check_cycles(graph: Graph) -> None:
    """Refuse a way along unconditional edges that comes back to where it was."""
    always = [(edge.source, edge.target) for edge in graph.edges if edge.when is None]

    def follow(path: tuple[str, ...], free: set[str]) -> None:
        for source, target in always:
            if source == path[-1] and target in path:
                cycle = " -> ".join((*path[path.index(target) :], target))
                raise GraphError(f"graph: the cycle {cycle} has no condition; give one of its edges a when")
            if source == path[-1] and target not in free:
                follow((*path, target), free)
        free.add(path[-1])

    free: set[str] = set()  # nodes from which no such way leads back
    for name in graph.nodes:
        if name not in free:
            follow((name,), free)


def _check_keys(where: str, config: Any, known: Iterable[str]) -> None:
    if not isinstance(config, Mapping):
        raise GraphError(f"{where}: got {config!r}; expected a mapping with {', '.join(known)}")
    for key in config:
        if key not in known:
            raise GraphError(f"{where}: unknown key '{key}'; known: {', '.join(known)}")


def _list(where: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise GraphError(f"graph: {where} is {value!r}; expected a list")
    return list(value)


def _known(where: str, name: Any, known: Iterable[str]) -> str:
    if not isinstance(name, str) or name not in known:
        raise GraphError(f"graph: {where}: unknown name {name!r}; known: {', '.join(known)}")
    return name


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


class ExpressionError(ValueError):
    """A condition that cannot be used: says which, and what in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """A condition over named values; a dotted name is one name, not an attribute."""

    text: str
    names: tuple[str, ...]
    _tree: ast.expr

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition is true of `values`, which has all of `names`.

        Raises:
            ExpressionError: two values cannot be compared. As every part is evaluated, whatever the others are, this
                depends on the types of the values alone.
        """
        try:
            return bool(_value(self._tree, values))
        except TypeError as error:
            raise ExpressionError(f"condition '{self.text}': {error}") from error


def read_expression(text: str) -> Expression:
    """The condition that `text` writes.

    Raises:
        ExpressionError: it is no expression, or more than the grammar allows.
    """
    if len(text) > _LIMIT:
        raise ExpressionError(f"condition '{text[:20]}...': {len(text)} characters; at most {_LIMIT}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"condition '{text}': not an expression ({error})") from error
    names: list[str] = []
    _check(tree, text, names)
    return Expression(text, tuple(dict.fromkeys(names)), tree)


def _check(node: ast.expr, text: str, names: list[str]) -> None:
    """Refuse what is not in the grammar, and write down the names."""
    match node:
        case ast.Constant(value=str() | int() | float()):  # bool is an int
            parts: list[ast.expr] = []
        case ast.Name() | ast.Attribute(value=ast.Name()):
            names.append(ast.unparse(node))
            return
        case ast.BoolOp(values=values):
            parts = values
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            parts = [operand]
        case ast.Compare(left=left, ops=ops, comparators=right) if all(type(op) in _COMPARISONS for op in ops):
            parts = [left, *right]
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            pass
        case ast.Call(func=ast.Name(id="len"), args=[argument], keywords=[]):
            parts = [argument]
        case _:
            raise ExpressionError(f"condition '{text}': '{ast.unparse(node)}' is not allowed; allowed: {_GRAMMAR}")
    for part in parts:
        _check(part, text, names)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.BoolOp(op=op, values=parts):
            truths = [bool(_value(part, values)) for part in parts]
            return all(truths) if isinstance(op, ast.And) else any(truths)
        case ast.UnaryOp(operand=operand):
            return not _value(operand, values)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [_value(side, values) for side in (left, *comparators)]
            triples = zip(ops, sides[:-1], sides[1:], strict=True)
            truths = [_COMPARISONS[type(op)](a, b) for op, a, b in triples]
            return all(truths)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_value(part, values) for part in parts]
        case ast.Call(args=[argument]):
            return len(_value(argument, values))
    return values[ast.unparse(node)]
