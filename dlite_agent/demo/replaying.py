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
from dlite_agent.demo.replay import read_sessions, replay
from dlite_agent.errors import ConfigError
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
    client = connect(settings, keep=True)
    run = uuid.uuid4().hex[:8]
    store = SessionStore(client, tenant=f"replay-{run}")
    saver = RedisSaver(client, tenant=f"replay-{run}")
    chat = ChatDLite(
        model=model,
        drafter=drafter,
        quantize=quantize,
        max_tokens=max_tokens,
        session_store=store,
        settings=settings,
    )
    table = Table("session", "calls", "prompt", "new", "prefilled", "worst beyond new", "append-only", box=None)
    worst = 0
    for session in sessions:
        calls = list(replay(session, chat, checkpointer=saver, thread_id=f"{run}-{session.id}"))
        beyond = max((call.num_beyond for call in calls if call.is_append_only), default=0)
        worst = max(worst, beyond)
        append_only = sum(call.is_append_only for call in calls)
        totals = (
            sum(call.num_prompt for call in calls),
            sum(call.num_new for call in calls),
            sum(call.num_prefilled for call in calls),
        )
        table.add_row(session.id, str(len(calls)), *map(str, totals), str(beyond), f"{append_only}/{len(calls)}")
        console.print(f"{session.id}: {len(calls)} calls", highlight=False)
    console.print(table)
    console.print(f"worst beyond new, append-only calls: {worst}")
    for key in store.client.scan_iter(match=store.keys.everything(), count=1000):
        store.client.unlink(key)
    return 0 if worst <= 1 else 1
