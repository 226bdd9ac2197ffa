"""ChatDLite on a random-weight model: what LangChain and LangGraph see."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
import torch
from langchain_core._api import LangChainBetaWarning
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import ContextOverflowError
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from dlite_agent import ChatDLite, Settings
from dlite_agent.drafters import checkpoint
from dlite_agent.engine.draft_length import FixedLength
from dlite_agent.errors import ConfigError, DLiteError, StoreUnavailableError, UnsupportedContentError
from dlite_agent.runtime import close_all
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.sessions.inventory import take_inventory
from dlite_agent.sessions.keys import session_id
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import random_dlite, write_tiny_chat_model


def get_weather(city: str, days: int = 1) -> str:
    """Tell the weather."""
    return f"{city}: {days} days of sun"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield str(write_tiny_chat_model(tmp_path_factory.mktemp("model")))
    close_all()


@pytest.fixture
def model(folder: str, settings: Settings) -> ChatDLite:
    return ChatDLite(model=folder, settings=settings, max_tokens=24)


def thread(name: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def stats(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["dlite"]["stats"]
    return found


def test_invoke_stream_and_their_async_twins_say_the_same(model: ChatDLite) -> None:
    expected = model.invoke("hello").content
    assert "".join(str(chunk.content) for chunk in model.stream("hello")) == expected

    async def both() -> tuple[Any, str]:
        whole = (await model.ainvoke("hello")).content
        return whole, "".join([str(chunk.content) async for chunk in model.astream("hello")])

    assert asyncio.run(both()) == (expected, expected)


def test_usage_and_statistics_come_once_on_the_last_chunk(model: ChatDLite) -> None:
    chunks = list(model.stream("hello", session_id="usage"))
    assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].chunk_position == "last"
    total = sum(chunks[1:], start=chunks[0])
    assert isinstance(total, AIMessageChunk)
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == 24
    assert total.response_metadata["finish_reason"] == "length"
    assert total.response_metadata["model_provider"] == "dlite"
    assert len({chunk.id for chunk in chunks}) == 1


def test_cache_read_counts_what_was_not_computed_again(model: ChatDLite) -> None:
    first = model.invoke("hello", session_id="cache")
    again = model.invoke([HumanMessage("hello"), first, HumanMessage("and?")], session_id="cache")
    assert again.usage_metadata is not None
    details = again.usage_metadata.get("input_token_details", {})
    assert details.get("cache_read") == again.usage_metadata["input_tokens"] - stats(again)["prefilled"] > 0
    assert stats(again)["reused_ram"] == details.get("cache_read")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_session_in_sixteen_bits_is_resumed(
    folder: str, settings: Settings, server: EmbeddedServer, dtype: str, tmp_path: Path
) -> None:
    store = SessionStore(server.client(), tenant=dtype)
    halved = replace(settings, dtype=dtype)
    target = ChatDLite(model=folder, settings=halved, drafter="null").runtime.target
    checkpoint.save(random_dlite(target), tmp_path)
    replies = []
    for _ in range(2):
        model = ChatDLite(model=folder, settings=halved, max_tokens=16, drafter=str(tmp_path), session_store=store)
        replies.append(model.invoke("hello", session_id="halves"))
        close_all()
    assert model.runtime.target.dtype is getattr(torch, dtype)
    assert replies[0].content == replies[1].content
    assert stats(replies[0])["prefilled"] > 0
    assert stats(replies[1])["reused_store"] > 0


def test_exact_is_another_target(folder: str, settings: Settings) -> None:
    usual = ChatDLite(model=folder, settings=settings)
    exact = ChatDLite(model=folder, settings=replace(settings, exact=True))
    targets = [model.runtime.target for model in (usual, exact)]
    assert [target.is_exact for target in targets] == [False, True]
    assert targets[0].fingerprint != targets[1].fingerprint


@pytest.mark.parametrize("settings_of_drafting", [{"drafter": "lookup"}, {"drafter": "null"}, {"max_draft": 2}])
def test_the_drafter_changes_no_token(folder: str, settings: Settings, settings_of_drafting: dict[str, Any]) -> None:
    common: dict[str, Any] = {
        "model": folder,
        "settings": settings,
        "max_tokens": 60,
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 5,
    }
    expected = ChatDLite(**common).invoke("tell me").content
    assert ChatDLite(**common, **settings_of_drafting).invoke("tell me").content == expected
    assert ChatDLite(**{**common, "seed": 6}).invoke("tell me").content != expected


@pytest.mark.parametrize(
    "choice", ["any", "get_weather", True, {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_always_fits_its_schema(model: ChatDLite, choice: Any) -> None:
    bound = model.bind_tools([get_weather], tool_choice=choice, max_tokens=400)
    message = bound.invoke("what now?")
    record = message.response_metadata
    if record["finish_reason"] == "length":  # random weights may never close a string: then it says so
        assert not message.tool_calls
        assert message.invalid_tool_calls
        return
    assert record["finish_reason"] == "tool_calls"
    assert all(call["name"] == "get_weather" and set(call["args"]) <= {"city", "days"} for call in message.tool_calls)
    assert message.tool_calls


def test_a_call_that_was_cut_is_invalid_the_same_way_for_invoke_and_stream(model: ChatDLite) -> None:
    bound = model.bind_tools([get_weather], tool_choice="any", max_tokens=40)
    message = bound.invoke("what now?")
    chunks: list[Any] = list(bound.stream("what now?"))
    total = sum(chunks[1:], start=chunks[0])
    assert isinstance(total, AIMessageChunk)
    for reply in (message, total):
        assert reply.tool_calls == []
        assert len(reply.invalid_tool_calls) == 1
        assert reply.response_metadata["finish_reason"] == "length"
    assert message.invalid_tool_calls[0]["args"] == total.invalid_tool_calls[0]["args"]
    assert message.invalid_tool_calls[0]["name"] == "get_weather"


def test_no_tool_choice_means_no_call(model: ChatDLite) -> None:
    message = model.bind_tools([get_weather], tool_choice="none").invoke("what now?")
    assert message.tool_calls == []
    assert message.invalid_tool_calls == []


@pytest.mark.parametrize("start", ["<", "{", "[", "`", " "])
def test_where_no_call_may_be_made_the_text_is_what_it_is_anyway(model: ChatDLite, start: str) -> None:
    (token,) = model.get_token_ids(start)
    bound = model.bind_tools([get_weather], tool_choice="none").bind(logit_bias={token: 60.0}, max_tokens=6)
    assert bound.invoke("what now?").response_metadata["dlite"]["raw"] == start * 6


def test_an_unknown_tool_choice_is_refused_when_it_is_bound(model: ChatDLite) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        model.bind_tools([get_weather], tool_choice="nosuch")


def test_stop_strings_end_the_text_before_them(model: ChatDLite) -> None:
    whole = str(model.invoke("hello").content)
    stop = whole[5:8]
    message = model.invoke("hello", stop=[stop])
    assert message.content == whole[: whole.index(stop)]
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.response_metadata["dlite"]["raw"] == message.content  # nothing behind it enters the next prompt


def test_a_stop_string_inside_an_accepted_draft_is_never_shown(
    model: ChatDLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that repeats itself is drafted several tokens at a time, and the engine may be a pass ahead."""
    monkeypatch.setattr(model.runtime.scheduler, "_planner", FixedLength())  # whatever a pass costs here
    options: dict[str, Any] = {"max_tokens": 80, "logit_bias": {64: 3.0}}
    reply = model.invoke("hello", **options)
    whole = str(reply.content)
    assert sum(stats(reply)["accepted"].values()) > 5
    for start in range(0, len(whole) - 4, 3):
        stop = whole[start : start + 4]
        chunks = [str(chunk.content) for chunk in model.stream("hello", stop=[stop], **options)]
        assert "".join(chunks) == whole[: whole.index(stop)]
        assert not any(stop in "".join(chunks[:n]) for n in range(len(chunks)))


