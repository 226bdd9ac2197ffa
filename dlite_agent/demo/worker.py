"""The process that is killed and the one that resumes: runs some turns of the task, one JSON event per line.

python -m dlite_agent.demo.worker '{"model": ..., "thread_id": ..., "turns": [...], "workspace": ...}'
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from dlite_agent.config import Settings
from dlite_agent.errors import DLiteError


def emit(**fields: Any) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps(fields, default=str) + "\n")
    sys.stdout.flush()


def run(job: dict[str, Any]) -> None:
    """Run the turns of a job."""
    from dlite_agent.agent import create_dlite_agent
    from dlite_agent.agent.events import as_json, run_turn
    from dlite_agent.chat_model import ChatDLite
    from dlite_agent.sessions.embedded import connect
    from dlite_agent.sessions.saver import RedisSaver
    from dlite_agent.sessions.store import SessionStore
    from dlite_agent.tools import default_tools

    settings = Settings()
    client = connect(settings)
    store = SessionStore(client, tenant=job["tenant"])

    def on_prefill(done: int, total: int) -> None:
        emit(event="prefill", done=done, total=total)

    model = ChatDLite(
        model=job["model"],
        drafter=job["drafter"],
        quantize=job["quantize"],
        session_store=store,
        max_tokens=job["max_tokens"],
        settings=settings,
        on_prefill=on_prefill,
    )
    emit(event="loading", model=job["model"])
    model.warm_up()
    emit(event="ready")
    names = ("list_files", "read_file", "write_file", "calculate")
    tools = [tool for tool in default_tools(Path(job["workspace"])) if tool.name in names]
    graph = create_dlite_agent(model, tools, checkpointer=RedisSaver(client, tenant=job["tenant"]))
    config = {"configurable": {"thread_id": job["thread_id"]}, "recursion_limit": 60}
    for number, text in job["turns"]:
        emit(event="turn", number=number, text=text)
        for event in run_turn(graph, text, config):
            emit(**as_json(event))
        emit(event="turn_done", number=number)
    if job.get("linger"):
        signal.pause()  # between two turns, like any agent that waits for a person; this one is killed here
    state = graph.get_state(config).values
    answer = str(state["messages"][-1].content)
    emit(event="end", todos=state.get("todos") or [], answer=answer, num_messages=len(state["messages"]))


def main() -> int:
    """Run the job given on the command line."""
    try:
        run(json.loads(sys.argv[1]))
    except DLiteError as error:
        emit(event="error", kind=type(error).__name__, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
