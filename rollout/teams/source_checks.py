"""Checks of an orchestra's source before a run starts.

They find the agents that an orchestra asks, the slots of their user templates that it fills, and
misuse of its parameters.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

from rollout.base.hints import nearest_hint

_OWN_PACKAGES = frozenset({"mcore_mas", "rollout", "retrieval"})
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_COROUTINE_ATTRIBUTES = frozenset(dir(types.CoroutineType))  # such as `close`
_BRACE_ADVICE = "write a brace that is text as {{ or }}"


def template_slots(agent: str, template: str) -> list[str]:
    """Return the slots of an agent's user template, including those in format specifications.

    Raises:
        ValueError: the text is not a template, or a slot has no name.
    """
    try:
        fields = _field_names(template)
    except ValueError as error:
        raise ValueError(f"agent '{agent}': its user template: {error}; {_BRACE_ADVICE}") from None
    # `str.format` also takes attributes and items of a slot: {task.id}, {task[id]}.
    slots = [re.split(r"[.\[]", name)[0] for name in fields]
    if not all(slot.isidentifier() for slot in slots):
        raise ValueError(
            f"agent '{agent}': its user template has a slot without a name; {_BRACE_ADVICE}"
        )
    return slots


def _field_names(template: str) -> list[str]:
    """Return the names of a template's fields; those of `{number:{width}}` are `number` and `width`."""
    names = []
    for _, name, format_spec, _ in Formatter().parse(template):
        if name is not None:
            names += [name, *_field_names(format_spec or "")]
    return names


@lru_cache(maxsize=256)
def filled_slots(orchestra: Callable[..., Any], agent: str) -> frozenset[str] | None:
    """Return the slots that an orchestra may fill for an agent, according to the source of its module.

    If the module asks the agent only by `act` with keyword arguments, as in
    `team.act("writer", problem=...)`, these are the keyword arguments of the calls. Otherwise they are
    all keyword arguments and string literals of the module: too many rather than too few.

    Returns:
        None if the source is missing, or the orchestra may have decorators. In the second case above, also
        None if a user's module has a call with `**`, or imports modules that may fill slots. Modules of
        `rollout` are known not to fill slots in these ways.
    """
    nodes = _module_nodes(orchestra)
    if nodes is None:
        return None
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    is_built_in = orchestra.__module__.startswith("rollout.")

    slots = _slots_of_acts(calls, agent, is_built_in)
    if slots:
        return slots

    words = {name for name in _keyword_names(calls) if name}
    words |= _string_literals(nodes)
    if not is_built_in and _slots_may_come_from_elsewhere(nodes, calls):
        return None
    return frozenset(filter(str.isidentifier, words))


def _slots_of_acts(
    calls: Sequence[ast.Call], agent: str, is_built_in: bool
) -> frozenset[str] | None:
    """Return the keyword arguments of all `act` calls that may ask an agent.

    In a module of `rollout`, the keyword arguments of helper functions that are called with the
    agent's name are among them.

    Args:
        calls: calls of the orchestra's module.
        agent: name of the agent.
        is_built_in: True if the module is part of `rollout`.

    Returns:
        None if no call has the agent's name as a literal positional argument; if such a call opens a
        chat or, in a user's module, is another call than `act`; or if one of the calls passes `**`.
    """
    agent_calls = [call for call in calls if _names_agent(call, agent)]
    for call in agent_calls:
        method = _method_name(call)
        if method == "chat":
            return None  # the slots come with a later call, which does not name the agent
        # A helper function may have keyword arguments that are no slots, and may fill slots that are
        # not among them. Only the helpers of built-in orchestras are known to do neither.
        if method != "act" and not is_built_in:
            return None
    if not agent_calls:
        return None

    # A name that is not a literal may be that of this agent.
    acts_by_variable = [
        call
        for call in calls
        if _method_name(call) == "act" and call.args and not isinstance(call.args[0], ast.Constant)
    ]
    keywords = _keyword_names([*agent_calls, *acts_by_variable])
    if None in keywords:
        return None
    return frozenset(name for name in keywords if name)