def test_tokens_behind_a_stop_string_are_not_counted_whoever_drafted_them(
    model: ChatDLite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.runtime.scheduler, "_planner", FixedLength())
    options: dict[str, Any] = {"max_tokens": 80, "logit_bias": {64: 3.0}}
    whole = str(model.invoke("hello", **options).content)
    for start in range(0, len(whole) - 4, 3):
        stop = whole[start : start + 4]
        drafted = model.invoke("hello", stop=[stop], **options)
        plain = model.invoke("hello", stop=[stop], max_draft=0, **options)
        assert drafted.usage_metadata == plain.usage_metadata
        assert stats(drafted)["generated"] == stats(plain)["generated"] > sum(stats(drafted)["accepted"].values())


def test_sampling_options_reach_the_engine(model: ChatDLite) -> None:
    plain = model.invoke("hello").content
    assert model.invoke("hello", logit_bias={71: 1e4}, max_tokens=3).content == "hhh"
    assert model.invoke("hello", repetition_penalty=50.0).content != plain
    assert model.invoke("hello", presence_penalty=50.0).content != plain
    assert model.invoke("hello", frequency_penalty=50.0).content != plain
    warm = model.bind(temperature=5.0, seed=1)
    assert warm.invoke("hello").content != plain
    assert warm.bind(min_p=1.0).invoke("hello").content == plain


