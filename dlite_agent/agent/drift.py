"""Which change of the prompt broke the reuse of KV rows, what it cost, and how to avoid it. Pure functions.

A prompt that only grows is computed once. Whatever changes before its end has everything behind it computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from dlite_agent.agent.turns import is_summary
from dlite_agent.prompting.messages import METADATA_KEY

_SUMMARY = "summary"
Cause = Literal["tools", "system", "changed", "removed", "inserted", "compacted", "evicted", "not_kept", "template"]

ADVICE: Mapping[Cause, str] = {
    "tools": "offer the same tools in the same order in each call; tool_choice='none' withholds them at no cost",
    "system": "keep the system message as it is; what changes belongs at the end of the conversation",
    "changed": "append a message instead of changing one",
    "removed": "remove messages seldom, many at a time, and as late in the conversation as can be",
    "inserted": "put new messages at the end",
    "compacted": "a summary took the place of messages: compact seldom, and keep the start (PrefixCompaction)",
    "evicted": "give the session store more memory, or a longer time to live",
    "not_kept": "call with the same thread_id, and give ChatDLite a session_store so that rows outlive their process",
    "template": "the chat template writes earlier messages anew, as some do with thinking: try reasoning=False",
}


class PromptRecord(TypedDict):
    """What is remembered of a call, as JSON.

    Attributes:
        tools: Digest of the tools.
        system: Digest of the system message.
        messages: Label and digest of each message, the reply last.
        num_tokens: Tokens of prompt and reply, 0 if the model does not say.
    """

    tools: str
    system: str
    messages: list[list[str]]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Drift:
    """A prompt that did not start with the one before it and its reply.

    Attributes:
        cause: What changed.
        message: Index of the first message that differs, the system message not counted; None if it is none.
        label: What that message is.
        num_lost: Tokens that were computed before and had to be computed again.
        num_reused: Tokens that were reused.
    """

    cause: Cause
    message: int | None
    label: str
    num_lost: int
    num_reused: int

    @property
    def advice(self) -> str:
        """How to avoid it."""
        return ADVICE[self.cause]


def record_prompt(
    system: SystemMessage | None, messages: Sequence[BaseMessage], tools: Sequence[Any], reply: AIMessage
) -> PromptRecord:
    """Return what is to be remembered of a call."""
    shown = [tool if isinstance(tool, dict) else convert_to_openai_tool(tool) for tool in tools]
    usage = reply.usage_metadata
    return PromptRecord(
        tools=_digest(shown),
        system=_digest(None if system is None else system.text),
        messages=[[_label(message), _message_digest(message)] for message in (*messages, reply)],
        num_tokens=0 if usage is None else usage["total_tokens"],
    )


def find_drift(before: PromptRecord, now: PromptRecord, reply: AIMessage) -> Drift | None:
    """Compare a call with the one before it.

    Args:
        before: The earlier call.
        now: This call.
        reply: Its reply; its usage says what was reused.

    Returns:
        None if everything was reused that could be, or if the model does not say what it reused.
    """
    usage = reply.usage_metadata
    reused = None if usage is None else (usage.get("input_token_details") or {}).get("cache_read")
    if usage is None or reused is None or not before["num_tokens"]:
        return None
    num_lost = min(before["num_tokens"], usage["input_tokens"]) - 1 - reused
    if num_lost <= 0:
        return None
    changed = _first_change(before, now)
    if changed is None:
        changed = (_unseen_cause(reply, reused), None, "")
    elif changed[0] == "removed" and changed[1] is None:
        return None  # an earlier point of the conversation was taken up again
    return Drift(*changed, num_lost=num_lost, num_reused=reused)


def _first_change(before: PromptRecord, now: PromptRecord) -> tuple[Cause, int | None, str] | None:
    if before["tools"] != now["tools"]:
        return ("tools", None, "")
    if before["system"] != now["system"]:
        return ("system", None, "")
    old, new = before["messages"], now["messages"][:-1]
    index = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    if index == len(old):
        return None
    if index == len(new):
        return ("removed", None, "")
    if new[index][0] == _SUMMARY and new[index] not in old:
        return ("compacted", index, _SUMMARY)
    if old[index + 1 :][:1] == new[index + 1 :][:1]:
        return ("changed", index, new[index][0])
    if new[index] in old[index:]:
        return ("removed", index, old[index][0])
    return ("inserted" if old[index] in new[index:] else "changed", index, new[index][0])


def _unseen_cause(reply: AIMessage, reused: int) -> Cause:
    """Return why reuse fell short although no message changed."""
    record = reply.response_metadata.get(METADATA_KEY)
    stats = record.get("stats") or {} if isinstance(record, Mapping) else {}
    if stats.get("blocks_lost"):
        return "evicted"
    return "template" if reused else "not_kept"


def _label(message: BaseMessage) -> str:
    if is_summary(message):
        return _SUMMARY
    return f"{message.type} {message.name}" if message.name else message.type


def _message_digest(message: BaseMessage) -> str:
    calls = [[call["name"], call["args"]] for call in message.tool_calls] if isinstance(message, AIMessage) else []
    return _digest([message.type, message.content, calls, getattr(message, "status", None)])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
