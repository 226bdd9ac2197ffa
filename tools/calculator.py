"""Arithmetic for a model that cannot be trusted with it, on syntax trees and within bounds.

Nothing is evaluated by Python: an expression is parsed and walked, and a node that is not in the tables
below is refused. Every bound is checked before the work it bounds, so no expression takes more than some milliseconds.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Annotated, cast

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field, WithJsonSchema

from dlite_agent.tools.factory import make_tool

MAX_LENGTH = 500
MAX_DEPTH = 200
MAX_BITS = 4096

_PYTHON_WARNS = re.compile(r"""['"]|[\da-fj._](?:and|else|for|if|in|is|not|or)\b""", re.IGNORECASE)
"""Texts, and words grown together with a number: no arithmetic, and the parser would warn of some on stderr."""

Number = int | float

_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def calculate(expression: str) -> str:
    """Work out an arithmetic expression."""
    text = expression.strip()
    if len(text) > MAX_LENGTH:
        raise ToolException(f"the expression has {len(text)} characters; at most {MAX_LENGTH} are allowed")
    try:
        if _PYTHON_WARNS.search(text):
            raise SyntaxError
        tree = ast.parse(text, mode="eval")
        return _format(_evaluate(tree.body, MAX_DEPTH))
    except SyntaxError as error:
        raise ToolException(f"cannot read {text!r}; expected arithmetic such as (2 + 3) * 4") from error
    except (RecursionError, MemoryError) as error:
        raise ToolException("the expression is nested too deeply") from error
    except ZeroDivisionError as error:
        raise ToolException("division by zero") from error
    except (OverflowError, ValueError, TypeError) as error:
        raise ToolException(f"no result: {error}") from error


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth == 0:
        raise ToolException(f"the expression is nested too deeply; at most {MAX_DEPTH} levels are allowed")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand, depth - 1))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_evaluate(left, depth - 1), _evaluate(right, depth - 1)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*_arguments(args, depth - 1)))
    raise ToolException(f"{ast.unparse(node)[:40]!r} is not allowed; use numbers, + - * / // % ** and {_NAMES}")


def _arguments(nodes: list[ast.expr], depth: int) -> list[Number]:
    """Evaluate call arguments; a list stands for its items, as in sum([1, 2])."""
    if len(nodes) == 1 and isinstance(nodes[0], ast.List | ast.Tuple):
        nodes = nodes[0].elts
    return [_evaluate(node, depth) for node in nodes]


def _bounded(value: object) -> Number:
    if isinstance(value, complex) or not isinstance(value, int | float):
        raise ToolException("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolException(f"the number is too large; at most {MAX_BITS} bits are allowed")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolException("the result is not a finite number")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise ToolException(f"the power is too large; at most {MAX_BITS} bits are allowed")
    return cast(Number, base**exponent)


def _factorial(value: Number) -> int:
    if not isinstance(value, int) or not 0 <= value <= 500:
        raise ToolException("factorial needs a whole number from 0 to 500")
    return math.factorial(value)


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise ToolException("round needs a whole number of digits, at most 100")
    return round(value, digits) if digits else round(value)


def _sum(*values: Number) -> Number:
    return sum(values)


def _average(*values: Number) -> Number:
    return sum(values) / len(values)


_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "abs": abs,
    "average": _average,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "factorial": _factorial,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "max": max,
    "min": min,
    "pow": _power,
    "round": _round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "sum": _sum,
    "tan": math.tan,
}
_NAMES = ", ".join([*_FUNCTIONS, *_CONSTANTS])


def _format(value: Number) -> str:
    """Write whole floats as integers and others with 12 digits, which hides 0.1 + 0.2 = 0.30000000000000004."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"


_HELD_FUNCTIONS = ("abs", "max", "min", "round", "sqrt")
"""What a grammar lets a small model write; with all names allowed it wraps sums in `factorial` and `sum`."""


def _pattern() -> str:
    """Return what expressions are made of, for grammars that hold a model's arguments to the tool's schema.

    A held model cannot even begin to write a name that would be refused.
    """
    return rf"^(?:[-+*/%()., 0-9]|{'|'.join(_HELD_FUNCTIONS)})+$"


class CalculateArgs(BaseModel):
    """Arguments of `calculate`."""

    expression: Annotated[str, WithJsonSchema({"type": "string", "pattern": _pattern()})] = Field(
        description="Arithmetic with numbers and + - * / ( )"
    )


def calculator_tool() -> BaseTool:
    """Return the tool `calculate`."""
    return make_tool(calculate, CalculateArgs)
