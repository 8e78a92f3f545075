"""Calculator that agents call in chats: exact arithmetic with fractions of bounded size."""

import ast
import operator
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from fractions import Fraction

from rollout.environments.protocol import AgentMistake
from rollout.environments.tools import Tool, tool_of

_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_MAX_BITS = 4096  # limit of a numerator or a denominator


@asynccontextmanager
async def calculator_tools() -> AsyncIterator[list[Tool]]:
    """Yield a calculator with exact fractions."""
    yield [tool_of(calculator, parallel=True)]


async def calculator(*, expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: of numbers, parentheses and + - * / // % **

    Raises:
        AgentMistake: the expression cannot be evaluated, or its value is too large.
    """
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
        if value.denominator == 1:
            return str(value.numerator)
        return f"{value} = {float(value):.12g}"
    except ZeroDivisionError as error:
        raise AgentMistake("calculator: division by zero") from error
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise AgentMistake(f"calculator: {error or type(error).__name__}") from error


def _evaluate(node: ast.AST) -> Fraction:
    """Return the value of an expression.

    Raises:
        ValueError: the expression has other parts than numbers and operators, an exponent that is
            not a whole number, or a value that is too large.
        ArithmeticError: a division by zero.
    """
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            # str gives a decimal of up to 15 digits as it was written. Fraction(0.1) would be the binary
            # value of the float.
            value = Fraction(str(number))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_evaluate(left), _evaluate(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("only numbers, parentheses and + - * / // % ** are known")
    if _bits(value) > _MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("the exponent of a power must be a whole number")
    if abs(exponent) * _bits(base) > _MAX_BITS:
        raise ValueError("the number is too large")
    return Fraction(base**exponent.numerator)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
