"""Malformed tool calls of every kind, said once and for ever: never run, bounded, reported, ended in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call_chunk
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent.agent import create_dlite_agent
from dlite_agent.agent.invalid_calls import INVALID
from dlite_agent.agent.turns import ENDED_BY
from dlite_agent.testing import ScriptedChatModel

_MAX_CALLS = 4
_MAX_ERROR_CHARACTERS = 600

CUT: dict[str, Any] = {"finish_reason": "length"}


def streamed(args: str | None, *, name: str | None = "add", id: str | None = "s1", **metadata: Any) -> AIMessage:
    """A call as a provider streams it: LangChain reads the arguments."""
    part = tool_call_chunk(name=name, args=args, id=id, index=0)
    return AIMessageChunk(content="", tool_call_chunks=[part], response_metadata=metadata)


def parsed(
    args: str | None, *, name: str | None = "add", id: str | None = "p1", text: str = "", **metadata: Any
) -> AIMessage:
    """A call that a model's own parser found invalid."""
    return AIMessage(
        text,
        invalid_tool_calls=[invalid_tool_call(name=name, args=args, id=id, error=None)],
        response_metadata=metadata,
    )


def whole(
    *args: dict[str, Any], name: str = "add", ids: tuple[str | None, ...] = ("w1",), **metadata: Any
) -> AIMessage:
    """Calls whose JSON is whole, and which are wrong all the same."""
    calls: list[Any] = [{"name": name, "args": a, "id": id} for a, id in zip(args, ids, strict=True)]
    return AIMessage("", tool_calls=calls, response_metadata=metadata)


MALFORMED: dict[str, AIMessage] = {
    # cut by the token limit, at every kind of place
    "cut before the arguments": streamed("", **CUT),
    "cut after the brace": streamed("{", **CUT),
    "cut inside a key": streamed('{"a', **CUT),
    "cut after a key": streamed('{"a"', **CUT),
    "cut after a colon": streamed('{"a":', **CUT),
    "cut inside a number": streamed('{"a": 1, "b": 2', **CUT),
    "cut after a number": streamed('{"a": 1,', **CUT),
    "cut before the brace": streamed('{"a": 1, "b": 2 ', **CUT),
    "cut inside a text": streamed('{"a": 1, "b": "2', **CUT),
    "cut inside an escape": streamed('{"a": "\\u00', **CUT),
    "cut inside a list": streamed('{"a": [1, 2', **CUT),
    "cut inside an object": streamed('{"a": {"x": 1', **CUT),
    "cut, and whole by chance": streamed('{"a": 1, "b": 2}', **CUT),
    "cut, as another provider says it": streamed('{"a": 1, "b": 2}', stop_reason="max_tokens"),
    "cut, and completed by the provider": whole({"a": 1, "b": 2}, **CUT),
    "cut, found by the parser": parsed('<tool_call>{"name": "add", "arguments": {"a": 1', **CUT),
    # no JSON object
    "unclosed": parsed('{"a": 1, "b": 2'),
    "closed twice": streamed('{"a": 1, "b": 2}}'),
    "single quotes": streamed("{'a': 1, 'b': 2}"),
    "bare keys": streamed("{a: 1, b: 2}"),
    "trailing comma": streamed('{"a": 1, "b": 2,}'),
    "missing comma": streamed('{"a": 1 "b": 2}'),
    "python literals": streamed('{"a": None, "b": True}'),
    "a comment": streamed('{"a": 1, /* one */ "b": 2}'),
    "an expression": streamed('{"a": 1 + 1, "b": 2}'),
    "not a number": streamed('{"a": NaN, "b": 2}'),
    "a list": streamed("[1, 2]"),
    "a number": streamed("12"),
    "a text": streamed('"a=1, b=2"'),
    "null": streamed("null"),
    "prose": streamed("please add one and two"),
    "a fence": streamed('```json\n{"a": 1, "b": 2}\n```'),
    "another tag": parsed('<tool_call>{"a": 1}</tool'),
    "two objects": parsed('{"a": 1, "b": 2}{"a": 3, "b": 4}'),
    "nothing": parsed(""),
    "no arguments": parsed(None),
    "a control character": streamed('{"a": "\x00\x01", "b": 2'),
    "very long": parsed('{"a": "' + "x" * 100_000),
    "not unicode": parsed('{"a": "\\ud800'),
    # no name, no id
    "no name": parsed('{"a": 1, "b": 2}', name=None),
    "an empty name": streamed('{"a": 1, "b": 2}', name=""),
    "no id": parsed('{"a": 1', id=None),
    "an empty id": parsed('{"a": 1', id=""),
    "behind text": parsed('{"a": 1', text="Let me add them."),
    "two at once": AIMessage(
        "", invalid_tool_calls=[invalid_tool_call(name="add", args="{", id=id, error=None) for id in ("x", "x")]
    ),
    # whole JSON, wrong call
    "unknown tool": whole({"a": 1, "b": 2}, name="subtract"),
    "a tool's name in capitals": whole({"a": 1, "b": 2}, name="ADD"),
    "missing argument": whole({"a": 1}),
    "no argument": whole({}),
    "wrong type": whole({"a": "one", "b": 2}),
    "null argument": whole({"a": None, "b": 2}),
    "nested argument": whole({"a": {"value": 1}, "b": 2}),
    "list argument": whole({"a": [1], "b": 2}),
    "a schema for arguments": whole({"a": {"type": "integer"}, "b": {"type": "integer"}}),
    "arguments inside arguments": whole({"arguments": {"a": 1, "b": 2}}),
    "misspelt key": whole({"A": 1, "B": 2}),
    "half a number": whole({"a": 1.5, "b": 2}),
    "unknown tool without an id": whole({"a": 1}, name="nothing", ids=(None,)),
    "two wrong ones of one id": whole({"a": 1}, {"b": 1}, ids=("same", "same")),
}


