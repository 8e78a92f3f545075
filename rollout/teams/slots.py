"""Slots of prompts: which ones a user template has, and which ones an orchestra's source fills."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from string import Formatter
from typing import Any


def template_slots(agent: str, template: str) -> list[str]:
    """The slots of an agent's user template.

    Raises:
        ValueError: it is no template, or a slot has no name.
    """
    try:
        found = [re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"agent '{agent}': its user template: {error}; write a brace itself twice") from None
    if not all(name.isidentifier() for name in found):
        raise ValueError(f"agent '{agent}': its user template has a slot without a name; write a brace itself twice")
    return found


@lru_cache(maxsize=256)
def filled_slots(orchestra: Callable[..., Any], agent: str) -> frozenset[str] | None:
    """The slots that an orchestra may fill for an agent, by the source of its module: too many rather than too few.

    Where a call names the agent and writes every slot out, these are its slots. Else it is every keyword and every text
    of the module. None where that says nothing: there is no source, or slots come from another module.
    """
    module = inspect.getmodule(inspect.unwrap(getattr(orchestra, "func", orchestra)))
    try:
        tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    own = [call for call in calls if any(isinstance(a, ast.Constant) and a.value == agent for a in call.args)]
    written = {keyword.arg for call in own for keyword in call.keywords}
    chats = any(isinstance(call.func, ast.Attribute) and call.func.attr == "chat" for call in own)  # slots come later
    if written and None not in written and not chats:
        return frozenset(name for name in written if name)
    words = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
    words |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    imported = any(isinstance(node, ast.ImportFrom) and not _ours(node) for node in nodes)
    ours = (module.__name__ if module else "").startswith("rollout.")
    return frozenset(filter(str.isidentifier, words)) if ours or not imported else None


def _ours(node: ast.ImportFrom) -> bool:
    first = (node.module or "").split(".")[0]
    return first in ("rollout", "mcore_mas") or first in sys.stdlib_module_names
