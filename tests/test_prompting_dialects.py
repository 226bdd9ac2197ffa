"""Every dialect gives back the calls it wrote, however the reply is cut, and never runs half a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.errors import ConfigError, PromptError
from dlite_agent.prompting.dialects import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DIALECTS,
    FUNCTIONGEMMA,
    GEMMA,
    GENERIC,
    GRANITE,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3_CODER,
    Dialect,
    named_dialect,
)
from dlite_agent.prompting.forms import JsonForm
from dlite_agent.prompting.parser import Event, InvalidToolCall, StreamParser, TextDelta, ToolCall
from dlite_agent.prompting.spans import SPACE

ALL = (*DIALECTS, GENERIC)
Calls = list[tuple[str, dict[str, Any]]]

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "near": {"$ref": "#/$defs/place"},
        },
        "required": ["city"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "get": {"type": "object"},
    "set-plan.v2": {"type": "object", "properties": {"steps": {"type": "array"}, "is_final": {"type": "boolean"}}},
}

NASTY = [
    *(mark for dialect in ALL for mark in sorted(dialect.markers)),
    '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
    "[get(a=1)]",
    "\n</function>\n</tool_call>",
    '"',
    "'",
    "\\",
    '\\"',
    "\\u00e9",
    "}{][)(",
    "```",
    "null",
    "True",
    "7",
    "é🙂\u2028",
    "\n",
]
every_dialect = pytest.mark.parametrize("dialect", ALL, ids=lambda dialect: dialect.name)


def parse(dialect: Dialect, pieces: list[str], *, truncated: bool = False, is_thinking: bool = False) -> list[Event]:
    parser = StreamParser(dialect, SCHEMAS, is_thinking=is_thinking)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.close(truncated=truncated)
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and last.is_thinking == event.is_thinking:
            merged[-1] = TextDelta(last.text + event.text, event.is_thinking)
        else:
            merged.append(event)
    return merged


def calls_of(events: list[Event]) -> Calls:
    return [(event.name, event.args) for event in events if isinstance(event, ToolCall)]


def text_of(events: list[Event], *, is_thinking: bool = False) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta) and e.is_thinking == is_thinking)


def exact(calls: Calls) -> str:
    """A text that tells 1, 1.0 and True apart."""
    return json.dumps(calls, ensure_ascii=True, sort_keys=True)


def cut(text: str, data: st.DataObject) -> list[str]:
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]


def opened(dialect: Dialect, calls: Calls) -> str:
    """Calls as they are written behind text: with a marker, also where a reply of calls alone needs none."""
    written = dialect.write(calls, SCHEMAS)
    return written if written.startswith(dialect.call_open) else f"{dialect.call_open}{written}"


def can_write(dialect: Dialect, calls: Calls) -> bool:
    try:
        dialect.write(calls, SCHEMAS)
    except PromptError:
        return False
    return True


strings = st.lists(st.sampled_from(NASTY) | st.text(max_size=6), max_size=4).map("".join)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["city", "from", "größe", "x-y", "a.b", "None", "class"])
weather = st.fixed_dictionaries(
    {"city": strings},
    optional={
        "days": st.integers(),
        "unit": st.none() | strings,
        "near": st.fixed_dictionaries({"x": st.floats(allow_nan=False, allow_infinity=False)}),
        "more": json_values,
    },
)
some_call = st.one_of(
    st.tuples(st.just("get_weather"), weather),
    st.tuples(st.sampled_from(["get", "unbound"]), st.dictionaries(keys, json_values, max_size=3)),
    st.tuples(
        st.just("set-plan.v2"), st.fixed_dictionaries({"steps": st.lists(json_values), "is_final": st.booleans()})
    ),
)
some_calls: st.SearchStrategy[Calls] = st.lists(some_call, min_size=1, max_size=3)


@every_dialect
@given(
    text=st.sampled_from(["", "Let me look.", "A < b, {x} [y] `z`"]),
    thought=st.sampled_from(["", "Hm, {open}get{close}?"]),
    trailing=st.sampled_from(["", "\nDone."]),
    wanted=some_calls,
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_written_calls_come_back_whole_however_the_reply_is_cut(
    dialect: Dialect, text: str, thought: str, trailing: str, wanted: Calls, data: st.DataObject
) -> None:
    if not can_write(dialect, wanted):
        assert not isinstance(dialect.form, JsonForm)
        return
    before, after = dialect.thinking
    thought = thought.format(open=dialect.call_open, close=dialect.call_close)
    thinking = thought and f"{before}{thought}{after}"
    reply = f"{thinking}{text}\n{opened(dialect, wanted)}{trailing}"
    expected = parse(dialect, [reply])
    assert exact(calls_of(expected)) == exact(wanted)
    assert text_of(expected) == (text.lstrip(SPACE) if thinking else text)
    assert text_of(expected, is_thinking=True) == thought.strip(SPACE)
    assert not any(isinstance(event, InvalidToolCall) for event in expected)
    assert parse(dialect, list(reply)) == expected
    assert parse(dialect, cut(reply, data)) == expected


@every_dialect
@given(
    parts=st.lists(
        st.sampled_from([*NASTY, "get", "get(", '{"name": "get", ', '"arguments": {}}', "call:get{"]), max_size=8
    ),
    truncated=st.booleans(),
    is_thinking=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_reply_parses_the_same_however_it_is_cut(
    dialect: Dialect, parts: list[str], truncated: bool, is_thinking: bool, data: st.DataObject
) -> None:
    reply = "".join(data.draw(st.sampled_from([[*parts], [dialect.call_open, *parts]])))
    expected = parse(dialect, [reply], truncated=truncated, is_thinking=is_thinking)
    assert parse(dialect, list(reply), truncated=truncated, is_thinking=is_thinking) == expected
    assert parse(dialect, cut(reply, data), truncated=truncated, is_thinking=is_thinking) == expected


TWO: Calls = [
    ("get_weather", {"city": 'a } " )] é', "days": 2, "near": {"x": -1.5}}),
    ("get", {"b": [None, True, {"c": "d"}], "e": ""}),
]


@every_dialect
@pytest.mark.parametrize("truncated", [True, False])
def test_a_reply_cut_anywhere_gives_whole_calls_and_at_most_one_that_is_invalid(
    dialect: Dialect, truncated: bool
) -> None:
    reply = f"I look.\n{opened(dialect, TWO)}"
    num_seen = 0
    for size in range(len(reply) + 1):
        events = parse(dialect, list(reply[:size]), truncated=truncated)
        found = calls_of(events)
        assert found == TWO[: len(found)]
        assert len(found) >= num_seen
        num_seen = len(found)
        invalid = [event for event in events if isinstance(event, InvalidToolCall)]
        assert len(invalid) <= 1
        assert all(("length limit" if truncated else "ended inside") in event.error for event in invalid)
        is_within = reply.index(dialect.call_open) + len(dialect.call_open) <= size
        assert not is_within or invalid or found
        assert reply[:size].startswith(text_of(events))
        assert text_of(events).rstrip() == "I look."[:size] or not is_within
    assert num_seen == 2


@every_dialect
def test_a_call_is_given_out_before_the_next_one_is_complete(dialect: Dialect) -> None:
    parser = StreamParser(dialect, SCHEMAS)
    reply = dialect.write(TWO, SCHEMAS)
    counts = [sum(isinstance(event, ToolCall) for event in parser.feed(char)) for char in reply]
    assert max(counts) == 1
    first = counts.index(1)
    assert first < len(dialect.write(TWO[:1], SCHEMAS)) + len(dialect.between)
    assert not any(isinstance(event, TextDelta) for event in parser.close(truncated=False))


@every_dialect
def test_an_empty_argument_list_is_one(dialect: Dialect) -> None:
    assert parse(dialect, [dialect.write([("get", {})])]) == parse(dialect, list(dialect.format_call("get", {})))
    assert calls_of(parse(dialect, [dialect.write([("get", {})])])) == [("get", {})]


UNDERSTOOD = [
    (HERMES, '<tool_call>[{"name": "get", "arguments": {"a": 1}}, {"name": "get", "arguments": {}}]</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n{"name": "get"}\n</tool_call>'),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"a": 1}}; {"name": "get"}</tool_call>'),
    (
        QWEN3_CODER,
        "<tool_call><function=get><parameter=a>1</parameter></function><function=get></function></tool_call>",
    ),
    (LLAMA3, '<|python_tag|>{"name": "get", "parameters": {"a": 1}}; {"name": "get", "arguments": {}}'),
    (LLAMA3, '{"name": "get", "parameters": {"a": 1}}\n{"name": "get", "parameters": {}}'),
    (LLAMA3, '```json\n{"name": "get", "arguments": {"a": 1}}; {"name": "get", "parameters": {}}\n```'),
    (MISTRAL, '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "get"}]'),
    (MISTRAL, '[TOOL_CALLS] {"name": "get", "arguments": {"a": 1}} {"name": "get"} and so on'),
    (MISTRAL_ARGS, '[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]get[CALL_ID]abc123[ARGS] {}'),
    (LFM2, "<|tool_call_start|>[get(a=1), get()]<|tool_call_end|>The calls are made."),
    (LFM2, "<|tool_call_start|>get(a=+1,)\nget ( )<|tool_call_end|>"),
    (LFM2, '<|tool_call_start|>[{"name": "get", "arguments": {"a": 1}}, {"name": "get"}]<|tool_call_end|>'),
    (GEMMA, "Sure.\n```tool_code\nget(a=1); get()\n```\nThese are the calls."),
    (
        FUNCTIONGEMMA,
        "<start_function_call>call:get{<escape>a<escape>: 1}<end_function_call> <start_function_call>call:get{}",
    ),
    (DEEPSEEK_V31, DEEPSEEK_V31.write([("get", {"a": 1}), ("get", {})]).replace("><", ">\n<")),
    (DEEPSEEK_V3, DEEPSEEK_V3.write([("get", {"a": 1}), ("get", {})]).replace("\n", "")),
    (GRANITE, '<|tool_call|>[{"arguments": {"a": 1}, "name": "get"}, {"name": "get"}] Done.'),
]


@pytest.mark.parametrize(("dialect", "reply"), UNDERSTOOD)
def test_what_models_write_slightly_otherwise_is_understood(dialect: Dialect, reply: str) -> None:
    events = parse(dialect, [reply])
    assert calls_of(events) == [("get", {"a": 1}), ("get", {})]
    assert not any(isinstance(event, InvalidToolCall) for event in events)
    assert parse(dialect, list(reply)) == events


MALFORMED = [
    (HERMES, "<tool_call>[]</tool_call>", "one JSON object"),
    (QWEN3_CODER, "<tool_call>get</tool_call>", "<function=name>"),
    (QWEN3_CODER, "<tool_call><function=get>a=1</function></tool_call>", "<function=name>"),
    (
        QWEN3_CODER,
        "<tool_call><function=get_weather><parameter=days>two</parameter></function></tool_call>",
        "neither JSON",
    ),
    (
        QWEN3_CODER,
        "<tool_call><function=get><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "given twice",
    ),
    (LLAMA3, '<|python_tag|>brave_search.call(query="x")', "ended inside"),
    (LLAMA3, '{"name": "get", "parameters": {"a": 1}, }', "property name"),
    (LLAMA3, '{"name": "get", "parameters": {"a": 1', "ended inside"),
    (MISTRAL, "[TOOL_CALLS] get", "ended inside"),
    (MISTRAL_ARGS, "[TOOL_CALLS]get[ARGS](a=1)[TOOL_CALLS]", "name with a JSON object"),
    (MISTRAL_ARGS, '[TOOL_CALLS]get[ARGS]{"a": NaN}', "NaN"),
    (LFM2, "<|tool_call_start|>[get(1)]<|tool_call_end|>", "expected '='"),
    (LFM2, "<|tool_call_start|>[get(a=b)]<|tool_call_end|>", "neither a number"),
    (LFM2, "<|tool_call_start|>[get(a=1, a=2)]<|tool_call_end|>", "given twice"),
    (LFM2, "<|tool_call_start|>[get(a=1 b=2)]<|tool_call_end|>", "expected ','"),
    (LFM2, "<|tool_call_start|>[get(a='\\ud800')]<|tool_call_end|>", "surrogate"),
    (LFM2, f"<|tool_call_start|>[get(a={'[' * 500}{']' * 500})]<|tool_call_end|>", "nested"),
    (GEMMA, "```tool_code\nprint 5\n```", "name(key=value"),
    (FUNCTIONGEMMA, "<start_function_call>call:get{a:b}<end_function_call>", "neither a number"),
    (FUNCTIONGEMMA, "<start_function_call>get(a=1)<end_function_call>", "call:name"),
    (DEEPSEEK_V3, DEEPSEEK_V3.write([("get", {})]).replace("{}", "5"), "name with a JSON object"),
    (GRANITE, '<|tool_call|>[{"name": "get", "arguments": {}}, ', "ended inside"),
]


@pytest.mark.parametrize(("dialect", "reply", "error"), MALFORMED)
def test_a_broken_call_is_reported_and_never_run(dialect: Dialect, reply: str, error: str) -> None:
    events = parse(dialect, [reply])
    invalid = [event for event in events if isinstance(event, InvalidToolCall)]
    assert error in invalid[0].error
    assert not calls_of(events) or dialect is GRANITE
    assert text_of(events) == ""
    assert parse(dialect, list(reply)) == events


@every_dialect
def test_behind_a_broken_call_the_next_block_is_still_read(dialect: Dialect) -> None:
    broken = f"{dialect.call_open} ?!? {dialect.call_close}"
    events = parse(dialect, [f"{broken}\n{opened(dialect, TWO)}"])
    assert [type(event) for event in events] == [InvalidToolCall, ToolCall, ToolCall]
    assert calls_of(events) == TWO


@every_dialect
def test_bare_json_is_understood_in_every_dialect_if_it_is_right(dialect: Dialect) -> None:
    key = dialect.bare_form.arguments_key
    right = json.dumps({"name": "get_weather", key: {"city": "Rome"}})
    assert calls_of(parse(dialect, [f"```json\n{right}\n```"])) == [("get_weather", {"city": "Rome"})]
    assert calls_of(parse(dialect, [f"{dialect.thinking[0]}x{dialect.thinking[1]}\n{right}"])) != []
    wrong = json.dumps({"name": "get_weather", key: {"town": "Rome"}})
    assert bool(calls_of(parse(dialect, [wrong]))) == dialect.is_bare
    assert text_of(parse(dialect, [f"See: {right}"])) == f"See: {right}"


@every_dialect
def test_thinking_is_text_of_its_own_and_holds_no_calls(dialect: Dialect) -> None:
    opener, closer = dialect.thinking
    inner = f"maybe {opened(dialect, TWO)} {closer[:-1]}"
    reply = f"{opener}{inner}{closer}\n\nNo."
    assert parse(dialect, list(reply)) == [TextDelta(inner, True), TextDelta("No.")]
    rest = reply.removeprefix(opener)
    assert parse(dialect, list(rest), is_thinking=True) == [TextDelta(inner, True), TextDelta("No.")]
    assert parse(dialect, [rest.removesuffix(f"{closer}\n\nNo.")], is_thinking=True) == [TextDelta(inner, True)]
    assert dialect.is_thinking(f"...{closer} assistant\n{opener}\n")
    assert not dialect.is_thinking(f"{opener}\n\n{closer}\n\n")
    assert not dialect.is_thinking(f"why {opener} is a tag")


def test_values_in_parameter_tags_are_read_by_their_schema() -> None:
    def read(key: str, value: str) -> Any:
        reply = f"<tool_call><function=get_weather><parameter={key}>\n{value}\n</parameter></function></tool_call>"
        ((_, args),) = calls_of(parse(QWEN3_CODER, [reply]))
        return args[key]

    assert read("city", "5") == "5"
    assert read("city", '{"a": 1}') == '{"a": 1}'
    assert read("city", "\n  two\nlines \n") == "\n  two\nlines \n"
    assert read("days", "5") == 5
    assert read("days", "5.5") == 5.5  # does not fit, and it is for the tool to say so
    assert read("unit", "null") is None
    assert read("unit", "5") == "5"
    assert read("unit", "°C") == "°C"
    assert read("near", '{"x": 1.5}') == {"x": 1.5}
    assert read("other", "True") is True
    assert read("other", "Rome") == "Rome"


def test_what_a_dialect_has_no_way_to_write_is_refused() -> None:
    for dialect, calls in (
        (QWEN3_CODER, [("get_weather", {"city": "a</parameter>b"})]),
        (QWEN3_CODER, [("get", {"a b": 1})]),
        (LFM2, [("get", {"a b": 1})]),
        (MISTRAL_ARGS, [('odd "name"', {})]),
        (FUNCTIONGEMMA, [("get", {"a": "x<escape>y"})]),
        (FUNCTIONGEMMA, [("a{b", {})]),
    ):
        with pytest.raises(PromptError, match="cannot be written"):
            dialect.write(calls, SCHEMAS)


def test_a_dialect_is_found_by_its_name() -> None:
    assert [named_dialect(dialect.name) for dialect in ALL] == list(ALL)
    with pytest.raises(ConfigError, match=r"'klingon'; expected one of hermes, .*generic"):
        named_dialect("klingon")