def test_text_that_is_no_unicode_is_read_with_replacements(model: ChatDLite) -> None:
    assert model.invoke("a\ud800b").content == model.invoke("a?b").content


def test_numbers_that_cannot_work_are_refused_at_once(folder: str) -> None:
    wrongs: list[dict[str, Any]] = [
        {"max_tokens": 0},
        {"top_p": 0.0},
        {"temperature": -1},
        {"max_draft": 99},
        {"nosuch": 1},
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ChatDLite.model_validate({"model": folder, **wrong})


def test_a_call_s_none_means_the_model_s_own_setting(model: ChatDLite) -> None:
    assert stats(model.bind(max_tokens=None, temperature=None).invoke("hello"))["generated"] == 24


def test_tokens_are_counted_with_the_target_s_own_tokenizer(model: ChatDLite) -> None:
    assert model.get_num_tokens("hällo") == 6  # one token per byte


_OPEN_STREAM = """
import sys
from dlite_agent import ChatDLite
stream = ChatDLite(model=sys.argv[1], max_tokens=3000, drafter="null").stream("hello")
next(stream)
sys.exit(3)
"""


def test_leaving_with_a_stream_still_open_is_clean(folder: str) -> None:
    command = [sys.executable, "-c", _OPEN_STREAM, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_prompt_that_is_too_long_says_so_before_any_token(model: ChatDLite) -> None:
    with pytest.raises(ContextOverflowError, match="4096"):
        model.invoke("x" * 5000)
    assert model.invoke("hello").content  # and the engine goes on


def test_an_image_is_refused_before_any_token(model: ChatDLite) -> None:
    picture = HumanMessage([{"type": "image", "url": "file:///a.png"}])
    with pytest.raises(UnsupportedContentError, match="image"):
        model.invoke([picture])


def test_content_in_blocks_reads_like_plain_text(model: ChatDLite) -> None:
    plain = model.invoke([SystemMessage("be brief"), HumanMessage("hello")])
    blocks = model.invoke([SystemMessage([{"type": "text", "text": "be brief"}]), HumanMessage(["hel", "lo"])])
    assert plain.content == blocks.content


def test_eight_calls_at_once_say_what_each_says_alone(model: ChatDLite) -> None:
    questions = [f"question {number}" for number in range(8)]
    expected = [model.invoke(question).content for question in questions]
    got: dict[int, Any] = {}

    def ask(number: int) -> None:
        got[number] = model.invoke(questions[number], session_id=f"s{number}").content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for running in threads:
        running.start()

    async def rest() -> list[Any]:
        return await asyncio.gather(*(model.ainvoke(question) for question in questions[4:]))

    got |= dict(enumerate((message.content for message in asyncio.run(rest())), start=4))
    for running in threads:
        running.join()
    assert [got[number] for number in range(8)] == expected


def test_closing_a_stream_stops_decoding_and_frees_the_session(folder: str, settings: Settings) -> None:
    model = ChatDLite(model=folder, settings=settings, max_tokens=3000, drafter="null")
    stream = model.stream("hello", session_id="closed")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    reply = model.invoke("hello", session_id="closed", max_tokens=10)
    assert stats(reply)["generated"] == 10


def test_cancelling_a_task_stops_decoding(folder: str, settings: Settings) -> None:
    model = ChatDLite(model=folder, settings=settings, max_tokens=3000, drafter="null")

    async def cancelled() -> None:
        task = asyncio.create_task(model.ainvoke("hello"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert stats(model.invoke("hello", max_tokens=5))["generated"] == 5


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def graph(model: ChatDLite, checkpointer: Any) -> Any:
    builder = StateGraph(State)

    def reply(state: State) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    builder.add_node("model", reply)
    builder.add_edge(START, "model")
    builder.add_edge("model", END)
    return builder.compile(checkpointer=checkpointer)


def test_a_thread_goes_on_in_a_process_that_never_saw_it(
    folder: str, settings: Settings, server: EmbeddedServer
) -> None:
    client = server.client()
    config = thread("42")
    uninterrupted = graph(ChatDLite(model=folder, settings=settings, max_tokens=24), RedisSaver(client, tenant="a"))
    for text in ("one", "two"):
        expected = uninterrupted.invoke({"messages": [HumanMessage(text)]}, config)["messages"]

    def process() -> Any:
        store = SessionStore(client, tenant="b")  # a store of its own: nothing is shared in memory
        model = ChatDLite(model=folder, settings=settings, max_tokens=24, session_store=store)
        return graph(model, RedisSaver(client, tenant="b"))

    process().invoke({"messages": [HumanMessage("one")]}, config)
    messages = process().invoke({"messages": [HumanMessage("two")]}, config)["messages"]
    assert [message.content for message in messages] == [message.content for message in expected]
    assert stats(messages[-1])["reused_ram"] == 0
    reused = stats(messages[-1])["reused_store"]
    first = messages[1].usage_metadata
    assert reused == first["input_tokens"] + first["output_tokens"] - 1


def test_a_thread_named_in_the_config_is_stored_however_the_model_is_called(
    folder: str, settings: Settings, server: EmbeddedServer
) -> None:
    store = SessionStore(server.client(), tenant="direct")
    model = ChatDLite(model=folder, settings=settings, max_tokens=4, session_store=store)
    bound = model.bind_tools([get_weather])

    async def asynchronously() -> list[Any]:
        chunks: list[Any] = [chunk async for chunk in model.astream("hi", thread("d"))]
        return [await model.ainvoke("hi", thread("c")), sum(chunks[1:], start=chunks[0])]

    streamed: list[Any] = list(model.stream("hi", thread("b")))
    replies: list[Any] = [model.invoke("hi", thread("a")), sum(streamed[1:], start=streamed[0])]
    replies += asyncio.run(asynchronously())
    replies += [bound.invoke("hi", thread("e")), *model.batch(["hi"], thread("f"))]
    replies += [model.invoke("hi", {"configurable": {"thread_id": 0}}), model.invoke("hi", session_id="g")]
    records = [reply.response_metadata["dlite"] for reply in replies]
    assert all("snapshot" in record for record in records)
    assert len({record["session"] for record in records}) == len(replies)
    assert "snapshot" not in model.invoke("hi").response_metadata["dlite"]
    names = {info.name.thread_id for info in take_inventory(store).sessions if info.name is not None}
    assert names == {*"abcdefg", "0"}


def test_a_failing_store_does_not_lose_what_is_in_memory(folder: str, settings: Settings, tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path)
    store = SessionStore(server.client())
    model = ChatDLite(model=folder, settings=settings, max_tokens=4, session_store=store)
    key = session_id("kept")
    model.invoke("hi", session_id="kept")
    keeper = model.runtime.keeper
    live = keeper.checkout(key, is_stored=True)
    live.lease = None  # as after another worker took over
    keeper.checkin(key, live)
    server.stop()
    with pytest.raises(StoreUnavailableError):
        model.invoke("hi", session_id="kept")
    assert keeper._idle[key] is live


def test_a_fork_finds_its_own_snapshot(folder: str, settings: Settings, server: EmbeddedServer) -> None:
    client = server.client()

    def app() -> Any:
        store = SessionStore(client, tenant="fork")
        model = ChatDLite(model=folder, settings=settings, max_tokens=24, session_store=store)
        return graph(model, RedisSaver(client, tenant="fork"))

    config = thread("fork")
    app().invoke({"messages": [HumanMessage("one")]}, config)
    app().invoke({"messages": [HumanMessage("two")]}, config)
    past = next(snapshot for snapshot in app().get_state_history(config) if len(snapshot.values["messages"]) == 2)
    messages = app().invoke({"messages": [HumanMessage("other")]}, past.config)["messages"]
    assert [message.content for message in messages[:3:2]] == ["one", "other"]
    first = messages[1].usage_metadata
    assert stats(messages[-1])["reused_store"] == first["input_tokens"] + first["output_tokens"] - 1


def test_what_was_generated_stays_verbatim_in_the_prompt_until_it_is_edited(model: ChatDLite) -> None:
    call = AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "Rome"}, "id": "1"}])
    result = ToolMessage("sun", tool_call_id="1", name="get_weather")
    first = model.invoke("hello", session_id="verbatim")
    edited = first.model_copy(update={"content": "something else"})
    kept = model.runtime.render([HumanMessage("hello"), first, call, result], [])
    changed = model.runtime.render([HumanMessage("hello"), edited, call, result], [])
    assert first.response_metadata["dlite"]["raw"] in kept
    assert "something else" in changed


