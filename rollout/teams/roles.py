"""Roles and agents: prompts with their slots and the parser of the reply, and who plays them with which policy."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from string import Formatter
from typing import Any, Literal

from pydantic import Field, model_validator

from rollout.base.section import Section
from rollout.base.text import nearest_hint
from rollout.environments.tools import ToolMaker
from rollout.records.trajectory import Message, Sampling, ToolUse

WhenFull = Literal["stop", "fold", "drop_oldest_results"]


class ChatRules(Section):
    """What an agent's chats keep to: calls of tools, and what becomes of a chat that is full."""

    when_full: WhenFull = "stop"  # a prompt leaves no room for its reply
    summariser: str | None = None  # the agent that sums up, of when_full: fold
    calls_per_turn: int = Field(8, ge=1)  # of tools
    calls: int = Field(64, ge=1)  # of tools, in a trajectory
    call_s: float = Field(30.0, gt=0)  # of a call; one that takes longer has failed
    result_chars: int = Field(4000, ge=2)  # shown of a result

    @model_validator(mode="after")
    def _folds(self) -> ChatRules:
        if (self.when_full == "fold") != (self.summariser is not None):
            raise ValueError(
                "when_full: fold and summariser, the agent that sums up, come together"
            )
        return self


Parser = Callable[[str], str | None]  # reply text -> its value, None when the reply is malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A system prompt, a user template with named slots, and the parser of the reply."""

    name: str
    system: str
    user: str  # str.format template; the orchestra fills the slots
    parse: Parser

    def messages(self, **slots: object) -> tuple[Message, ...]:
        """The conversation up to the reply: the system prompt, when there is one, and the filled user template.

        Raises:
            KeyError: the template has a slot that was not given.
        """
        texts = (("system", self.system), ("user", self.user.format(**slots)))
        return tuple([Message(role=role, content=content) for role, content in texts if content])


ROLES: dict[str, Role] = {}


def register_agent(name: str, *, system: str, user: str) -> Callable[[Parser], Parser]:
    """Register the decorated parser, with its prompts, as the role `name`.

    Raises:
        ValueError: the name is taken.
    """

    def register(parse: Parser) -> Parser:
        if name in ROLES:
            raise ValueError(f"agent role '{name}' is registered twice")
        ROLES[name] = Role(name=name, system=system, user=user, parse=parse)
        return parse

    return register


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A role with its sampling and the policy it plays."""

    name: str
    role: Role
    policy: str
    sampling: Sampling  # stop and seed are filled in per call
    chats: ChatRules = field(default_factory=ChatRules)
    tools: Mapping[str, ToolMaker] = field(
        default_factory=dict
    )  # by name, opened for each trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """What an agent said."""

    text: str
    value: str | None  # the parser's result, None when the reply is malformed
    turn: int  # index of the turn
    message: Message | None = None  # as a chat remembers it
    problems: Mapping[str, str] = field(default_factory=dict)  # of calls that cannot be read, by id

    @property
    def calls(self) -> tuple[ToolUse, ...]:
        """The tools that it calls, in their order."""
        return self.message.calls if self.message else ()


def template_slots(agent: str, template: str) -> list[str]:
    """The slots of an agent's user template; ValueError if it is no template, or a slot has no name."""
    try:
        found = [
            re.split(r"[.\[]", name)[0]
            for _, name, _, _ in Formatter().parse(template)
            if name is not None
        ]
    except ValueError as error:
        raise ValueError(
            f"agent '{agent}': its user template: {error}; write a brace itself twice"
        ) from None
    if not all(name.isidentifier() for name in found):
        raise ValueError(
            f"agent '{agent}': its user template has a slot without a name; write a brace itself twice"
        )
    return found


