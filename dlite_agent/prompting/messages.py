"""LangChain messages as the dicts that chat templates read.

A reply of ours is rendered from the very text that was generated, for as long as nobody edited the message: that
keeps its tokens, and with them the KV cache, reusable. An edited or foreign reply is rendered from its fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

from dlite_agent.errors import PromptError, UnsupportedContentError

METADATA_KEY = "dlite"
"""Key of our record in an AIMessage's `response_metadata`; it holds `raw` and `digest`, among others."""

_UNSPOKEN_BLOCKS = frozenset(
    {
        "input_json_delta",
        "invalid_tool_call",
        "reasoning",
        "redacted_thinking",
        "thinking",
        "tool_call",
        "tool_call_chunk",
        "tool_use",
    }
)
"""Content blocks of an assistant message that are not its text: reasoning, and calls that `tool_calls` repeats."""


def to_template_messages(
    messages: Sequence[BaseMessage],
    *,
    result_hint: str | None = None,
    error_hint: str | None = None,
    dialect: str | None = None,
) -> list[dict[str, Any]]:
    """Convert a conversation for `ChatTemplate.render`.

    Args:
        messages: The conversation. Content may be a string or a list of text blocks; both render the same.
        result_hint: A line to end every tool result with, for models that need a nudge to go on. It is always
            appended, never moved, so that prompts only grow.
        error_hint: The same for a result with status "error"; `result_hint` if None.
        dialect: How calls are written. A reply that was generated in another dialect is rendered from its fields.

    Raises:
        UnsupportedContentError: A message that is no tool result holds images, audio or other content that the target
            cannot read. In a result, a line says what is left out.
        PromptError: A message is of a kind that is no part of a conversation, or calls with arguments that are no JSON.
    """
    hints = {"success": result_hint, "error": error_hint or result_hint}
    return [_convert(message, index, hints, dialect) for index, message in enumerate(messages)]


def message_digest(content: str | Sequence[str | Mapping[str, Any]], tool_calls: Sequence[Mapping[str, Any]]) -> str:
    """Digest of what a reader sees of an assistant message: its text, and the names and arguments of its calls.

    Ids are left out, since they are not part of what the model wrote.

    Raises:
        UnsupportedContentError: The content holds blocks that are not text.
    """
    calls = [{"name": call["name"], "args": call["args"]} for call in tool_calls]
    seen = {"content": _text_of(content, where="the message", is_assistant=True), "tool_calls": calls}
    canonical = json.dumps(seen, sort_keys=True, separators=(",", ":"), default=repr)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _convert(message: BaseMessage, index: int, hints: Mapping[str, str | None], dialect: str | None) -> dict[str, Any]:
    where = f"message {index} ({message.type})"
    if isinstance(message, AIMessage):
        return _convert_assistant(message, where, dialect)
    text = _text_of(message.content, where=where, is_result=isinstance(message, ToolMessage))
    if isinstance(message, SystemMessage):
        return {"role": "system", "content": text}
    if isinstance(message, HumanMessage):
        named = {"name": message.name} if message.name else {}
        return {"role": "user", "content": text, **named}
    if isinstance(message, ToolMessage):
        return _convert_result(message, text, hints[message.status])
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": text}
    raise PromptError(f"{where} is no part of a conversation; expected system, human, ai, tool or chat messages")


def _convert_assistant(message: AIMessage, where: str, dialect: str | None) -> dict[str, Any]:
    text = _text_of(message.content, where=where, is_assistant=True)
    record = message.response_metadata.get(METADATA_KEY)
    if isinstance(record, Mapping) and isinstance(record.get("raw"), str):
        calls = [dict(call) for call in message.tool_calls]
        is_ours = record.get("dialect", dialect) in (dialect, None)
        if is_ours and record.get("digest") == message_digest(text, calls):
            return {"role": "assistant", "content": record["raw"]}
    converted: dict[str, Any] = {"role": "assistant", "content": text}
    if message.tool_calls:
        converted["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"] or "",
                "function": {"name": call["name"], "arguments": _json_arguments(call, where)},
            }
            for call in message.tool_calls
        ]
    return converted


def _json_arguments(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        json.dumps(call["args"], ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise PromptError(f"{where} calls {call['name']!r} with arguments that are no JSON ({error})") from error
    return dict(call["args"])


def _convert_result(message: ToolMessage, text: str, hint: str | None) -> dict[str, Any]:
    if message.status == "error" and not text.lstrip().lower().startswith("error"):
        text = f"Error: {text}"
    if hint:
        text = f"{text}\n{hint}"
    named = {"name": message.name} if message.name else {}
    return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id, **named}


def _text_of(
    content: str | Sequence[str | Mapping[str, Any]], *, where: str, is_assistant: bool = False, is_result: bool = False
) -> str:
    """Return the text of a message; nobody can take back what a tool has given, so the model is told what it lacks."""
    if isinstance(content, str):
        return _encodable(content)
    parts: list[str] = []
    for block in content:
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            parts.append(block["text"])
        elif is_result:
            parts.append(f"({block.get('type', 'nameless')} block left out: this model reads text only)")
        elif not (is_assistant and block.get("type") in _UNSPOKEN_BLOCKS):
            raise UnsupportedContentError(
                f"{where} holds a {block.get('type', 'nameless')!r} block; this model reads text only: "
                "remove the block or describe it in words"
            )
    return _encodable("".join(parts))


def _encodable(text: str) -> str:
    """Replace lone surrogates, which no tokenizer takes; they come from input that was not UTF-8."""
    return text.encode("utf-8", errors="replace").decode()
