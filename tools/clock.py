"""The current date and time."""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field

from dlite_agent.tools.factory import make_tool


class CurrentTimeArgs(BaseModel):
    """Arguments of `current_time`."""

    timezone: str = Field(default="UTC", description="Time zone name, for example Europe/Berlin")


def _utc_now() -> datetime:
    return datetime.now(UTC)


def clock_tool(now: Callable[[], datetime] = _utc_now) -> BaseTool:
    """Return the tool `current_time`.

    Args:
        now: Source of the time, with its zone; a fixed one makes sessions reproducible.
    """

    def current_time(timezone: str = "UTC") -> str:
        """Return the current date and time."""
        return now().astimezone(_zone(timezone)).strftime("%Y-%m-%d %H:%M:%S %Z, %A")

    return make_tool(current_time, CurrentTimeArgs)


def _zone(name: str) -> tzinfo:
    if name.strip().upper() in ("", "UTC", "Z"):
        return UTC
    try:
        return zoneinfo.ZoneInfo(name.strip())
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ToolException(f"unknown time zone {name[:80]!r}; expected a name such as UTC or Europe/Berlin") from error
