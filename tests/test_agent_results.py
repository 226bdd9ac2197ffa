"""Tool results in the prompt: the same bytes each time, bounded, and whole in the state of the graph."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent.agent import RepeatGuard, ResultShaper
from dlite_agent.agent.repeat_guard import REPEATED
from dlite_agent.agent.results import MAX_KEPT_CHARS, keep_results
from dlite_agent.agent.shaping import canonical_text, handle_of, shape
from dlite_agent.errors import ConfigError
from dlite_agent.testing import ScriptedChatModel, calling

LOG = "\n".join(f"line {number}: nothing to report" for number in range(1000))
GO: dict[str, Any] = {"messages": [("user", "go")]}
THREAD: dict[str, Any] = {"configurable": {"thread_id": "1"}}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@tool
def read_log() -> str:
    """Read the log."""
    return LOG


def results(messages: list[Any]) -> list[ToolMessage]:
    return [message for message in messages if isinstance(message, ToolMessage)]


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), json_values) | st.lists(json_values), st.randoms())
def test_json_of_one_value_is_one_text_and_keeps_the_value(value: Any, dice: random.Random) -> None:
    def shuffled(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: shuffled(part[key]) for key in dice.sample(list(part), len(part))}
        return [shuffled(item) for item in part] if isinstance(part, list) else part

    text = canonical_text(json.dumps(value))
    assert canonical_text(json.dumps(shuffled(value), indent=3, ensure_ascii=False)) == text
    assert json.loads(text) == value
    assert canonical_text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("{not json}", '{"a": 0.10000000000000000001}', '{"a": 1, "a": 2}', "[" * 5000),
        *("[1e9999999999999999999]", "[1e-9999999999999999999]", r'["\ud800"]'),
    ],
)
def test_what_would_not_survive_as_json_is_left_as_it_is(text: str) -> None:
    assert canonical_text(text) == text


def test_plain_text_loses_colours_and_foreign_line_ends_only() -> None:
    assert canonical_text("\x1b[31mred\x1b[0m\r\n  indented\t\r\n\n") == "red\n  indented"


@settings(deadline=None)
@given(st.text(min_size=0, max_size=3000), st.integers(200, 900))
def test_a_cut_text_is_bounded_and_names_exactly_what_is_missing(text: str, max_chars: int) -> None:
    shaped = shape(text, max_chars=max_chars)
    if shaped.handle is None:
        assert shaped.text == shaped.whole
        return
    assert len(shaped.text) <= max_chars + 400
    first, _, rest = shaped.text.partition(f'read_result("{shaped.handle}", ')
    start, end = (int(number) for number in rest.partition(")")[0].split(", "))
    assert shaped.whole.startswith(first[: first.rindex("\n... ")].rstrip())
    assert shaped.whole[end:].lstrip() == shaped.text.rpartition(" ...\n")[2]
    assert 0 < start < end <= len(shaped.whole)


def test_a_long_result_can_be_read_on_by_its_handle_after_a_restart_and_in_a_fork() -> None:
    handle = handle_of(LOG)
    script = [calling("read_log"), AIMessage("long"), calling("read_result", handle=handle, start=3000, end=3100)]
    saver = InMemorySaver()
    model = ScriptedChatModel(script=[*script, AIMessage("read")])

    def agent() -> Any:
        return create_agent(model, [read_log], middleware=[ResultShaper()], checkpointer=saver)

    (cut,) = results(agent().invoke(GO, THREAD)["messages"])
    assert len(cut.text) < 4400 and cut.text.startswith("line 0") and cut.text.endswith("line 999: nothing to report")
    read = results(agent().invoke(GO, THREAD)["messages"])[-1]  # by another graph, from the checkpoint
    assert read.text == f"{LOG[3000:3100]}\n(characters 3000 to 3100 of {len(LOG)})"
    before = next(state for state in agent().get_state_history(THREAD) if len(state.values["messages"]) == 4)
    model.prompts[:] = model.prompts[:2]
    assert results(agent().invoke(GO, before.config)["messages"])[-1].text == read.text


def test_the_same_result_is_the_same_bytes_and_kept_once() -> None:
    model = ScriptedChatModel(script=[calling("read_log"), AIMessage("a"), calling("read_log"), AIMessage("b")])
    agent: Any = create_agent(model, [read_log], middleware=[ResultShaper(max_chars=500)], checkpointer=InMemorySaver())
    agent.invoke(GO, THREAD)
    first, second = results(agent.invoke(GO, THREAD)["messages"])
    assert first.content == second.content
    assert agent.get_state(THREAD).values["tool_results"] == {handle_of(LOG): LOG}


def test_errors_have_their_status_and_structured_results_their_canonical_text() -> None:
    @tool
    def look(where: str) -> Any:
        """Look around."""
        if where == "nowhere":
            raise ToolException("there is no such place")
        return {"b": [1, 2], "a": {"y": None, "x": "é"}}

    look.handle_tool_error = True
    script = [calling("look", where="nowhere"), calling("look", where="here"), AIMessage("done")]
    agent: Any = create_agent(ScriptedChatModel(script=script), [look], middleware=[ResultShaper()])
    failed, found = results(asyncio.run(agent.ainvoke(GO))["messages"])
    assert (failed.status, failed.text) == ("error", "Error: there is no such place")
    assert (found.status, found.text) == ("success", '{"a":{"x":"é","y":null},"b":[1,2]}')


def test_reading_on_is_bounded_and_refuses_what_is_not_there() -> None:
    handle = handle_of(LOG)
    asked = [{"start": 0}, {"start": len(LOG)}, {"start": 9, "end": 9}, {"start": 5, "end": 10**9}, {"start": -1}]
    script = [calling("read_log"), *(calling("read_result", handle=handle, **args) for args in asked)]
    script += [calling("read_result", handle="r0"), AIMessage("done")]
    agent: Any = create_agent(ScriptedChatModel(script=script), [read_log], middleware=[ResultShaper(max_chars=300)])
    _, *reads = results(agent.invoke(GO)["messages"])
    assert [read.status for read in reads] == ["success", "error", "error", "success", "error", "error"]
    assert max(len(read.text) for read in reads) < 400
    assert "make the call again" in reads[-1].text


def test_a_repeated_long_result_is_recognized() -> None:
    model = ScriptedChatModel(script=[calling("read_log"), calling("read_log"), AIMessage("done")])
    middleware: list[Any] = [RepeatGuard(volatile=["read_log"]), ResultShaper(max_chars=300)]
    agent: Any = create_agent(model, [read_log], middleware=middleware)
    assert [REPEATED in result.additional_kwargs for result in results(agent.invoke(GO)["messages"])] == [False, True]


def test_images_pass_and_blocks_of_text_are_one_text() -> None:
    image = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}

    @tool
    def show(with_image: bool) -> Any:
        """Show it."""
        return [{"type": "text", "text": '{"b": 1, '}, {"type": "text", "text": '"a": 2}'}, *[image] * with_image]

    script = [calling("show", with_image=True), calling("show", with_image=False), AIMessage("done")]
    agent: Any = create_agent(ScriptedChatModel(script=script), [show], middleware=[ResultShaper()])
    shown, read = results(agent.invoke(GO)["messages"])
    assert shown.content[-1] == image
    assert read.content == '{"a":2,"b":1}'


def test_the_oldest_whole_results_are_dropped_first() -> None:
    third = "x" * (MAX_KEPT_CHARS // 3)
    kept: dict[str, str] = {}
    for handle in "abcad":
        kept = keep_results(kept, {handle: third})
    assert list(kept) == ["c", "a", "d"]
    assert list(keep_results(kept, {"huge": third * 4})) == ["huge"]


def test_a_bound_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="200 or more"):
        ResultShaper(max_chars=10)
