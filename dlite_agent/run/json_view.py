"""A run for scripts: one JSON object per line for every event, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, TextIO

from dlite_agent.run.events import RunEvent

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


class JsonView:
    """Writes events as lines of ASCII, each at once."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, event: RunEvent) -> None:
        """Write one event; its kind is in `event`."""
        self._out.write(json.dumps(as_json(event), default=str) + "\n")
        self._out.flush()


def as_json(event: RunEvent) -> dict[str, Any]:
    """Return an event as a JSON object: `TurnEndEvent` is of the kind "turn_end"."""
    name = type(event).__name__.removesuffix("Event")
    return {"event": _CAPITAL.sub("_", name).lower(), **asdict(event)}
