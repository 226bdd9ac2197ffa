"""A process is killed in the middle of a conversation; another takes it up and computes only what is new.

python examples/resume_after_crash.py [MODEL]

Conversation and KV rows are in Redis: at REDIS_URL, or in an embedded server that is started if there is none.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import Any

from dlite_agent import ChatDLite, RedisSaver, SessionStore, Settings, create_dlite_agent
from dlite_agent.sessions.embedded import connect

QUESTIONS = ("Name three colours.", "Now name three animals.", "Which of them is the largest?")


def work(model: str, thread_id: str, first: int) -> None:
    """Ask the questions from `first` on, one a turn."""
    redis = connect(Settings())
    chat = ChatDLite(model=model, max_tokens=40, session_store=SessionStore(redis))
    agent = create_dlite_agent(chat, [], has_plan=False, checkpointer=RedisSaver(redis))
    thread: Any = {"configurable": {"thread_id": thread_id}}
    for question in QUESTIONS[first:]:
        reply = agent.invoke({"messages": [("user", question)]}, thread)["messages"][-1]
        stats = reply.response_metadata["dlite"]["stats"]
        reused = f"{stats['reused_ram']} tokens from RAM, {stats['reused_store']} from Redis"
        print(f"{question} {reply.text!r}\n  {reused}, {stats['prefilled']} computed", flush=True)
        print("turn done", flush=True)


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    thread_id = f"crash-{uuid.uuid4()}"
    server = connect(Settings())  # an embedded server stops with the last process that uses it
    command = [sys.executable, __file__, "--work", model, thread_id]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        for line in victim.stdout:
            print("first process:", line.rstrip(), flush=True)
            if line.startswith("turn done"):
                break
        victim.kill()  # SIGKILL: nothing is tidied up
    print(f"--- killed, exit code {victim.returncode}; a second process takes the thread up", flush=True)
    subprocess.run([*command, "1"], check=True)
    server.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(*sys.argv[1:])