@lru_cache(maxsize=256)
def filled_slots(orchestra: Callable[..., Any], agent: str) -> frozenset[str] | None:
    """The slots that an orchestra may fill for an agent, by the source of its module: too many rather than too few.

    Where a call names the agent and writes every slot out, these are its slots. Else it is every keyword and every text
    of the module. None where that says nothing: there is no source, or slots come from another module or a `**`.
    """
    module = inspect.getmodule(inspect.unwrap(getattr(orchestra, "func", orchestra)))
    try:
        tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    own = [
        call
        for call in calls
        if any(isinstance(a, ast.Constant) and a.value == agent for a in call.args)
        and getattr(call.func, "attr", getattr(call.func, "id", ""))
        not in ("register_agent", "AgentSpec")
    ]
    written = {keyword.arg for call in own for keyword in call.keywords}
    chats = any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "chat" for call in own
    )  # slots come later
    if written and None not in written and not chats:
        return frozenset(name for name in written if name)
    words = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    words |= {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    imported = {
        (node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)
    }
    elsewhere = not imported <= {"mcore_mas", "rollout", "retrieval", *sys.stdlib_module_names}
    elsewhere |= any(
        k.arg is None and not isinstance(k.value, ast.Dict) for call in calls for k in call.keywords
    )
    ours = (module.__name__ if module else "").startswith("rollout.")
    return frozenset(filter(str.isidentifier, words)) if ours or not elsewhere else None


@lru_cache(maxsize=256)
def asked_agents(orchestra: Callable[..., Any]) -> frozenset[str]:
    """The agents that an orchestra asks by name whatever happens: those outside `if` and the like in its source."""
    if (tree := _definition(orchestra)) is None:
        return frozenset()
    found: set[str] = set()
    nodes = [*ast.iter_child_nodes(tree)]
    while nodes:
        match nodes.pop():
            case ast.If() | ast.IfExp() | ast.BoolOp() | ast.Try() | ast.Match() | ast.While():
                continue
            case ast.Lambda() | ast.FunctionDef() | ast.AsyncFunctionDef():  # which nobody may call
                continue
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="team"), attr="act" | "chat"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
            case node:
                nodes += ast.iter_child_nodes(node)
    return frozenset(found)


@lru_cache(maxsize=256)
def misused(function: Callable[..., Any], *kinds: type) -> str:
    """What a function, by its source, asks of its first parameters in vain, "" if nothing: `kinds` are their classes.

    That is an attribute that the class lacks, or a coroutine that is not awaited. Nothing is said of a decorated
    function, and of a parameter that is bound again, also in a nested function.
    """
    tree = _definition(function)
    if tree is None or tree.decorator_list:
        return ""
    nodes = list(ast.walk(tree))
    bound: Counter[str | None] = Counter()
    for node in nodes:
        if not isinstance(node, ast.keyword) and isinstance(
            getattr(node, "ctx", ast.Store()), ast.Store | ast.Del
        ):
            bound.update(getattr(node, field, None) for field in ("id", "arg", "name", "asname"))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    names = [parameter.arg for parameter in (*tree.args.posonlyargs, *tree.args.args)]
    for name, kind in zip(names, kinds, strict=False):
        asked = [
            a
            for a in attributes
            if isinstance(a.value, ast.Name) and a.value.id == name and bound[name] == 1
        ]
        if trouble := _lacking(nodes, name, asked, kind) or _not_awaited(
            nodes, name, asked, kind, bound
        ):
            return trouble
    return ""


def _lacking(
    nodes: Sequence[ast.AST], name: str, asked: Sequence[ast.Attribute], kind: type
) -> str:
    """The first attribute that `kind` lacks; one that is set here, or named in a text as in `hasattr`, may be there."""
    known = {*dir(kind), *kind.__init__.__code__.co_names}  # type: ignore[misc]  # and what __init__ sets
    known |= {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    known |= {node.attr for node in asked if not isinstance(node.ctx, ast.Load)}
    for node in asked:
        if node.attr not in known:
            public = [one for one in dir(kind) if not one.startswith("_")]
            return f"{name}.{node.attr}: {kind.__name__} has no '{node.attr}'{nearest_hint(node.attr, public)}"
    return ""


def _not_awaited(
    nodes: Sequence[ast.AST],
    name: str,
    asked: Sequence[ast.Attribute],
    kind: type,
    bound: Mapping[str | None, int],
) -> str:
    """The first call of a coroutine that is dropped, or kept under a name and asked for an attribute as if awaited."""
    read = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    for node in nodes:
        if not (isinstance(node, ast.Assign | ast.Expr) and isinstance(node.value, ast.Call)):
            continue
        method = node.value.func
        if method in asked and inspect.iscoroutinefunction(getattr(kind, method.attr, None)):  # type: ignore[attr-defined]
            kept = [
                target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)
            ]
            if isinstance(node, ast.Expr) or any(one in read and bound[one] == 1 for one in kept):
                return f"write await before {ast.unparse(node.value)}"
    return ""


def _definition(function: Callable[..., Any]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A function as its source defines it; None where there is none, as of a lambda or an object."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) else None