def _method_name(call: ast.Call) -> str:
    """Return the name of the method that a call calls, or "" if it calls something else."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


@lru_cache(maxsize=256)
def chat_agents(orchestra: Callable[..., Any]) -> frozenset[str] | None:
    """Return the agents with which an orchestra may open chats, according to the source of its module.

    Returns:
        None if the source does not show them: it is missing, the orchestra may have decorators, its
        second parameter is not called `team`, a chat is opened with an agent whose name is not a string
        literal, or the module may hand the team to code of other modules.
    """
    return _named_agents(orchestra, ("chat",))


@lru_cache(maxsize=256)
def possible_agents(orchestra: Callable[..., Any]) -> frozenset[str] | None:
    """Return all agents that an orchestra may ask, according to the source of its module.

    Returns:
        None if the source does not show them: it is missing, the orchestra may have decorators, its
        second parameter is not called `team`, it asks an agent whose name is not a string literal, or
        the module may hand the team to code of other modules.
    """
    return _named_agents(orchestra, ("act", "chat", "take_turn"))


def _named_agents(orchestra: Callable[..., Any], methods: Collection[str]) -> frozenset[str] | None:
    """Return the string literals that are the first argument of methods in the module of an orchestra.

    Args:
        orchestra: function whose second parameter must be `team`.
        methods: names of the methods. Methods of all objects count, not only those of the team.

    Returns:
        None if the source does not show them all.
    """
    nodes = _module_nodes(orchestra)
    definition = _definition(orchestra)
    if nodes is None or definition is None:
        return None
    parameters = [parameter.arg for parameter in definition.args.args]
    if parameters[1:2] != ["team"]:
        return None

    functions = {
        node.name: node
        for node in nodes
        if isinstance(node, _FunctionNode) and not node.decorator_list
    }
    agents: set[str] = set()
    # Methods in the calls whose agent is a string literal.
    understood_methods: set[ast.expr] = set()
    # Names that do not hand the team to other modules: `team` before an attribute, and as an
    # argument of a function of this module whose parameter is also called `team`.
    local_uses: set[ast.expr] = set()
    for node in nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(attr=name) as method, args=[ast.Constant(value=str(agent)), *_]
            ) if name in methods:
                agents.add(agent)
                understood_methods.add(method)
            case ast.Call(func=ast.Name(id=name)) as call if name in functions:
                local_uses.update(_team_arguments(call, functions[name]))
            case ast.Attribute(value=ast.Name(id="team") as team):
                local_uses.add(team)

    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if name in methods and node not in understood_methods:
                return None
            case ast.Name(id="team") if node not in local_uses:
                return None
    return frozenset(agents)


def _team_arguments(call: ast.Call, function: _FunctionNode) -> list[ast.expr]:
    """Return the arguments that a call of a function passes as its parameter `team`."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    arguments = []
    for parameter, argument in zip(parameters, call.args, strict=False):
        if parameter.arg == "team":
            arguments.append(argument)
    for keyword in call.keywords:
        if keyword.arg == "team":
            arguments.append(keyword.value)
    return arguments


def _module_nodes(orchestra: Callable[..., Any]) -> list[ast.AST] | None:
    """Return the syntax nodes of an orchestra's module.

    Returns:
        None if `_definition` returns None, the module has no source, or the orchestra is not compiled
        from the module's file (see `_is_compiled_from`).
    """
    if _definition(orchestra) is None:
        return None
    module = inspect.getmodule(orchestra)
    try:
        if not _is_compiled_from(orchestra, inspect.getfile(module)):  # type: ignore[arg-type]
            return None
        tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
    return list(ast.walk(tree))


def _keyword_names(calls: Sequence[ast.Call]) -> set[str | None]:
    """Return the names of the keywords in calls; None stands for the keywords of a `**`."""
    names: set[str | None] = set()
    for call in calls:
        names.update(keyword.arg for keyword in call.keywords)
    return names


def _is_compiled_from(function: Callable[..., Any], file: str) -> bool:
    """Return True if a function was compiled from a file.

    A function that `exec` has defined has the module that called `exec` as its module, but its source
    is not in that module's file.
    """
    return Path(function.__code__.co_filename).resolve() == Path(file).resolve()


def _names_agent(call: ast.Call, agent: str) -> bool:
    """Return True if a call has the agent's name as a positional argument, and does not define the agent."""
    function_name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if function_name in ("register_agent", "AgentSpec"):
        return False
    return any(
        isinstance(argument, ast.Constant) and argument.value == agent for argument in call.args
    )


