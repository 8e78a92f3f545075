"""A calculator for agents: arithmetic that is read, never run as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

from rollout.tools.protocol import BadArguments, check_arguments

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
_MAX_CHARS = 300
_MAX_BITS = 4096  # of a whole number or of either part of a fraction
_MAX_EXPONENT = 1024
_MAX_DIGITS = 100  # of a rounded number
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "lcm": math.lcm,
    "log": math.log,
    "max": max,
    "min": min,
    "round": lambda x, digits=0: round(x, digits) if digits else round(x),
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}
_NAMES = {"pi": math.pi, "e": math.e}

Number: TypeAlias = int | float | Fraction


class Calculator:
    """The tool `calculator`."""

    name = "calculator"
    description = f"Calculate an expression, exactly where it is rational; functions: {', '.join(_FUNCTIONS)}."
    schema = SCHEMA

    async def __call__(self, **arguments: Any) -> str:
        """The value: a whole number, a fraction with its decimals, or a decimal number.

        Raises:
            BadArguments: it is no arithmetic, has no value, or is too large.
        """
        check_arguments(self.name, self.schema, arguments)
        return render(calculate(arguments["expression"]))


def calculate(expression: str) -> Number:
    """The value of arithmetic on numbers, with `^` for powers too.

    Raises:
        BadArguments: it is none, has no value, or is too large.
    """
    if len(expression) > _MAX_CHARS:
        raise BadArguments(f"calculator: the expression has {len(expression)} characters; at most {_MAX_CHARS}")
    try:
        tree = ast.parse(expression.replace("^", "**").strip(), mode="eval").body
        return _value(tree)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        if isinstance(error, BadArguments):
            raise
        raise BadArguments(f"calculator: '{expression}' has no value ({error})") from error


def render(value: Number) -> str:
    """A value as a model reads it."""
    if isinstance(value, float):
        return f"{value:.12g}"
    if value.denominator == 1:
        return str(value)
    huge = value.numerator.bit_length() - value.denominator.bit_length() > 1000  # no float holds it
    return str(value) if huge else f"{value} = {float(value):.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_apply(op, _value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            values: list[Number] = [_value(argument) for argument in arguments]
            if name == "round" and any(abs(float(digits)) > _MAX_DIGITS for digits in values[1:]):
                raise BadArguments(f"calculator: round takes at most {_MAX_DIGITS} digits")
            return _bounded(_FUNCTIONS[name](*values))
    raise BadArguments(f"calculator: '{ast.unparse(node)}' is no arithmetic; functions: {', '.join(_FUNCTIONS)}")


def _apply(op: ast.operator, left: Number, right: Number) -> Number:
    exact = not isinstance(left, float) and not isinstance(right, float)
    size = abs(float(right)) if isinstance(op, ast.Pow) and exact else 0.0
    if size > _MAX_EXPONENT or _bits(left) * size > _MAX_BITS:
        raise BadArguments("calculator: the power is too large")
    if exact and isinstance(op, ast.Div | ast.Pow):
        left = Fraction(left)
    value: Number = _OPERATORS[type(op)](left, right)
    return value


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise BadArguments("calculator: the value is no real number")
    if _bits(value) > _MAX_BITS:
        raise BadArguments("calculator: the number is too large")
    number: Number = value
    return int(number) if isinstance(number, Fraction) and number.denominator == 1 else number


def _bits(value: Number) -> int:
    if isinstance(value, float):
        return 64
    return max(value.numerator.bit_length(), value.denominator.bit_length())
