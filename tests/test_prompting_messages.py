"""LangChain messages become template messages: own replies verbatim, everything else canonical, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from dlite_agent.errors import PromptError, UnsupportedContentError
from dlite_agent.prompting.messages import message_digest, to_template_messages

CALL = {"name": "get_weather", "args": {"city": "Paris", "days": [1, 2]}, "id": "call_1", "type": "tool_call"}
RAW = 'Let me see.\n<tool_call>\n{"name": "get_weather",  "arguments": {"city": "Paris", "days": [1,2]}}\n</tool_call>'


def own_reply(**changes: Any) -> AIMessage:
    record = {"raw": RAW, "digest": message_digest("Let me see.", [CALL])}
    fields: dict[str, Any] = {"content": "Let me see.", "tool_calls": [CALL], "response_metadata": {"dlite": record}}
    return AIMessage(**{**fields, **changes})


def convert_one(message: BaseMessage, **options: Any) -> dict[str, Any]:
    (converted,) = to_template_messages([message], **options)
    return converted


def test_every_role_is_converted() -> None:
    converted = to_template_messages(
        [
            SystemMessage("Be brief."),
            HumanMessage("Hi", name="ann"),
            AIMessage("", tool_calls=[CALL]),
            ToolMessage("12 °C", tool_call_id="call_1", name="get_weather"),
            AIMessage("It is 12 °C."),
            ChatMessage(content="note", role="critic"),
        ]
    )
    function = {"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}
    assert converted == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "call_1", "function": function}],
        },
        {"role": "tool", "content": "12 °C", "tool_call_id": "call_1", "name": "get_weather"},
        {"role": "assistant", "content": "It is 12 °C."},
        {"role": "critic", "content": "note"},
    ]


@pytest.mark.parametrize("kind", [SystemMessage, HumanMessage, AIMessage])
def test_a_string_and_text_blocks_convert_the_same(kind: type[BaseMessage]) -> None:
    blocks: list[str | dict[str, Any]] = [{"type": "text", "text": "one "}, "two", {"type": "text", "text": "\n"}]
    assert convert_one(kind(content=blocks)) == convert_one(kind(content="one two\n"))
    result = [ToolMessage(content, tool_call_id="c") for content in ("one two\n", blocks)]
    assert convert_one(result[0]) == convert_one(result[1])


def test_an_own_reply_is_rendered_as_it_was_generated_while_nobody_edits_it() -> None:
    assert convert_one(own_reply()) == {"role": "assistant", "content": RAW}
    assert convert_one(own_reply(content=[{"type": "text", "text": "Let me see."}]))["content"] == RAW
    assert convert_one(own_reply(tool_calls=[{**CALL, "id": "other"}]))["content"] == RAW
    chunk = AIMessageChunk(**own_reply().model_dump(include={"content", "tool_calls", "response_metadata"}))
    assert convert_one(chunk)["content"] == RAW


@pytest.mark.parametrize(
    "changes",
    [
        {"content": "Let me look."},
        {"tool_calls": []},
        {"tool_calls": [{**CALL, "args": {"city": "Rome", "days": [1, 2]}}]},
        {"tool_calls": [{**CALL, "name": "get_time"}]},
        {"tool_calls": [CALL, CALL]},
    ],
)
def test_an_edited_reply_is_rendered_from_its_fields(changes: dict[str, Any]) -> None:
    edited = own_reply(**changes)
    converted = convert_one(edited)
    assert converted["content"] == edited.content
    assert len(converted.get("tool_calls", [])) == len(edited.tool_calls)


@pytest.mark.parametrize("record", [{"raw": RAW}, {"raw": RAW, "digest": "0"}, {"raw": None}, "junk", None])
def test_a_record_that_is_not_ours_is_not_believed(record: Any) -> None:
    message = own_reply(response_metadata={"dlite": record})
    assert convert_one(message)["content"] == "Let me see."


def test_a_digest_does_not_depend_on_key_order_and_tells_values_apart() -> None:
    one = message_digest("x", [{"name": "f", "args": {"a": 1, "b": 2}}])
    assert one == message_digest("x", [{"name": "f", "args": {"b": 2, "a": 1}, "id": "i"}])
    assert one != message_digest("x", [{"name": "f", "args": {"a": 1, "b": "2"}}])
    assert message_digest("é\ud800", []) != message_digest("é", [])


def test_a_result_ends_with_the_hint_and_an_error_says_so_once() -> None:
    result = ToolMessage("12 °C", tool_call_id="c")
    assert convert_one(result, result_hint="That is the result.")["content"] == "12 °C\nThat is the result."
    failed = ToolMessage("no such city", tool_call_id="c", status="error")
    assert convert_one(failed)["content"] == "Error: no such city"
    told = ToolMessage("Error: no such city", tool_call_id="c", status="error")
    assert convert_one(told, result_hint="H")["content"] == "Error: no such city\nH"


def test_reasoning_and_repeated_calls_in_an_assistants_content_are_not_its_text() -> None:
    content: list[str | dict[str, Any]] = [
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}},
    ]
    assert convert_one(AIMessage(content=content))["content"] == "Hello"


@pytest.mark.parametrize("kind", ["image_url", "image", "audio", "input_audio", "file", "tool_use"])
def test_content_the_model_cannot_read_is_refused_and_named(kind: str) -> None:
    messages = [HumanMessage("hi"), HumanMessage(content=[{"type": "text", "text": "see"}, {"type": kind, "url": "x"}])]
    with pytest.raises(UnsupportedContentError, match=rf"message 1 \(human\).*{kind}"):
        to_template_messages(messages)
    with pytest.raises(UnsupportedContentError, match="nameless"):
        to_template_messages([HumanMessage(content=[{"url": "x"}])])


def test_what_the_model_cannot_read_of_a_result_is_named_in_its_place() -> None:
    """A refusal would leave a thread that nobody can go on with."""
    content: list[str | dict[str, Any]] = [{"type": "text", "text": "the chart:"}, {"type": "image", "base64": "aGk="}]
    text = convert_one(ToolMessage(content=content, tool_call_id="c"))["content"]
    assert text == "the chart:(image block left out: this model reads text only)"


def test_a_message_that_is_no_part_of_a_conversation_is_refused() -> None:
    with pytest.raises(PromptError, match="no part of a conversation"):
        to_template_messages([RemoveMessage(id="x")])


@pytest.mark.parametrize(("written_in", "is_kept"), [("hermes", True), ("llama3", False), (None, True)])
def test_a_reply_in_another_dialect_is_rendered_from_its_fields(written_in: str | None, is_kept: bool) -> None:
    record: dict[str, Any] = {"raw": RAW, "digest": message_digest("Let me see.", [CALL])}
    record |= {} if written_in is None else {"dialect": written_in}
    converted = convert_one(own_reply(response_metadata={"dlite": record}), dialect="hermes")
    assert converted["content"] == (RAW if is_kept else "Let me see.")
    assert ("tool_calls" in converted) == (not is_kept)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", "\ud800"])
def test_arguments_that_are_no_json_are_refused(value: Any) -> None:
    with pytest.raises(PromptError, match=r"message 0 \(ai\) calls 'get_weather' with arguments that are no JSON"):
        convert_one(own_reply(tool_calls=[{**CALL, "args": {"city": value}}]))
