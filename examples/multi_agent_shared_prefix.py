"""Several agents that share a long briefing: it is computed once, the others find its rows in the session store.

python examples/multi_agent_shared_prefix.py [MODEL]

Needs no running Redis: without REDIS_URL an embedded server is started.
"""

from __future__ import annotations

import operator
import sys
from itertools import pairwise
from typing import Annotated, Any, TypedDict

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph

from dlite_agent import ChatDLite

BRIEFING = (
    "You are one of three editors of a village newspaper. The paper appears on Fridays, has eight pages, and is read "
    "by people of all ages. Sentences are short, names are spelt out, numbers have units, and nobody is made fun of. "
    "An article has a headline, a first sentence that says what happened, and an end that says what comes next. "
    "Today's topic: the bridge over the river is closed for repairs until the end of the month. "
)
ROLES = {
    "reporter": "Write the first sentence of the article.",
    "critic": "Name one thing that readers will ask.",
    "headliner": "Write a headline of five words.",
}


class Desk(TypedDict):
    """What the three have written."""

    notes: Annotated[list[str], operator.add]


def build(model: ChatDLite) -> Any:
    """Return a graph with one node per role; each node has a session of its own in the thread."""

    def editor(role: str) -> Any:
        def write(state: Desk) -> Desk:
            task = f"You are the {role}. {ROLES[role]}"
            reply = model.invoke([SystemMessage(BRIEFING), HumanMessage(task)])
            stats = reply.response_metadata["dlite"]["stats"]
            print(f"{role}: {stats['reused_store']} tokens from the store, {stats['prefilled']} computed")
            return {"notes": [f"{role}: {reply.text}"]}

        return write

    builder = StateGraph(Desk)
    for role in ROLES:
        builder.add_node(role, editor(role))
    path = [START, *ROLES, END]
    for before, after in pairwise(path):
        builder.add_edge(before, after)
    return builder.compile()


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    graph = build(ChatDLite(model=model, max_tokens=40, session_store="auto"))
    desk = graph.invoke({"notes": []}, {"configurable": {"thread_id": "friday"}})
    print(*desk["notes"], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
