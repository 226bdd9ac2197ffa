"""What a call may ask ChatDLite for: every option is used or refused by name."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel

from dlite_agent import ChatDLite, Settings
from dlite_agent.errors import ConfigError, UnsupportedContentError
from dlite_agent.runtime import close_all
from dlite_agent.testing import write_tiny_chat_model


@tool
def get_weather(city: str, days: int = 1) -> str:
    """Tell the weather."""
    return f"{city}: {days} days of sun"


def len_of(text: str) -> int:
    """Tell how long a text is."""
    return len(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"))
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)
    yield ChatDLite(model=str(folder), settings=settings, max_tokens=24)
    close_all()


def merged(chunks: list[Any]) -> AIMessageChunk:
    total = sum(chunks[1:], start=chunks[0])
    assert isinstance(total, AIMessageChunk)
    return total


def numbers(metadata: Any) -> list[float]:
    return [entry["logprob"] for entry in metadata["logprobs"]["content"]]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 0.2}, "temprature.*did you mean temperature.*max_tokens"),
    ({"model": "other"}, "model is no option of a call"),
    ({"top_k": "many"}, "top_k is 'many'"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_draft": 32}, "max_draft is 32"),
    ({"bad_words": "word"}, "bad_words is 'word'"),
    ({"bad_words": [""]}, "bad_words.0 is ''"),
    ({"verification": "trust"}, "verification is 'trust'"),
    ({"n": 0}, "n is 0"),
    ({"logprobs": 5}, "logprobs is 5"),
    ({"top_logprobs": 2}, "top_logprobs is 2 while logprobs is off"),
    ({"min_tokens": 25}, "min_tokens is 25; expected at most max_tokens, 24"),
    ({"strict": "yes"}, "strict is 'yes'"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls is 1"),
    ({"stop": [1]}, r"stop is \[1\]"),
    ({"stop": ["a", ""]}, "stop is"),
    ({"stop": ""}, "stop is ''"),
    ({"response_format": "json"}, "response_format is 'json'"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"session": "alice"}, "session is no option.*did you mean session_id"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
    ({"presence_penalty": 1e300}, "presence_penalty is 1e"),
    ({"frequency_penalty": -101}, "frequency_penalty is -101"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_an_option_that_cannot_work_is_refused_wherever_it_is_given(
    model: ChatDLite, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model.invoke("hello", **options)
    with pytest.raises(ConfigError, match=message):
        list(model.stream("hello", **options))
    with pytest.raises(ConfigError, match=message):
        asyncio.run(model.ainvoke("hello", **options))
    with pytest.raises(ConfigError, match=message):
        model.bind(**options)
    with pytest.raises(ConfigError, match=message):
        model.bind_tools([get_weather], **options)
    with pytest.raises(ConfigError, match=message):
        model.bind_tools([get_weather]).bind(**options).invoke("hello")


@pytest.mark.parametrize(
    "choice", ["nosuch", {"type": "function", "function": {"name": "nosuch"}}, {"type": "function"}, 3]
)
def test_a_choice_of_no_tool_is_refused_when_it_is_bound_and_when_it_is_called(model: ChatDLite, choice: Any) -> None:
    with pytest.raises(ConfigError, match="tool_choice"):
        model.bind_tools([get_weather], tool_choice=choice)
    with pytest.raises(ConfigError, match="tool_choice"):
        model.invoke("hello", tools=[get_weather], tool_choice=choice)


@pytest.mark.parametrize(
    ("choice", "meant"),
    [({"type": "any"}, "any"), ({"type": "tool", "name": "get_weather"}, "get_weather"), ({"type": "auto"}, "auto")],
)
def test_anthropic_s_ways_of_choosing_a_tool_are_known(model: ChatDLite, choice: Any, meant: str) -> None:
    bound: Any = model.bind_tools([get_weather], tool_choice=choice)
    assert bound.kwargs["tool_choice"] == meant


def test_a_forced_call_without_tools_and_a_tool_that_is_none_are_refused(model: ChatDLite) -> None:
    with pytest.raises(ConfigError, match="there are no tools"):
        model.bind_tools([], tool_choice="any")
    with pytest.raises(ConfigError, match="tool 0 is 3"):
        model.bind_tools([3])  # type: ignore[list-item]


def test_what_langchain_passes_along_is_accepted(model: ChatDLite) -> None:
    plain = model.invoke("hello").content
    options: dict[str, Any] = {
        "stream": False,
        "strict": True,
        "parallel_tool_calls": None,
        "tool_choice": None,
        "response_format": {"type": "text"},
        "ls_structured_output_format": {"kwargs": {"method": "json_mode"}, "schema": {"title": "A", "type": "object"}},
    }
    assert model.invoke("hello", **options).content == plain
    assert merged(list(model.stream("hello", **{**options, "stream": True}))).content == plain
    assert asyncio.run(model.bind(**options).ainvoke("hello")).content == plain


def test_tools_given_to_a_call_are_what_bound_ones_are(model: ChatDLite) -> None:
    bound = model.bind_tools([get_weather], tool_choice="any").invoke("hello")
    given = model.invoke("hello", tools=[get_weather], tool_choice="required")
    assert given.invalid_tool_calls[0]["args"] == bound.invalid_tool_calls[0]["args"]
    assert given.usage_metadata == bound.usage_metadata or given.content == bound.content


def test_one_call_per_reply_where_parallel_calls_are_off(model: ChatDLite) -> None:
    @tool
    def ping() -> str:
        """Answer."""
        return "pong"

    options: dict[str, Any] = {"tool_choice": "any", "max_tokens": 400, "temperature": 2.0}
    many = [len(model.bind_tools([ping], **options).invoke("go", seed=seed).tool_calls) for seed in range(4)]
    single = model.bind_tools([ping], parallel_tool_calls=False, **options)
    assert max(many) > 1
    assert [len(single.invoke("go", seed=seed).tool_calls) for seed in range(4)] == [1] * 4


def test_bad_words_are_kept_out_and_a_least_length_is_held(model: ChatDLite) -> None:
    warm = model.bind(temperature=5.0, logit_bias={model.get_token_ids(letter)[0]: 200.0 for letter in "abc"})
    for word in ("ab", "a", " b", "cc"):
        plain = str(warm.invoke("hello").content)
        held = str(warm.invoke("hello", bad_words=[word]).content)
        assert set(plain) == set("abc")
        assert word not in held and (word == " b" or word in plain)
    end = next(iter(model.runtime.end_ids))
    assert model.invoke("hello", logit_bias={end: 1e4}).content == ""
    longer = model.invoke("hello", logit_bias={end: 1e4}, min_tokens=5)
    assert longer.usage_metadata is not None
    assert longer.usage_metadata["output_tokens"] == 6


def test_log_probabilities_come_with_every_token_in_openai_s_form(model: ChatDLite) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    message = model.invoke("hello", **options)
    content = message.response_metadata["logprobs"]["content"]
    assert len(content) == 24
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace") == message.content
    for entry in content:
        assert entry.keys() == {"token", "bytes", "logprob", "top_logprobs"}
        top = [rival["logprob"] for rival in entry["top_logprobs"]]
        assert len(top) == 3 and top == sorted(top, reverse=True)
        assert entry["logprob"] == top[0] <= 0  # greedy
    json.dumps(message.response_metadata["logprobs"], allow_nan=False)
    assert "logprobs" not in model.invoke("hello").response_metadata


def test_streamed_log_probabilities_are_those_of_the_text_so_far(model: ChatDLite) -> None:
    expected = model.invoke("hello", logprobs=True)
    chunks: list[Any] = list(model.stream("hello", logprobs=True))
    seen = text = ""
    for chunk in chunks:
        text += chunk.content
        entries = chunk.response_metadata.get("logprobs", {"content": []})["content"]
        seen += bytes(byte for entry in entries for byte in entry["bytes"]).decode("latin-1")
    assert seen.encode("latin-1").decode(errors="replace") == text == expected.content
    assert numbers(merged(chunks).response_metadata) == pytest.approx(numbers(expected.response_metadata), abs=1e-4)
    assert sum("logprobs" in chunk.response_metadata for chunk in chunks) > 2
    generation: Any = model.generate([[HumanMessage("hello")]], logprobs=True).generations[0][0]
    assert numbers(generation.generation_info) == pytest.approx(numbers(expected.response_metadata), abs=1e-4)


def test_no_log_probabilities_come_for_what_a_stop_string_cut_off(model: ChatDLite) -> None:
    whole = str(model.invoke("hello").content)
    message = model.invoke("hello", stop=[whole[5:8]], logprobs=True)
    spelled = bytes(byte for entry in message.response_metadata["logprobs"]["content"] for byte in entry["bytes"])
    assert spelled.decode(errors="replace") == message.content != whole


def test_several_replies_have_seeds_of_their_own_and_the_first_is_the_single_one(model: ChatDLite) -> None:
    warm = model.bind(temperature=1.5, seed=7)
    single = warm.invoke("hello").content
    result = model.generate([[HumanMessage("hello")]], temperature=1.5, seed=7, n=3)
    texts = [generation.text for generation in result.generations[0]]
    assert texts[0] == single and len(set(texts)) == 3
    assert warm.invoke("hello", n=3).content == single
    again = asyncio.run(model.agenerate([[HumanMessage("hello")]], temperature=1.5, seed=7, n=3))
    assert [generation.text for generation in again.generations[0]] == texts


def test_a_conversation_goes_on_from_the_first_of_several_replies(model: ChatDLite) -> None:
    first = model.invoke("hello", session_id="several", temperature=1.5, n=3)
    assert first.usage_metadata is not None
    total = first.usage_metadata["total_tokens"]
    again = model.invoke([HumanMessage("hello"), first, HumanMessage("and?")], session_id="several")
    assert again.usage_metadata is not None
    assert again.usage_metadata.get("input_token_details", {}).get("cache_read") == total - 1


def test_several_replies_are_not_streamed(model: ChatDLite) -> None:
    with pytest.raises(ConfigError, match="n is 2, but a stream is one reply"):
        next(model.stream("hello", n=2))
    with pytest.raises(ConfigError, match="n is 2, but a stream is one reply"):
        list(model.bind(n=2).stream("hello"))

    async def events() -> list[Any]:
        return [event async for event in model.bind(n=2).astream_events("hello", version="v2")]

    with pytest.raises(ConfigError, match="n is 2, but a stream is one reply"):
        asyncio.run(events())


def test_several_replies_inside_of_what_is_streamed_are_made_whole(model: ChatDLite) -> None:
    chain: Any = RunnableLambda(lambda _: model.invoke("hello", n=2))

    async def ends() -> list[Any]:
        events = [event async for event in chain.astream_events("hello", version="v2")]
        return [event["data"]["output"] for event in events if event["event"] == "on_chat_model_end"]

    assert [message.content for message in asyncio.run(ends())] == [model.invoke("hello").content]


def test_verification_by_rejection_is_the_same_when_greedy_and_needs_the_drafter_to_be_named(model: ChatDLite) -> None:
    assert model.invoke("hello", verification="rejection").content == model.invoke("hello").content
    assert model.invoke("hello", verification="rejection", temperature=1.0).content
    loose = ChatDLite(model=model.model, settings=model.settings, verification="rejection")
    assert {"drafter", "max_draft"} <= loose._identifying_params.keys()
    assert not {"drafter", "max_draft"} & model._identifying_params.keys()


@pytest.mark.parametrize("tools", [None, [], [get_weather], [len_of, {"type": "function", "function": {"name": "b"}}]])
def test_messages_are_counted_as_the_model_is_given_them(model: ChatDLite, tools: Any) -> None:
    first = model.invoke("hello")
    messages: list[Any] = [SystemMessage("be brief"), HumanMessage(["hel", "lö"]), first, HumanMessage("again")]
    reply = model.invoke(messages, tools=tools)
    assert reply.usage_metadata is not None
    assert model.get_num_tokens_from_messages(messages, tools=tools) == reply.usage_metadata["input_tokens"]


@pytest.mark.parametrize("kind", ["image", "image_url", "audio", "video", "file"])
def test_content_that_is_not_read_is_refused_before_any_token(model: ChatDLite, kind: str) -> None:
    messages: list[Any] = [HumanMessage([{"type": "text", "text": "look"}, {"type": kind, "url": "file:///a"}])]
    with pytest.raises(UnsupportedContentError, match=kind):
        model.invoke(messages)
    with pytest.raises(UnsupportedContentError, match=kind):
        model.get_num_tokens_from_messages(messages)


def test_the_profile_knows_the_context_before_the_weights_are_loaded(model: ChatDLite, tmp_path: Any) -> None:
    fresh = ChatDLite(model=model.model, settings=model.settings)
    assert fresh.profile is not None
    assert fresh.profile.get("max_input_tokens") == 4095
    assert fresh.profile.get("tool_calling") and fresh.profile.get("structured_output")
    longest = model.get_num_tokens_from_messages([HumanMessage("")])
    assert model.invoke("x" * (4095 - longest), max_tokens=1).usage_metadata is not None
    del fresh.profile["max_input_tokens"]  # as where nothing is on this machine yet
    fresh.warm_up()
    assert fresh.profile.get("max_input_tokens") == 4095
    unknown = ChatDLite(model="nosuch", settings=Settings(home=tmp_path, offline=True))
    assert unknown.profile is not None and "max_input_tokens" not in unknown.profile


def test_the_model_s_own_stop_strings_stand_unless_a_call_names_others(model: ChatDLite) -> None:
    letters = {model.get_token_ids(letter)[0]: 200.0 for letter in "abc"}
    common: dict[str, Any] = {"temperature": 5.0, "logit_bias": letters, "model": model.model}
    stopping = ChatDLite(**common, settings=model.settings, stop=["b"])
    assert set(str(ChatDLite(**common, settings=model.settings).invoke("hello").content)) == set("abc")
    assert "b" not in str(stopping.invoke("hello").content)
    other = str(stopping.invoke("hello", stop=["c"]).content)
    assert "c" not in other and other != stopping.invoke("hello").content


def test_streaming_that_is_off_gives_one_chunk(model: ChatDLite) -> None:
    whole = ChatDLite(model=model.model, settings=model.settings, max_tokens=24, streaming=False)
    assert [chunk.content for chunk in whole.stream("hello")] == [model.invoke("hello").content]


def test_a_pydantic_class_is_counted_as_the_tool_that_it_is(model: ChatDLite) -> None:
    class Answer(BaseModel):
        """An answer."""

        number: int

    messages: list[Any] = [HumanMessage("x")]
    counted = model.get_num_tokens_from_messages(messages, tools=[Answer])
    reply = model.bind_tools([Answer], tool_choice="none").invoke(messages)
    assert reply.usage_metadata is not None
    assert counted == reply.usage_metadata["input_tokens"] > model.get_num_tokens_from_messages(messages)
