"""Recorded sessions on disk: JSONL of `id`, `messages` (OpenAI chat format), `system` or `system_ref`, `toolsets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage

from dlite_agent.errors import ConfigError

_Session = TypeVar("_Session")


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
    for number, record in _numbered_records(path):
        if not ids or record["id"] in ids:
            try:
                yield _session(record, path.parent.parent)
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise ConfigError(f"{path}:{number} is not a recorded session ({error!r})") from error


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file, each an object with an id.

    Raises:
        ConfigError: If a line is none.
    """
    return [record for _, record in _numbered_records(file)]


def _numbered_records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); expected a JSONL file of recorded sessions") from error
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}:{number} is no JSON ({error}); expected a recorded session") from error
        if not isinstance(record, dict) or not isinstance(record.get("id"), str):
            raise ConfigError(f"{file}:{number} has no id; expected a recorded session")
        yield number, record


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


def taking_turns(sessions: Iterable[_Session], *, family: Callable[[_Session], str]) -> list[_Session]:
    """Order sessions so that the families alternate: any beginning of the list has something of most of them."""
    by_family: dict[str, list[_Session]] = {}
    for session in sessions:
        by_family.setdefault(family(session), []).append(session)
    rows = zip_longest(*(by_family[name] for name in sorted(by_family)))
    return [session for session in chain.from_iterable(rows) if session is not None]