def test_parameters_name_what_decides_the_text_and_not_the_drafter(model: ChatDLite) -> None:
    assert "drafter" not in json.dumps(model._identifying_params)
    assert model._identifying_params["seed"] == 0
    assert model._get_ls_params().get("ls_provider") == "dlite"


def test_a_model_survives_being_dumped_and_loaded(folder: str, settings: Settings) -> None:
    model = ChatDLite(model=folder, settings=settings, max_tokens=5, logit_bias={71: 1e4}, stop=["x"], drafter="null")
    allowed: Any = [ChatDLite]
    with pytest.warns(LangChainBetaWarning):
        loaded = loads(dumps(model), allowed_objects=allowed, valid_namespaces=["dlite_agent"])
    assert loaded._identifying_params == model._identifying_params
    assert (loaded.drafter, loaded.logit_bias) == ("null", {71: 1e4})
    assert loaded.model_copy(update={"settings": settings}).invoke("hello").content == "hhhhh"
    assert str(settings.home) not in dumps(model)


def test_a_cache_is_off_unless_given_and_tells_apart_what_decides_the_text(folder: str, settings: Settings) -> None:
    cache = InMemoryCache()
    set_llm_cache(cache)
    try:
        plain = ChatDLite(model=folder, settings=settings, max_tokens=4)
        expected = plain.invoke("hello")
        assert plain.invoke("hello").id != expected.id
        assert not cache._cache
        caching = plain.model_copy(update={"cache": cache})
        first = caching.invoke("hello")
        assert first.content == expected.content
        assert caching.invoke("hello").response_metadata == first.response_metadata
        others: list[ChatDLite] = [
            caching.model_copy(update={"settings": replace(settings, exact=True)}),
            caching.model_copy(update={"logit_bias": {71: 1e4}}),
            caching.model_copy(update={"max_tokens": 3}),
        ]
        assert len({other._get_llm_string() for other in [caching, *others]}) == 4
        assert [other.invoke("hello").content == first.content for other in others[1:]] == [False, False]
    finally:
        set_llm_cache(None)


