"""The parser gives out the same calls and text however a reply is cut, and never half a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlite_agent.prompting.dialects import HERMES
from dlite_agent.prompting.parser import Event, InvalidToolCall, StreamParser, TextDelta, ToolCall
from dlite_agent.prompting.schemas import is_valid

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "get": {"type": "object"},
    "set_plan": {"type": "object", "properties": {"steps": {"type": "array", "items": {"type": "object"}}}},
}

NASTY = [
    "</tool_call>",
    "<tool_call>",
    '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
    '"',
    "\\",
    '\\"',
    "}{][",
    "```",
    "é🙂\u2028",
    "\n",
]
strings = st.lists(st.sampled_from(NASTY) | st.text(max_size=6), max_size=4).map("".join)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(strings, json_values, max_size=3)
calls = st.tuples(st.sampled_from([*SCHEMAS, "unbound", 'odd "name"']), arguments)
plain_words = st.text(alphabet="abc {}[]\"':,\n`;<>/é🙂", max_size=20)


def tagged(name: str, args: dict[str, Any], *, is_ascii: bool = False) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': args}, ensure_ascii=is_ascii)}\n</tool_call>"


def parse(pieces: list[str], *, truncated: bool = False) -> list[Event]:
    parser = StreamParser(HERMES, SCHEMAS)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.close(truncated=truncated)
    merged: list[Event] = []
    for event in events:
        if isinstance(event, TextDelta):
            assert event.text
            if merged and isinstance(merged[-1], TextDelta):
                event = TextDelta(merged.pop().text + event.text)  # type: ignore[union-attr]
        merged.append(event)
    return merged


def calls_of(events: list[Event]) -> list[tuple[str, dict[str, Any]]]:
    return [(event.name, event.args) for event in events if isinstance(event, ToolCall)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def cut(text: str, data: st.DataObject) -> list[str]:
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]


@given(
    st.sampled_from(["", "Let me look.", "A < b, {x}"]),
    st.lists(calls, min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_tagged_calls_come_back_whole_however_the_reply_is_cut(
    text: str, wanted: list[tuple[str, dict[str, Any]]], is_ascii: bool, data: st.DataObject
) -> None:
    reply = text + "\n" + "\n".join(tagged(name, args, is_ascii=is_ascii) for name, args in wanted)
    expected = parse([reply])
    assert calls_of(expected) == wanted
    assert text_of(expected) == text
    assert parse(list(reply)) == expected
    assert parse(cut(reply, data)) == expected


@given(
    st.lists(
        plain_words | st.sampled_from([*NASTY, '{"name": "', "get", '", "arguments": {', "```json\n", "<tools>"]),
        max_size=8,
    ),
    st.booleans(),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_any_reply_parses_the_same_however_it_is_cut(parts: list[str], truncated: bool, data: st.DataObject) -> None:
    reply = "".join(parts)
    expected = parse([reply], truncated=truncated)
    assert parse(list(reply), truncated=truncated) == expected
    assert parse(cut(reply, data), truncated=truncated) == expected


@given(st.text() | plain_words)
@settings(max_examples=150, deadline=None)
def test_a_reply_without_calls_is_its_text_unchanged(reply: str) -> None:
    assume("<tool_call>" not in reply)
    events = parse(list(reply))
    assert text_of(events) == reply


CALL = {"name": "get_weather", "arguments": {"city": 'a } " </tool_call> é', "days": 2}}
OTHER = {"name": "get", "arguments": {"x": [{"y": {}}]}}
BARE = json.dumps(CALL, ensure_ascii=False)
BARE_OTHER = json.dumps(OTHER, indent=2)


@pytest.mark.parametrize(
    "reply",
    [
        f"{BARE}\n{BARE_OTHER}",
        f" \n{BARE};{BARE_OTHER}",
        f"{BARE}; {BARE_OTHER} and so on",
        f"[{BARE}, {BARE_OTHER}]",
        f"```json\n{BARE}\n{BARE_OTHER}\n```",
        f"```json\n[{BARE},\n{BARE_OTHER}]\n```\nThis calls the tools.",
        f"```\n{BARE}\n```\n```json\n{BARE_OTHER}\n```",
        f"<tools>\n{BARE}\n{BARE_OTHER}\n</tools>",
        f"{BARE}\n{tagged('get', OTHER['arguments'])}",  # type: ignore[arg-type]
        f"<tool_call>{BARE}<tool_call>\n\n{BARE_OTHER}</tool_call> Done.",
        f"<tool_call>\n{BARE}\n</tool_call> then <tool_call>{BARE_OTHER}",
    ],
)
def test_bare_fenced_listed_and_tagged_calls_are_all_understood(reply: str) -> None:
    events = parse([reply])
    assert calls_of(events) == [(CALL["name"], CALL["arguments"]), (OTHER["name"], OTHER["arguments"])]
    assert text_of(events) == ""
    assert parse(list(reply)) == events


@pytest.mark.parametrize(
    "reply",
    [
        '{"name": "get_weather", "arguments": {"town": "Paris"}}',
        '{"name": "get_weather", "arguments": {"city": 5}}',
        '{"name": "get_weather", "arguments": {"city": "Paris"}, "note": 1}',
        '{"name": "get_weather"}',
        '{"name": "unbound", "arguments": {}}',
        '{"name": "get_w',
        '{"name": "get_weather", "arguments": {"city": "Paris"}',
        '```json\n{"city": "Paris"}\n```',
        "```python\n{}\n```",
        "[1, 2]",
        f"Here: {BARE}",
    ],
)
def test_json_that_is_no_valid_call_of_a_bound_tool_stays_text(reply: str) -> None:
    assert parse([reply]) == [TextDelta(reply)]
    assert parse(list(reply)) == [TextDelta(reply)]


def test_text_streams_as_soon_as_it_cannot_become_a_call() -> None:
    parser = StreamParser(HERMES, SCHEMAS)
    assert parser.feed("Hello") == [TextDelta("Hello")]
    assert parser.feed(" <tool_") == []
    assert parser.feed("x") == [TextDelta(" <tool_x")]
    parser = StreamParser(HERMES, SCHEMAS)
    assert parser.feed("```json\n{") == []
    assert parser.feed('"city') == [TextDelta('```json\n{"city')]
    parser = StreamParser(HERMES, SCHEMAS)
    assert parser.feed('{"name": "get_') == []
    assert parser.feed("time") == [TextDelta('{"name": "get_time')]


def test_a_call_is_given_out_with_its_last_character_and_not_before() -> None:
    for reply in (BARE, tagged("get_weather", CALL["arguments"])):  # type: ignore[arg-type]
        parser = StreamParser(HERMES, SCHEMAS)
        for char in reply[:-1]:
            assert parser.feed(char) == []
        assert len(parser.feed(reply[-1])) == 1


@pytest.mark.parametrize("is_tagged", [True, False])
def test_a_reply_truncated_anywhere_gives_whole_calls_and_names_the_cut_one(is_tagged: bool) -> None:
    objects = [json.dumps(CALL, ensure_ascii=False), json.dumps(OTHER)]
    reply = "\n".join(f"<tool_call>\n{o}\n</tool_call>" if is_tagged else o for o in objects)
    ends = [reply.index(o) + len(o) for o in objects]
    marks = ("<tool_call>", "<tool_call>") if is_tagged else ('"get_weather"', '"get"')
    begins = [reply.index(marks[0]) + len(marks[0]), reply.rindex(marks[1]) + len(marks[1])]
    whole = [(call["name"], call["arguments"]) for call in (CALL, OTHER)]
    for size in range(len(reply)):
        events = parse(list(reply[:size]), truncated=True)
        num_whole = sum(end <= size for end in ends)
        assert calls_of(events) == whole[:num_whole]
        is_cut = sum(begin <= size for begin in begins) > num_whole
        invalid = [event for event in events if isinstance(event, InvalidToolCall)]
        assert len(invalid) == is_cut
        if is_cut:
            assert "length limit" in invalid[0].error
            assert invalid[0].name in (None, ("get_weather", "get")[num_whole])


def test_text_in_a_string_of_an_unfinished_call_is_never_run() -> None:
    inner = tagged("get", {}).replace('"', "'")
    for truncated in (True, False):
        events = parse([f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{inner}'], truncated=truncated)
        assert calls_of(events) == []
        assert [type(event) for event in events] == [InvalidToolCall]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("get(1)", "one JSON object"),
        ("{'name': 'get'}", "property name"),
        ('{"arguments": {}}', "no 'name'"),
        ('{"name": "get", "arguments": [1]}', "no JSON object"),
        ('{"name": "get", "arguments": {"x": NaN}}', "NaN"),
        ('{"name": "get", "arguments": {"x": "\\ud800"}}', "surrogate"),
        ('{"name": "get", "arguments": {}}}', "one JSON object"),
        ('{"name": "get", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}", "nested"),
    ],
)
def test_a_malformed_tagged_call_is_reported_and_the_next_one_still_read(body: str, error: str) -> None:
    events = parse([f"<tool_call>\n{body}\n</tool_call>\n{tagged('get', {'a': 1})}"])
    assert [type(event) for event in events] == [InvalidToolCall, ToolCall]
    assert isinstance(events[0], InvalidToolCall)
    assert error in events[0].error


def test_arguments_written_as_a_json_string_and_missing_ones_are_read() -> None:
    assert calls_of(parse(['<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>'])) == [
        ("get", {"a": 1})
    ]
    assert calls_of(parse(['<tool_call>{"name": "get"}</tool_call>'])) == [("get", {})]


def test_a_schema_that_is_broken_or_elsewhere_accepts_no_bare_call() -> None:
    endless = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    for schema in ({"type": "float"}, {"$ref": "http://example.invalid/schema"}, endless):
        parser = StreamParser(HERMES, {"get": schema})
        assert parser.feed(BARE_OTHER) + parser.close(truncated=False) == [TextDelta(BARE_OTHER)]


def test_without_tools_json_is_text_at_once() -> None:
    assert StreamParser(HERMES, {}).feed('{"name": ') != []


@pytest.mark.parametrize("part", [{"pattern": r"^\p{L}+$"}, {"$ref": "#/missing"}, {"type": "strin"}])
def test_nothing_fits_a_schema_that_cannot_be_checked(part: dict[str, str]) -> None:
    assert not is_valid({"a": "x"}, {"type": "object", "properties": {"a": part}})
