"""Conditions of a graph's edges: comparisons of named values, in a small part of Python's grammar.

`parse_condition` reads a condition, and `Condition.holds` evaluates it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

_MAX_CHARS = 500
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
_GRAMMAR = "names, texts, numbers, lists, tuples, comparisons, in, and, or, not, len(...)"
_Evaluate = Callable[[Mapping[str, Any]], Any]  # values by name -> value of a part of a condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on named values.

    A dotted name, for example `draft.text`, is the name of one value and reads no attribute.
    """

    text: str
    names: tuple[str, ...]  # names in the condition, each once
    evaluate: _Evaluate

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return True if the condition is true of `values`, which must have all of `names`.

        Every part is evaluated, even if the result is already known. Therefore only the types of
        the values decide whether evaluating the condition raises an error.

        Raises:
            ValueError: two values are of types that cannot be compared.
        """
        try:
            return bool(self.evaluate(values))
        except TypeError as error:
            raise ValueError(f"condition '{self.text}': {error}") from error


@lru_cache(maxsize=1024)
def parse_condition(text: str) -> Condition:
    """Return the condition that a text states.

    Raises:
        ValueError: the text is not an expression, is too long, or uses more of Python than the
            grammar of conditions allows.
    """
    if len(text) > _MAX_CHARS:
        raise ValueError(
            f"condition '{text[:20]}...': it has {len(text)} characters; at most {_MAX_CHARS}"
        )
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"condition '{text}': not an expression ({error})") from error
    compiler = _Compiler(text)
    evaluate = compiler.compile(expression)
    return Condition(text=text, names=tuple(dict.fromkeys(compiler.names)), evaluate=evaluate)


class _Compiler:
    """Compiler of the parts of one condition into functions.

    Attributes:
        names: names in the compiled parts, in the order of the text.
    """

    def __init__(self, text: str) -> None:
        self.names: list[str] = []
        self._text = text  # of the whole condition, for errors

    def compile(self, node: ast.expr) -> _Evaluate:
        """Return a function that computes the value of a part from the values of names.

        Raises:
            ValueError: the grammar of conditions does not allow the part.
        """
        match node:
            case ast.Constant(value=str() | int() | float() as constant):  # a bool is an int
                return lambda values: constant
            case ast.Name() | ast.Attribute(value=ast.Name()):
                name = ast.unparse(node)
                self.names.append(name)
                return operator.itemgetter(name)
            case ast.BoolOp(op=ast.And(), values=parts):
                return self._combine(all, parts)
            case ast.BoolOp(op=ast.Or(), values=parts):
                return self._combine(any, parts)
            case ast.UnaryOp(op=ast.Not(), operand=part):
                operand = self.compile(part)
                return lambda values: not operand(values)
            case ast.Compare(left=left, ops=operators, comparators=right) if all(
                type(comparison) in _COMPARISONS for comparison in operators
            ):
                comparisons = [_COMPARISONS[type(comparison)] for comparison in operators]
                return self._compare([left, *right], comparisons)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                items = self._compile_all(parts)
                return lambda values: [item(values) for item in items]
            case ast.Call(func=ast.Name(id="len"), args=[part], keywords=[]):
                argument = self.compile(part)
                return lambda values: len(argument(values))
        raise ValueError(
            f"condition '{self._text}': '{ast.unparse(node)}' is not allowed; allowed: {_GRAMMAR}"
        )

    def _compile_all(self, parts: Sequence[ast.expr]) -> list[_Evaluate]:
        return [self.compile(part) for part in parts]

    def _combine(
        self, combination: Callable[[list[bool]], bool], parts: Sequence[ast.expr]
    ) -> _Evaluate:
        """Compile `and` (combination `all`) or `or` (`any`) of several parts."""
        operands = self._compile_all(parts)
        # the list makes sure that every operand is evaluated; see Condition.holds
        return lambda values: combination([bool(operand(values)) for operand in operands])

    def _compare(
        self, parts: Sequence[ast.expr], comparisons: Sequence[Callable[[Any, Any], bool]]
    ) -> _Evaluate:
        """Compile a chain of comparisons, for example `1 < x <= 2`, between adjacent parts."""
        operands = self._compile_all(parts)

        def holds(values: Mapping[str, Any]) -> bool:
            compared = [operand(values) for operand in operands]
            pairs = zip(comparisons, pairwise(compared), strict=True)
            results = [comparison(left, right) for comparison, (left, right) in pairs]
            return all(results)

        return holds