@dataclass(frozen=True, slots=True)
class MalformedReport:
    """What an agent made of a model that says one malformed call again and again.

    Attributes:
        kind: Which of `MALFORMED`.
        faults: What went wrong; empty where the turn was bounded, reported and ended in words, and nothing ran.
    """

    kind: str
    faults: tuple[str, ...]


def try_malformed(kind: str) -> MalformedReport:
    """Have an agent meet a model that says nothing but a malformed call."""
    ran: list[tuple[int, int]] = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        ran.append((a, b))
        return a + b

    model = ScriptedChatModel(script=[MALFORMED[kind]])
    agent = create_dlite_agent(model, [add], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}, "recursion_limit": 60}
    events = list(agent.stream({"messages": [("user", "go")]}, config, stream_mode=["custom", "values"]))
    messages = events[-1][1]["messages"]
    reports = [payload for mode, payload in events if mode == "custom"]
    last, errors = messages[-1], [message for message in messages if isinstance(message, ToolMessage)]
    found = {
        "a call ran": bool(ran),
        "the model was asked too often": len(model.prompts) > _MAX_CALLS,
        "not every call has its error": not is_whole(messages) or not errors,
        "a result is no error of an invalid call": any(
            error.status != "error" or INVALID not in error.additional_kwargs for error in errors
        ),
        "an error is too long": any(len(error.text) > _MAX_ERROR_CHARACTERS for error in errors),
        "the turn did not end in words": not last.text or bool(getattr(last, "tool_calls", None)),
        "its end was not reported": last.additional_kwargs.get(ENDED_BY) != "invalid_calls"
        or not reports
        or reports[-1]["dlite"] != "turn_ended",
    }
    return MalformedReport(kind, tuple(what for what, is_so in found.items() if is_so))


def is_whole(messages: list[BaseMessage]) -> bool:
    """Whether every call has one result behind it, before the next reply, and ids are there and differ."""
    is_due: set[str | None] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in is_due:
                return False
            is_due.remove(message.tool_call_id)
        elif isinstance(message, AIMessage):
            ids = [call["id"] for call in (*message.tool_calls, *message.invalid_tool_calls)]
            if is_due or not all(ids) or len(set(ids)) != len(ids):
                return False
            is_due = set(ids)
    return not is_due
