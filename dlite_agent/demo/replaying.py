"""`dlite-agent demo --replay FILE`: recorded sessions through the graph, and whether anything was computed twice."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dlite_agent.chat_model import ChatDLite
from dlite_agent.config import Settings
from dlite_agent.demo.replay import ReplayedCall, replay
from dlite_agent.errors import ConfigError
from dlite_agent.recorded import RecordedSession, read_sessions
from dlite_agent.reply import PromptTooLongError
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore


def replay_file(
    path: Path,
    *,
    ids: Sequence[str],
    subset: str | None,
    limit: int | None,
    model: str,
    drafter: str,
    quantize: Any,
    max_tokens: int,
    settings: Settings,
    console: Console,
) -> int:
    """Replay sessions of a file and print a line each; returns 1 if an append-only call prefilled what it had."""
    sessions = list(read_sessions(path, ids=ids, subset=subset))[:limit]
    if not sessions:
        raise ConfigError(f"{path} holds none of the sessions asked for")
    client = connect(settings)
    tenant = f"replay-{uuid.uuid4().hex[:8]}"
    store = SessionStore(client, tenant=tenant)
    chat = ChatDLite(
        model=model,
        drafter=drafter,
        quantize=quantize,
        max_tokens=max_tokens,
        session_store=store,
        settings=settings,
    )
    table = Table("session", "calls", "prompt", "new", "prefilled", "beyond new", "append-only", box=None)
    worst = 0
    try:
        for session in sessions:
            calls = _replay_one(session, chat, RedisSaver(client, tenant=tenant), console)
            append_only = [call for call in calls if call.is_append_only]
            beyond = max((call.num_beyond for call in append_only), default=0)
            worst = max(worst, beyond)
            totals = [sum(getattr(call, name) for call in calls) for name in ("num_prompt", "num_new", "num_prefilled")]
            table.add_row(
                session.id, str(len(calls)), *map(str, totals), str(beyond), f"{len(append_only)}/{len(calls)}"
            )
    finally:
        for key in client.scan_iter(match=store.keys.everything(), count=1000):
            client.unlink(key)
    console.print(table)
    console.print(f"most tokens prefilled beyond the new ones, append-only calls of {len(sessions)} sessions: {worst}")
    return 0 if worst <= 1 else 1


def _replay_one(session: RecordedSession, chat: ChatDLite, saver: RedisSaver, console: Console) -> list[ReplayedCall]:
    """Replay a session as far as the model's context reaches."""
    calls: list[ReplayedCall] = []
    try:
        for call in replay(session, chat, checkpointer=saver, thread_id=session.id):
            calls.append(call)
    except PromptTooLongError as error:
        console.print(f"{session.id}: stopped after {len(calls)} calls, {error}", highlight=False)
    console.print(f"{session.id}: {len(calls)} calls", highlight=False)
    return calls