_IMPORT = """
import sys

def check(what):
    heavy = {"torch", "transformers", "llguidance", "jsonschema"} | forbidden
    assert not heavy & set(sys.modules), (what, heavy & set(sys.modules))

forbidden = {"langchain", "langchain_core", "langgraph", "numpy", "redis"}
import dlite_agent, dlite_agent.cli
check("import")
forbidden = set()
from dlite_agent import ChatDLite, RedisSaver, SessionStore, Settings
model = ChatDLite(model="smollm2-135m", session_store="auto")
model.bind_tools([{"name": "f", "description": "", "parameters": {}}]).with_config({"configurable": {"thread_id": "1"}})
model.with_structured_output({"title": "a", "type": "object", "properties": {}}, method="json_schema")
check("a model that was not called")
"""


def test_nothing_heavy_is_loaded_before_its_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_these() -> None:
    import dlite_agent

    names = ["ChatDLite", "DLiteError", "RedisSaver", "SessionStore", "Settings", "__version__", "create_dlite_agent"]
    assert dlite_agent.__all__ == names
    assert all(getattr(dlite_agent, name) for name in names)


def test_a_caller_that_stops_reading_stops_the_decoding(folder: str, settings: Settings) -> None:
    model = ChatDLite(model=folder, settings=settings, max_tokens=3000, drafter="null")
    generated = 0
    forward = model.runtime.target.forward_many

    def counting(segments: Any) -> Any:
        nonlocal generated
        generated += 1
        return forward(segments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.runtime.target, "forward_many", counting)
        stream = model.stream("hello")
        next(stream)
        time.sleep(1.5)
        held = generated
        time.sleep(0.5)
        assert generated == held < 40
        stream.close()  # type: ignore[attr-defined]


def test_closing_the_engine_makes_no_success_of_a_reply_that_is_cut_short(folder: str, settings: Settings) -> None:
    model = ChatDLite(model=folder, settings=settings, max_tokens=3000, drafter="null")
    model.warm_up()
    outcomes: list[Any] = []

    def call() -> None:
        try:
            outcomes.append(model.invoke("hello"))
        except DLiteError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    close_all()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    assert all(isinstance(outcome, DLiteError) or stats(outcome)["generated"] == 3000 for outcome in outcomes)


def test_without_a_session_the_messages_alone_decide_the_reply(folder: str, settings: Settings) -> None:
    """The ids a reply was generated with may differ from those of its text; what ran before must not matter."""
    model = ChatDLite(model=folder, settings=settings, max_tokens=24)
    first = model.invoke("hello hello hello")
    messages: list[Any] = [("user", "hello hello hello"), first, ("user", "again")]
    right_after = model.invoke(messages)
    model.invoke("something else")
    later = model.invoke(messages)
    assert right_after.content == later.content
    assert right_after.usage_metadata is not None and later.usage_metadata is not None
    assert right_after.usage_metadata["input_tokens"] == later.usage_metadata["input_tokens"]
