"""Replays recorded sessions through a LangGraph graph: real prompts that grow like an agent's, and what was reused.

Record k: messages[0..k) are fed, the model generates at assistant index k, then the RECORDED message and its tool
results continue the session. The format is that of the workload files (JSONL of `id`, `messages`, `system` or
`system_ref`, `toolsets`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from dlite_agent.chat_model import ChatDLite
from dlite_agent.errors import ConfigError
from dlite_agent.prompting.messages import METADATA_KEY


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """One recorded session.

    Attributes:
        id: Its name.
        messages: System message first if there is one.
        tools: OpenAI-style tool dicts.
        added_tools: Names of tools that are offered only from a message index on.
    """

    id: str
    messages: tuple[AnyMessage, ...]
    tools: tuple[dict[str, Any], ...]
    added_tools: dict[int, tuple[str, ...]]

    def tools_at(self, index: int) -> list[dict[str, Any]]:
        """Return the tools offered at a message index."""
        later = {name for start, names in self.added_tools.items() if start > index for name in names}
        return [tool for tool in self.tools if tool["function"]["name"] not in later]


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """What one model call of a replay reused.

    Attributes:
        num_prompt: Tokens of the prompt.
        num_new: Prompt tokens behind the longest prefix the session had seen.
        num_prefilled: Prompt tokens that were computed.
        is_append_only: Whether the prompt text continues the one before.
        text: What was generated.
        stats: The call's statistics.
    """

    num_prompt: int
    num_new: int
    num_prefilled: int
    is_append_only: bool
    text: str
    stats: dict[str, Any]

    @property
    def num_beyond(self) -> int:
        """Tokens prefilled though they were not new; at most 1 where reuse works."""
        return self.num_prefilled - self.num_new


class _State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    reply: AIMessage


def read_sessions(path: Path, *, ids: Sequence[str] = (), subset: str | None = None) -> Iterator[RecordedSession]:
    """Read recorded sessions.

    Args:
        path: A JSONL file whose tool lists and long prompts lie beside it in `../tools` and `../prompts`, or the folder
            above with `agent/*.jsonl` and `subsets.json`.
        ids: Which sessions, in the file's order; empty for all.
        subset: A list of ids of `subsets.json`, in addition.

    Raises:
        ConfigError: If a file or a record cannot be read.
    """
    if subset is not None:
        ids = [*ids, *_subset_ids(path, subset)]
    files = sorted(path.glob("agent/*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} holds no agent/*.jsonl; expected a JSONL file or a folder of recorded sessions")
    for file in files:
        yield from _read_file(file, ids)


def _subset_ids(path: Path, subset: str) -> list[str]:
    try:
        subsets = json.loads((path / "subsets.json").read_text())
        return list(subsets[subset])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / 'subsets.json'} has no readable list {subset!r} ({error!r})") from error


def _read_file(path: Path, ids: Sequence[str]) -> Iterator[RecordedSession]:
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); expected a JSONL file of recorded sessions") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not ids or record["id"] in ids:
                yield _session(record, path.parent.parent)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ConfigError(f"{path}:{number} is not a recorded session ({error!r})") from error


def replay(session: RecordedSession, model: ChatDLite, *, checkpointer: Any, thread_id: str) -> Iterator[ReplayedCall]:
    """Replay a session through a graph with a checkpointer; yields one item per assistant turn."""
    config: dict[str, Any] = {"configurable": {"thread_id": thread_id}}
    fed, seen_text = 0, ""
    seen_ids: list[int] = []
    for index, message in enumerate(session.messages):
        if not isinstance(message, AIMessage) or index == 0:
            continue
        tools = session.tools_at(index)
        graph = _graph(model, tools, checkpointer)
        state = graph.invoke({"messages": list(session.messages[fed:index])}, config)
        fed = index
        reply = state["reply"]
        text, ids = _prompt(model, state["messages"], tools, seen_ids)
        stats = reply.response_metadata[METADATA_KEY]["stats"]
        assert reply.usage_metadata is not None
        yield ReplayedCall(
            num_prompt=reply.usage_metadata["input_tokens"],
            num_new=len(ids) - _common(ids, seen_ids),
            num_prefilled=stats["prefilled"],
            is_append_only=text.startswith(seen_text),
            text=str(reply.content),
            stats=stats,
        )
        seen_text, seen_ids = text, ids


def _graph(model: ChatDLite, tools: list[dict[str, Any]], checkpointer: Any) -> Any:
    bound = model.bind_tools(tools) if tools else model

    def reply(state: _State) -> dict[str, Any]:
        return {"reply": bound.invoke(state["messages"])}

    builder = StateGraph(_State)
    builder.add_node("model", reply)
    builder.add_edge(START, "model")
    builder.add_edge("model", END)
    return builder.compile(checkpointer=checkpointer)


def _prompt(
    model: ChatDLite, messages: Sequence[AnyMessage], tools: list[dict[str, Any]], known_ids: list[int]
) -> tuple[str, list[int]]:
    """Render the prompt a call was given, to compare it with the one before."""
    runtime = model.runtime
    text = runtime.render(messages, tools)
    return text, runtime.encoder.encode(text, known_ids)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _session(record: dict[str, Any], root: Path) -> RecordedSession:
    system = record.get("system")
    if system is None and record.get("system_ref"):
        system = (root / "prompts" / f"{Path(record['system_ref']).stem}.txt").read_text()
    messages: list[AnyMessage] = [SystemMessage(system)] if system else []
    offset = len(messages)
    messages += [_message(message) for message in record["messages"]]
    tools = [tool for name in record.get("toolsets") or () for tool in _toolset(root, name)]
    dropped, kept = set(record.get("tools_exclude") or ()), set(record.get("tools_include") or ())
    tools = [
        tool
        for tool in tools
        if tool["function"]["name"] not in dropped and (not kept or tool["function"]["name"] in kept)
    ]
    added = {int(index) + offset: tuple(names) for index, names in (record.get("tools_added_at_message") or {}).items()}
    return RecordedSession(record["id"], tuple(messages), tuple(tools), added)


def _toolset(root: Path, name: str) -> list[dict[str, Any]]:
    path = root / "tools" / f"{name.removeprefix('tools/').removesuffix('.json')}.json"
    tools: list[dict[str, Any]] = json.loads(path.read_text())
    return tools


def _message(message: dict[str, Any]) -> AnyMessage:
    content = message.get("content") or ""
    if message["role"] == "user":
        return HumanMessage(content)
    if message["role"] == "system":
        return SystemMessage(content)
    if message["role"] == "tool":
        return ToolMessage(content, tool_call_id=message["tool_call_id"], name=message.get("name"))
    calls = [
        {
            "name": call["function"]["name"],
            "args": json.loads(call["function"]["arguments"]),
            "id": call["id"],
            "type": "tool_call",
        }
        for call in message.get("tool_calls") or ()
    ]
    return AIMessage(content, tool_calls=calls)
