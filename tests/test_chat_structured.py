"""Structured output and reasoning of ChatDLite, on random weights: what is whole always parses and validates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field

from dlite_agent import ChatDLite, Settings
from dlite_agent.constraints import GrammarFactory
from dlite_agent.errors import ConfigError, UnsupportedSchemaError
from dlite_agent.prompting.dialects import DIALECTS, Dialect
from dlite_agent.prompting.thinking import ThinkingSplit
from dlite_agent.runtime import close_all
from dlite_agent.structured import IncompleteReplyError, answer_constraint
from dlite_agent.testing import TINY_CHAT_TEMPLATE, byte_tokenizer, write_tiny_chat_model

SEEDS = range(3)


class Place(BaseModel):
    """A place."""

    kind: Literal["city", "lake"]
    height: int = Field(ge=-10, le=4000)


class Trip(BaseModel):
    """A trip to places."""

    name: str = Field(max_length=6)
    places: list[Place] = Field(min_length=1, max_length=2)
    is_far: bool


class TripDict(TypedDict):
    """A trip."""

    kind: Literal["day", "week"]
    is_far: Annotated[bool, ..., "whether it is far"]


TRIP_SCHEMA: dict[str, Any] = {
    "title": "trip",
    "description": "A trip.",
    "type": "object",
    "properties": {"kind": {"enum": ["day", "week"]}, "days": {"type": "integer", "minimum": 1, "maximum": 30}},
    "required": ["kind", "days"],
}


def write_model(root: Path, template: str) -> ChatDLite:
    folder = write_tiny_chat_model(root / "model")
    (folder / "chat_template.jinja").write_text(template)
    settings = Settings(home=root / "home", redis_url=None, threads=1, offline=True)
    return ChatDLite(model=str(folder), settings=settings, max_tokens=400, temperature=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    yield write_model(tmp_path_factory.mktemp("plain"), TINY_CHAT_TEMPLATE)
    close_all()


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    """A model whose template opens its thinking."""
    template = TINY_CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert template != TINY_CHAT_TEMPLATE
    yield write_model(tmp_path_factory.mktemp("thinker"), template)
    close_all()


METHODS: list[Any] = ["function_calling", "json_schema", "json_mode"]


@pytest.mark.parametrize("method", METHODS)
def test_a_pydantic_class_is_made_whatever_the_weights_say(model: ChatDLite, method: Any) -> None:
    made = model.with_structured_output(Trip, method=method)
    for seed in SEEDS:
        assert isinstance(made.invoke("where to?", seed=seed), Trip)
    assert isinstance(asyncio.run(made.ainvoke("where to?")), Trip)
    assert isinstance(list(made.stream("where to?"))[-1], Trip)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("schema", "keys"), [(TripDict, {"kind", "is_far"}), (TRIP_SCHEMA, {"kind", "days"})])
def test_a_dict_is_made_for_a_typed_dict_and_for_a_json_schema(
    model: ChatDLite, method: Any, schema: Any, keys: set[str]
) -> None:
    made = model.with_structured_output(schema, method=method)
    for seed in SEEDS:
        answer = made.invoke("where to?", seed=seed)
        assert set(answer) == keys
        assert answer["kind"] in ("day", "week")


@pytest.mark.parametrize("method", METHODS)
def test_the_thinking_that_a_template_opens_does_not_get_into_the_answer(thinker: ChatDLite, method: Any) -> None:
    answer = thinker.with_structured_output(Trip, method=method, include_raw=True).invoke("where to?")
    assert isinstance(answer["parsed"], Trip)
    assert answer["raw"].response_metadata["dlite"]["raw"].startswith("\n</think>\n\n")
    assert "</think>" not in answer["raw"].content


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [Trip, TripDict, TRIP_SCHEMA])
def test_a_reply_that_was_cut_is_an_error_and_never_half_an_answer(model: ChatDLite, method: Any, schema: Any) -> None:
    cut = model.with_structured_output(schema, method=method, max_tokens=12)
    with pytest.raises(IncompleteReplyError, match=r"cut.*raise max_tokens"):
        cut.invoke("where to?")
    with pytest.raises(OutputParserException):
        asyncio.run(cut.ainvoke("where to?"))
    with pytest.raises(IncompleteReplyError):
        list(cut.stream("where to?"))
    raw = model.with_structured_output(schema, method=method, include_raw=True, max_tokens=12).invoke("where to?")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], IncompleteReplyError)
    assert raw["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_that_a_stop_string_cut_is_an_error_too(model: ChatDLite, method: Any) -> None:
    made = model.with_structured_output(TRIP_SCHEMA, method=method)
    with pytest.raises(IncompleteReplyError, match="leave out the stop strings"):
        made.invoke("where to?", stop="kind")
    with pytest.raises(IncompleteReplyError, match="leave out the stop strings"):
        list(made.stream("where to?", stop="kind"))


def test_json_mode_without_a_schema_gives_an_object(model: ChatDLite) -> None:
    reply = model.with_structured_output(method="json_mode", include_raw=True).invoke("where to?", temperature=0)
    if reply["parsing_error"] is None:
        assert isinstance(reply["parsed"], dict)
    else:  # random weights may never close an object
        assert isinstance(reply["parsing_error"], IncompleteReplyError)
    assert reply["raw"].content.startswith("{")


def test_what_structured_output_cannot_be_is_refused(model: ChatDLite) -> None:
    wrong: Any = "xml"
    with pytest.raises(ConfigError, match="method is 'xml'"):
        model.with_structured_output(Trip, method=wrong)
    with pytest.raises(ConfigError, match="got no schema"):
        model.with_structured_output(None)
    with pytest.raises(ConfigError, match="temprature"):
        model.with_structured_output(Trip, temprature=1)
    for name in ("tools", "tool_choice", "parallel_tool_calls", "response_format"):
        option: dict[str, Any] = {name: None}
        with pytest.raises(ConfigError, match=f"sets {name} itself"):
            model.with_structured_output(Trip, method="json_schema", **option)
    for method in METHODS:
        with pytest.raises(ConfigError):
            model.with_structured_output({"nosuch": 1}, method=method)
    unsupported = {"title": "odd", "description": "x", "type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    with pytest.raises(UnsupportedSchemaError, match=r"properties\.a"):
        model.with_structured_output(unsupported, method="json_schema").invoke("go")


@pytest.mark.parametrize(
    "response_format",
    [TRIP_SCHEMA, {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP_SCHEMA, "strict": True}}],
)
def test_a_response_format_holds_the_text(model: ChatDLite, response_format: Any) -> None:
    chunks: list[Any] = list(model.bind(response_format=response_format).stream("where to?"))
    total = sum(chunks[1:], start=chunks[0])
    assert isinstance(total, AIMessageChunk)
    assert set(json.loads(total.text)) == {"kind", "days"}
    assert total.response_metadata["finish_reason"] == "stop"


def test_a_response_format_gives_the_same_with_and_without_drafts(model: ChatDLite) -> None:
    replies = {model.invoke("where to?", response_format=Trip, max_draft=size).text for size in (0, 3, 15)}
    assert len(replies) == 1


def get_weather(days: int) -> str:
    """Tell the weather."""
    return f"{days} days of sun"


def test_with_tools_a_reply_is_a_call_or_the_answer(model: ChatDLite) -> None:
    bound = model.bind_tools([get_weather], response_format=TRIP_SCHEMA, temperature=2.0)
    kinds = set()
    for seed in range(12):
        message = bound.invoke("go", seed=seed)
        if message.response_metadata["finish_reason"] == "length":
            continue
        kinds.add(bool(message.tool_calls))
        if message.tool_calls:
            assert all(set(call["args"]) == {"days"} for call in message.tool_calls)
            assert not message.content
        else:
            assert set(json.loads(message.text)) == {"kind", "days"}
    assert kinds == {True, False}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("key", ["kind", "name"])  # a call may begin with the latter, too
def test_the_answer_can_be_given_in_every_dialect(dialect: Dialect, key: str) -> None:
    tokenizer = byte_tokenizer()
    grammars = GrammarFactory(tokenizer, vocab_size=len(tokenizer), eos_ids=[tokenizer.eos_token_id])
    tools = [convert_to_openai_tool(get_weather)]
    schema = {"type": "object", "properties": {key: {"enum": ["day", "week"]}}, "required": [key]}
    held = answer_constraint(grammars, schema, tools=tools, dialect=dialect, is_parallel=True, is_thinking=False)
    for token in tokenizer.encode(f'{{"{key}": "day"}}', add_special_tokens=False):
        held.advance(token)
    assert held.finished


@pytest.mark.parametrize("key", ["kind", "name"])
def test_bare_json_is_told_apart_as_a_call_or_the_answer(model: ChatDLite, key: str) -> None:
    schema = {"type": "object", "properties": {key: {"enum": ["day", "week"]}}, "required": [key]}
    bare = ChatDLite(model=model.model, settings=model.settings, dialect="llama3", temperature=3.0, max_tokens=200)
    bound = bare.bind_tools([get_weather], response_format=schema)
    replies = [bound.invoke("go", seed=seed) for seed in range(12)]
    whole = [reply for reply in replies if reply.response_metadata["finish_reason"] != "length"]
    assert all(set(json.loads(reply.text)) == {key} for reply in whole if not reply.tool_calls)
    assert {bool(reply.tool_calls) for reply in whole} == {True, False}


def test_definitions_that_clash_in_one_json_are_refused(model: ChatDLite) -> None:
    def defining(kind: str) -> dict[str, Any]:
        reference = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}
        return {**reference, "$defs": {"A": {"type": kind}}}

    bare = ChatDLite(model=model.model, settings=model.settings, dialect="llama3", max_tokens=5)
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": defining("null")}}]
    assert bare.bind_tools(tools, response_format=defining("null")).invoke("go").text
    with pytest.raises(UnsupportedSchemaError, match=r"\$defs\.A"):
        bare.bind_tools(tools, response_format=defining("boolean")).invoke("go")


@wrap_model_call
def one_call_per_reply(request: ModelRequest, handler: Any) -> Any:
    return handler(request.override(model_settings={"parallel_tool_calls": False}))


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy, lambda schema: schema])
def test_an_agent_ends_with_a_structured_response(model: ChatDLite, strategy: Any) -> None:
    agent: Any = create_agent(model, [], response_format=strategy(Trip), middleware=[one_call_per_reply])
    assert isinstance(agent.invoke({"messages": [HumanMessage("where to?")]})["structured_response"], Trip)


def hold_free_text(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """Have random weights write text of a pattern where tools are shown and may not be called."""
    monkeypatch.setattr(GrammarFactory, "no_call", lambda self, **_: self.regex(pattern))


def test_reasoning_is_a_block_of_its_own(thinker: ChatDLite, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_free_text(monkeypatch, r"\n[a-c]{5}\n</think>\n\n[d-f]{4}")
    bound = thinker.bind_tools([get_weather], tool_choice="none")
    message = bound.invoke("hello")
    thought = message.additional_kwargs["reasoning_content"]
    assert set(thought) <= set("abc") and len(thought) == 5
    assert set(message.text) <= set("def") and len(message.text) == 4
    assert message.content_blocks == [
        {"type": "reasoning", "reasoning": thought},
        {"type": "text", "text": message.text},
    ]
    assert message.usage_metadata is not None
    assert message.usage_metadata.get("output_token_details") == {"reasoning": len(f"\n{thought}\n</think>\n\n")}
    chunks: list[Any] = list(bound.stream("hello"))
    streamed: Any = sum(chunks[1:], start=chunks[0])
    assert streamed.additional_kwargs == message.additional_kwargs
    assert streamed.content == message.content


def test_what_was_thought_stays_in_the_prompt_token_for_token(
    model: ChatDLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_free_text(monkeypatch, r"<think>\n[a-c]{5}\n</think>\n\n[d-f]{4}")
    bound = model.bind_tools([get_weather], tool_choice="none", session_id="thought")
    message = bound.invoke("hello")
    assert len(message.additional_kwargs["reasoning_content"]) == 5 and len(message.text) == 4
    assert message.usage_metadata is not None
    again = bound.invoke([HumanMessage("hello"), message, HumanMessage("and?")])
    assert again.usage_metadata is not None
    cached = again.usage_metadata.get("input_token_details", {}).get("cache_read")
    assert cached == message.usage_metadata["total_tokens"] - 1
    blocks = message.model_copy(update={"content": message.content_blocks})
    messages: list[Any] = [HumanMessage("hello"), blocks]
    assert model.runtime.render(messages, []) == model.runtime.render([HumanMessage("hello"), message], [])


def test_thinking_that_never_ends_is_all_reasoning(thinker: ChatDLite) -> None:
    message = thinker.invoke("hello", max_tokens=30)
    assert message.content == ""
    assert message.additional_kwargs["reasoning_content"] == message.response_metadata["dlite"]["raw"].strip()
    assert message.usage_metadata is not None
    assert message.usage_metadata.get("output_token_details") == {"reasoning": 30}


def test_a_reply_without_thinking_has_no_reasoning(model: ChatDLite) -> None:
    message = model.invoke("hello", max_tokens=30)
    assert isinstance(message, AIMessage)
    assert message.content == message.response_metadata["dlite"]["raw"]
    assert "reasoning_content" not in message.additional_kwargs
    assert message.usage_metadata is not None and "output_token_details" not in message.usage_metadata


def split(pieces: list[str], *, is_thinking: bool) -> tuple[str, str, int]:
    splitter = ThinkingSplit(("<think>", "</think>"), is_thinking=is_thinking)
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.close()]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts), splitter.num_chars


@pytest.mark.parametrize(
    ("reply", "is_thinking", "expected"),
    [
        ("hello", False, ("", "hello", 0)),
        (" \n hello", False, ("", " \n hello", 0)),
        ("<think>\nwhy\n</think>\n\nhello\n", False, ("why", "hello\n", 22)),
        ("\n<think>a < b</think>x</think>", False, ("a < b", "x</think>", 21)),
        ("a\n b\n</think>\n", True, ("a\n b", "", 14)),
        ("cut </thi", True, ("cut </thi", "", 9)),
        ("<thin", False, ("", "<thin", 0)),
        ("<thing>", False, ("", "<thing>", 0)),
        ("<think></think>", False, ("", "", 15)),
        ("x <think>y</think>", False, ("", "x <think>y</think>", 0)),
        ("", False, ("", "", 0)),
    ],
)
def test_thinking_is_split_off_the_same_however_the_reply_is_cut(
    reply: str, is_thinking: bool, expected: tuple[str, str, int]
) -> None:
    assert split([reply], is_thinking=is_thinking) == expected
    assert split(list(reply), is_thinking=is_thinking) == expected


@hypothesis_settings(deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "/think>", "a", " ", "\n", "<thi", "nk>"]), max_size=9
    ),
    is_thinking=st.booleans(),
)
def test_any_cut_of_any_reply_is_split_alike(pieces: list[str], is_thinking: bool) -> None:
    whole = "".join(pieces)
    assert split(pieces, is_thinking=is_thinking) == split([whole], is_thinking=is_thinking)
    assert split(list(whole), is_thinking=is_thinking) == split([whole], is_thinking=is_thinking)