def _slots_may_come_from_elsewhere(nodes: Sequence[ast.AST], calls: Sequence[ast.Call]) -> bool:
    """Return True if slots may come from an imported module, or from the `**` of a call.

    The modules of Python and of `_OWN_PACKAGES` are taken to fill no slots.
    """
    imported: set[str] = set()  # top-level packages
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            if node.module is None or node.level > 0:
                return True  # a relative import; its module may have the name of one of Python's
            imported.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
    if not imported <= _OWN_PACKAGES | sys.stdlib_module_names:
        return True
    return None in _keyword_names(calls)


def _string_literals(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the values of all string literals among syntax nodes."""
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@lru_cache(maxsize=256)
def required_agents(orchestra: Callable[..., Any]) -> frozenset[str]:
    """Return the agents that an orchestra asks unconditionally, and so needs in its team.

    Only calls of the parameter `team` with the name as a string literal are found, as in
    `team.act("writer")`. Calls in `if`, `while`, `try`, `match`, `and`, `or`, conditional expressions
    and inner functions are left out, and those in comprehensions with `if`, except in their first
    iterable. Calls in the `else` of a `for`, and after a statement that contains `return`, `break` or
    `continue`, are left out too. A `for` is taken to run at least once.

    The result is empty if the orchestra may have decorators, its second parameter is not called `team`,
    or it assigns `team` again.
    """
    definition = _definition(orchestra)
    if definition is None:
        return frozenset()
    all_nodes = list(ast.walk(definition))
    parameters = [parameter.arg for parameter in definition.args.args]
    if parameters[1:2] != ["team"] or _count_bindings(all_nodes)["team"] != 1:
        return frozenset()
    # Statements in the `else` of a `for`, and after a statement that may leave their block.
    skippable: set[ast.AST] = set()
    for node in all_nodes:
        if isinstance(node, ast.For | ast.AsyncFor):
            skippable.update(node.orelse)
    for statement, later_statements in _later_statements(all_nodes).items():
        parts = ast.walk(statement)
        if any(isinstance(part, ast.Return | ast.Break | ast.Continue) for part in parts):
            skippable.update(later_statements)

    agents: set[str] = set()
    nodes = [*ast.iter_child_nodes(definition)]
    while nodes:
        match nodes.pop():
            case node if node in skippable:
                continue
            case ast.If() | ast.IfExp() | ast.BoolOp() | ast.Match() | ast.While():
                continue
            case ast.Try() | ast.TryStar():
                continue
            case (
                ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp()
            ) as comprehension if any(loop.ifs for loop in comprehension.generators):
                nodes.append(comprehension.generators[0].iter)  # is evaluated in any case
            case ast.Lambda() | ast.FunctionDef() | ast.AsyncFunctionDef():  # may never be called
                continue
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id="team"), attr="act" | "chat"),
                    args=[ast.Constant(value=str(name)), *_],
                ) as call
            ):
                agents.add(name)
                nodes += ast.iter_child_nodes(call)  # an argument may be the reply of another agent
            case node:
                nodes += ast.iter_child_nodes(node)
    return frozenset(agents)


@lru_cache(maxsize=256)
def describe_misuse(function: Callable[..., Any], *classes: type) -> str:
    """Describe the first misuse of a function's first parameters; return "" if there is none.

    A misuse is an attribute that the parameter's class lacks, or a coroutine that is not awaited. A
    function that may have decorators is not checked, nor a parameter that is assigned again.

    Args:
        classes: classes of the first parameters.
    """
    definition = _definition(function)
    if definition is None:
        return ""
    nodes = list(ast.walk(definition))
    bindings = _count_bindings(nodes)
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    arguments = definition.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    for name, class_ in zip(names, classes, strict=False):
        accesses = [
            node
            for node in attributes
            if isinstance(node.value, ast.Name) and node.value.id == name and bindings[name] == 1
        ]
        misuse = _missing_attribute(nodes, name, accesses, class_)
        misuse = misuse or _missing_await(nodes, accesses, class_, bindings)
        if misuse:
            return misuse
    return ""


def _count_bindings(nodes: Sequence[ast.AST]) -> Counter[str]:
    """Count how often each name is bound: as a parameter, a variable, a function or an import.

    An import is counted by the name after `import`, and also by the name after `as`. `import a.b`
    counts "a.b", and not "a".
    """
    bindings: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            continue  # reads a variable
        if isinstance(node, ast.keyword):
            continue  # names a parameter of the called function
        for field in ("id", "arg", "name", "asname"):  # fields of nodes that hold a bound name
            name = getattr(node, field, None)
            if name is not None:
                bindings[name] += 1
    return bindings


def _missing_attribute(
    nodes: Sequence[ast.AST], name: str, accesses: Sequence[ast.Attribute], class_: type
) -> str:
    """Describe the first accessed attribute that `class_` lacks; return "" if there is none.

    An attribute counts as existing if the function sets it, or if its name is a string literal of the
    function, as for `hasattr`.
    """
    # Attributes that __init__ sets are not in dir(), but in the co_names of its code.
    existing = {*dir(class_), *class_.__init__.__code__.co_names}  # type: ignore[misc]
    existing |= _string_literals(nodes)
    existing |= {node.attr for node in accesses if not isinstance(node.ctx, ast.Load)}
    for node in accesses:
        if node.attr not in existing:
            public = [attribute for attribute in dir(class_) if not attribute.startswith("_")]
            return (
                f"{name}.{node.attr}: {class_.__name__} has no '{node.attr}'"
                f"{nearest_hint(node.attr, public)}"
            )
    return ""


def _missing_await(
    nodes: Sequence[ast.AST],
    accesses: Sequence[ast.Attribute],
    class_: type,
    bindings: Mapping[str, int],
) -> str:
    """Describe the first coroutine that is dropped, or used as if it had been awaited.

    Only statements such as `team.act(...)` and `reply = team.act(...)` are examined.

    Args:
        nodes: all nodes of the function.
        accesses: attributes of the checked parameter.
        class_: class of the checked parameter.
        bindings: number of times that each name is bound.

    Returns:
        The advice to await the call; "" if there is no such coroutine.
    """
    used_as_results = {
        expression.id
        for expression in _expressions_used_as_results(nodes)
        if isinstance(expression, ast.Name)
    }
    later_statements = _later_statements(nodes)
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
            continue
        if not isinstance(node.value, ast.Call):
            continue
        method = node.value.func
        if not isinstance(method, ast.Attribute) or method not in accesses:
            continue
        if not inspect.iscoroutinefunction(getattr(class_, method.attr, None)):
            continue
        is_misused = isinstance(node, ast.Expr)  # the coroutine is dropped
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            if bindings[name] == 1:
                is_misused |= name in used_as_results
            else:
                is_misused |= _is_taken_for_result(name, later_statements.get(node, ()))
        if is_misused:
            return f"write await before {ast.unparse(node.value)}"
    return ""


def _expressions_used_as_results(nodes: Sequence[ast.AST]) -> list[ast.expr]:
    """Return the expressions that cannot be coroutines, because coroutines lack an attribute that is used."""
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr not in _COROUTINE_ATTRIBUTES
    ]


def _later_statements(nodes: Sequence[ast.AST]) -> dict[ast.stmt, list[ast.stmt]]:
    """Return the statements that follow each statement in its block."""
    later: dict[ast.stmt, list[ast.stmt]] = {}
    for node in nodes:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                later.update({statement: block[i + 1 :] for i, statement in enumerate(block)})
    return later


def _is_taken_for_result(name: str, statements: Sequence[ast.stmt]) -> bool:
    """Return True if the first statement in which the variable `name` occurs takes it for a result, or overwrites it.

    A statement takes it for a result by using an attribute that a coroutine lacks. A variable that
    holds a coroutine must be awaited, or passed on, before either. Of a compound statement, only the
    condition of `if` and `while` is known to be executed. If the variable is elsewhere in it, return
    False.
    """
    for statement in statements:
        executed: ast.AST | None = statement
        if isinstance(statement, ast.Match) or hasattr(statement, "body"):
            executed = getattr(statement, "test", None)
        parts = [] if executed is None else list(ast.walk(executed))
        uses = [node for node in parts if isinstance(node, ast.Name) and node.id == name]
        if uses:
            used_as_results = _expressions_used_as_results(parts)
            is_read = any(isinstance(use.ctx, ast.Load) for use in uses)
            return not is_read or any(use in used_as_results for use in uses)
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
            return False
    return False


def _definition(function: Callable[..., Any]) -> _FunctionNode | None:
    """Return the syntax tree of a function.

    Returns:
        None if it is not a function that `def` defines in a source file, or if it may have decorators,
        which may call it with other arguments. A wrapper that a decorator returns has `__wrapped__`,
        or the function in its closure.
    """
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__") or function.__closure__:
        return None
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, _FunctionNode) or definition.decorator_list:
        return None
    return definition
