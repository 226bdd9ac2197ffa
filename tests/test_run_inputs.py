"""What people type and scripts send, read without a graph."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.errors import ConfigError
from dlite_agent.run.approval import Answer, decision, parse_answer
from dlite_agent.run.events import ApprovalEvent
from dlite_agent.run.inputs import LineReader, Message, SlashCommand, read_json, read_plain

QUESTION = ApprovalEvent("1", "add", {"a": 1})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hello there\n", Message("hello there")),
        ("/undo\n", SlashCommand("/undo")),
        ('{"message": "/no command\\nof two lines"}', Message("/no command\nof two lines")),
        ('{"command": "/fork other"}', SlashCommand("/fork other")),
        ('{"approve": true}', Answer("yes")),
        ('{"approve": false, "reason": "too big"}', Answer("no", "too big")),
        ('{"approve": "always"}', Answer("always")),
        ('{"approve": {"a": 2}}', Answer("edit", args={"a": 2})),
    ],
)
def test_a_line_of_a_script_is_what_it_says(line: str, expected: object) -> None:
    assert read_json(line, is_asked=False) == expected


@pytest.mark.parametrize(
    "line", ['{"message": 1}', '{"message": " "}', '{"massage": "x"}', '{"message": "x"', '{"approve": 1}', "{}"]
)
def test_an_object_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        read_json(line, is_asked=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y", Answer("yes")),
        (" YES ", Answer("yes")),
        ("n", Answer("no")),
        ("no, but", None),
        ("n not this file", Answer("no", "not this file")),
        ("a", Answer("always")),
        ("e", Answer("edit")),
        ('edit {"a": 2}', Answer("edit", args={"a": 2})),
        ("edit [1]", None),
        ("yes please", None),
        ("", None),
    ],
)
def test_an_answer_is_one_of_four_or_none(text: str, expected: Answer | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="expected"):
            parse_answer(text)
    else:
        assert parse_answer(text) == expected


@given(st.text())
def test_any_line_is_read_or_refused(line: str) -> None:
    for is_asked in (False, True):
        try:
            found = read_json(line, is_asked=is_asked)
        except ConfigError:
            continue
        assert not (is_asked and isinstance(found, Message) and not line.lstrip().startswith("{"))


@pytest.mark.parametrize("line", ['{"a":' * 5000, '{"approve": ' + "[" * 5000, 'e {"a": ' + "[" * 5000])
def test_a_line_that_is_nested_too_deeply_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        read_json(line, is_asked=True)


def test_a_refusal_without_a_reason_has_none() -> None:
    assert read_json('{"approve": false, "reason": null}', is_asked=True) == Answer("no")


def test_a_question_is_answered_and_not_talked_over() -> None:
    assert read_plain("y", is_asked=False) == Message("y")
    assert read_plain("y", is_asked=True) == Answer("yes")
    reader = LineReader(io.StringIO("\n\ne\ny\n"))
    with pytest.raises(ConfigError, match="arguments"):
        reader.read(QUESTION)
    assert reader.read(QUESTION) == Answer("yes")
    assert reader.read(QUESTION) is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer("always"), {"type": "approve"}),
        (Answer("no"), {"type": "reject"}),
        (Answer("no", "why"), {"type": "reject", "message": "why"}),
        (Answer("edit", args={"a": 2}), {"type": "edit", "edited_action": {"name": "add", "args": {"a": 2}}}),
    ],
)
def test_an_answer_is_langchain_s_decision(answer: Answer, expected: dict[str, Any]) -> None:
    assert decision(QUESTION, answer).resume == {"1": expected}
