"""Stop strings in streamed text: cut before the first one, and never give out the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence

from dlite_agent.errors import ConfigError
from dlite_agent.prompting.spans import overlap


class StopFilter:
    """Passes text on until a stop string appears; what may be the start of one is held back.

    Args:
        stops: Non-empty strings that end the text; they are not part of it.

    Attributes:
        is_stopped: True once a stop string was found; nothing is passed on any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ConfigError("a stop string is empty; expected at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """Return the text that is certain to come before any stop string."""
        if self.is_stopped:
            return ""
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        passed, self._held = self._held, ""
        return passed
