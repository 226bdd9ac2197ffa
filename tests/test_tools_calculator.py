"""The calculator and the clock."""

from __future__ import annotations

import ast
import math
import time
import warnings
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.tools import ToolException

from dlite_agent.tools import calculator_tool, clock_tool
from dlite_agent.tools.calculator import MAX_BITS, calculate


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(2 + 3) * 4", "20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 100", str(2**100)),
        ("2 ** -2", "0.25"),
        ("-(-3)", "3"),
        ("sqrt(2)", "1.41421356237"),
        ("round(2.567, 2)", "2.57"),
        ("round(2.5)", "2"),
        ("min(3, 1, 2) + max([4, 5])", "6"),
        ("sum([1, 2, 3]) + sum(4, 5)", "15"),
        ("average(1, 2, 6)", "3"),
        ("floor(pi) + ceil(e) + abs(-1)", "7"),
        ("log(e) + log10(100) + log2(8) + log(9, 3)", "8"),
        ("factorial(5)", "120"),
        ("pow(2, 10)", "1024"),
        (" 1e3 ", "1000"),
        ("1e20", "1e+20"),
        ("1_000 * 2", "2000"),
        ("+".join(["1"] * 150), "150"),
    ],
)
def test_arithmetic(expression: str, result: str) -> None:
    assert calculate(expression) == result


@given(st.recursive(
    st.integers(-99, 99).map(str),
    lambda parts: st.tuples(parts, st.sampled_from("+-*"), parts).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
    max_leaves=12,
))  # fmt: skip
def test_whole_number_arithmetic_is_pythons(expression: str) -> None:
    assert calculate(expression) == str(eval(expression))


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "two", "1, 2", "x = 1", "True", "'a' * 3", "[1, 2]", "1 < 2", "1 if 1 else 2", "lambda: 1",
        "__import__('os').system('true')", "().__class__", "abs.__name__", "sqrt", "open('x')", "max(*[1, 2])",
        "round(1.5, digits=1)", "sum([1], [2])", "[x for x in (1, 2)]", "f'{1}'", "1j", "1 if", "a\0b", "abs",
        "~1", "1 << 2",
    ],
)  # fmt: skip
def test_anything_but_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ToolException):
        calculate(expression)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1 / 0", "division by zero"),
        ("5 % 0", "no result|division by zero"),
        ("sqrt(-1)", "no result"),
        ("(-8) ** 0.5", "not a real number"),
        ("1e308 * 10", "not a finite number"),
        ("exp(1000)", "no result"),
        ("log(0)", "no result"),
        ("factorial(2.5)", "whole number from 0"),
        ("factorial(10 ** 9)", "whole number from 0"),
        ("round(1.5, 10 ** 6)", "at most 100"),
        ("10 ** 10 ** 10", "too large"),
        ("9 ** 99999999999", "too large"),
        (f"{2**MAX_BITS}", "characters"),
        ("2 ** 4000 * 2 ** 4000", "too large"),
        ("min()", "no result"),
        ("(" * 240 + "1" + ")" * 240, "cannot read|nested"),
        ("-" * 400 + "1", "nested"),
        ("1" * 501, "at most 500"),
    ],
)
def test_what_has_no_bounded_result_says_why(expression: str, problem: str) -> None:
    with pytest.raises(ToolException, match=problem):
        calculate(expression)


@given(st.text(alphabet="0123456789.+-*/%() esqrtumpowfact,[]", max_size=60))
def test_any_text_gives_a_short_result_or_a_tool_error(text: str) -> None:
    message = calculator_tool().invoke(
        {"type": "tool_call", "id": "1", "name": "calculate", "args": {"expression": text}}
    )
    if message.status == "success":
        assert math.isfinite(ast.literal_eval(message.content))
    else:
        assert "\n" not in message.content
        assert len(message.content) < 400


@pytest.mark.parametrize(
    "expression", ["1if 2else 3", "1or 2", "0xfor 2", "0b1or 2", "1_0in 3", "1.or 2", "1jor 2", r"'\d'", r'len("\w")']
)
def test_python_has_nothing_to_warn_of(expression: str, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    with pytest.raises(ToolException, match="cannot read"):
        calculate(expression)
    assert not recwarn.list


def test_errors_are_messages_to_the_model() -> None:
    message = calculator_tool().invoke(
        {"type": "tool_call", "id": "1", "name": "calculate", "args": {"expression": "1/0"}}
    )
    assert (message.status, message.content) == ("error", "division by zero")


def test_the_clock_shows_the_given_time_in_any_zone() -> None:
    clock = clock_tool(lambda: datetime(2026, 3, 1, 23, 30, tzinfo=UTC))
    assert clock.invoke({}) == "2026-03-01 23:30:00 UTC, Sunday"
    assert clock.invoke({"timezone": "Asia/Tokyo"}) == "2026-03-02 08:30:00 JST, Monday"


@pytest.mark.parametrize("zone", ["Nowhere/Land", "../../etc/passwd", "/etc/localtime", "a\0b"])
def test_an_unknown_zone_is_an_error_message(zone: str) -> None:
    call = {"type": "tool_call", "id": "1", "name": "current_time", "args": {"timezone": zone}}
    message = clock_tool().invoke(call)
    assert message.status == "error"
    assert "unknown time zone" in message.content


def test_the_clock_runs() -> None:
    before = int(time.time())
    text = clock_tool().invoke({}).split(" UTC")[0]
    shown = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    assert before <= shown <= time.time()
