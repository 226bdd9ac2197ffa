"""What the middleware reports while a graph runs, as custom events of LangGraph's stream.

for mode, payload in graph.stream(..., stream_mode=["custom", ...]): a report is a dict with its kind in `dlite`.
"""

from __future__ import annotations

from typing import Any

REPORT_KEY = "dlite"
"""Key of a report that holds its kind; custom events without it are somebody else's."""


def report(runtime: Any, kind: str, **fields: Any) -> None:
    """Write a report to the stream of the running graph; nobody listening is fine.

    Args:
        runtime: LangGraph's `Runtime` or `ToolRuntime` of the node.
        kind: What happened, such as "invalid_calls".
        fields: JSON values.
    """
    writer = getattr(runtime, "stream_writer", None)
    if writer is not None:
        writer({REPORT_KEY: kind, **fields})
