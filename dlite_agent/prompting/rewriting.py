"""Conversations rewritten for templates that know less than LangChain: what they refuse goes into what they take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dlite_agent.prompting.dialects import Dialect
from dlite_agent.prompting.schemas import Schema

Message = Mapping[str, Any]

_DEFAULT_SYSTEM = "You are a helpful assistant."


def inline_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], dialect: Dialect) -> list[Message]:
    """The tool list and the protocol become part of the system message."""
    has_system = messages[0]["role"] == "system"
    preface = messages[0]["content"] if has_system else _DEFAULT_SYSTEM
    system = {"role": "system", "content": f"{preface}\n\n{dialect.format_tools(tools)}"}
    return [system, *messages[1:]] if has_system else [system, *messages]


def inline_calls(messages: Sequence[Message], dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Calls become part of the assistant's text, as the model would have written them.

    Raises:
        PromptError: The dialect has no way to write one.
    """
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    return [_inline_message(message, dialect, schemas) for message in messages]


def inline_results(messages: Sequence[Message], dialect: Dialect) -> list[Message]:
    """Each run of tool messages becomes one user message."""
    inlined: list[Message] = []
    is_run = False
    for message in messages:
        if message["role"] != "tool":
            inlined.append(message)
            is_run = False
            continue
        result = dialect.format_result(message["content"])
        if is_run:
            result = f"{inlined.pop()['content']}\n{result}"
        inlined.append({"role": "user", "content": result})
        is_run = True
    return inlined


def split_parallel(messages: Sequence[Message]) -> list[Message]:
    """Several calls of one message become one message each, followed by the results of that call."""
    split: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        end = position
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        split += _one_by_one(message, messages[position:end])
        position = end
    return split


def merge_system(messages: Sequence[Message]) -> list[Message]:
    """System messages at the beginning become the beginning of the user's first message."""
    size = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if not size:
        return list(messages)
    text = "\n\n".join(message["content"] for message in messages[:size])
    rest = list(messages[size:])
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{text}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def fit_ids(messages: Sequence[Message], length: int) -> list[Message]:
    """The ids of calls become letters and digits of a given number; the same id always becomes the same one."""
    fitted: list[Message] = []
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            changed["tool_calls"] = [
                {**call, "id": _fit_id(call.get("id", ""), length)} for call in message["tool_calls"]
            ]
        if "tool_call_id" in message:
            changed["tool_call_id"] = _fit_id(message["tool_call_id"], length)
        fitted.append(changed)
    return fitted


def write_arguments(messages: Sequence[Message]) -> list[Message]:
    """Arguments of calls become JSON text."""
    written: list[Message] = []
    for message in messages:
        if not message.get("tool_calls"):
            written.append(message)
            continue
        calls = []
        for call in message["tool_calls"]:
            text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": text}})
        written.append({**message, "tool_calls": calls})
    return written


def _inline_message(message: Message, dialect: Dialect, schemas: Mapping[str, Schema]) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    text = dialect.write([(function["name"], function["arguments"]) for function in functions], schemas)
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {"role": message["role"], "content": content}


def _one_by_one(message: Message, results: Sequence[Message]) -> list[Message]:
    split: list[Message] = []
    waiting = list(results)
    for index, call in enumerate(message["tool_calls"]):
        split.append({**message, "content": "" if index else message["content"], "tool_calls": [call]})
        split += [result for result in waiting if result.get("tool_call_id") == call.get("id")]
        waiting = [result for result in waiting if result.get("tool_call_id") != call.get("id")]
    return split + waiting


def _fit_id(call_id: str, length: int) -> str:
    if len(call_id) == length and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", errors="replace"), digest_size=32).hexdigest()[:length]
