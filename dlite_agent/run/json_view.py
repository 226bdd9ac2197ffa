"""A run for scripts: one JSON object per line for every event, and nothing else."""

from __future__ import annotations

import json
import math
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
        self._out.write(json.dumps(_strict(as_json(event)), default=str, allow_nan=False) + "\n")
        self._out.flush()


def as_json(event: RunEvent) -> dict[str, Any]:
    """Return an event as a JSON object: `TurnEndEvent` is of the kind "turn_end"."""
    name = type(event).__name__.removesuffix("Event")
    return {"event": _CAPITAL.sub("_", name).lower(), **asdict(event)}


def _strict(value: Any) -> Any:
    """Return a value with text in the place of numbers that JSON lacks: a model may write 1e999, a tool answer NaN."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
