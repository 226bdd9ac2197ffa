"""A block of tool calls, from behind the marker that opened it to its end.

Calls may stand one after another, in a list, or separated by `,` and `;`, where the dialect allows several in a block.
A call is given out as soon as what follows it shows that it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlite_agent.prompting.dialects import Dialect
from dlite_agent.prompting.events import Event, invalid_call, read_call
from dlite_agent.prompting.schemas import Schema
from dlite_agent.prompting.spans import NO, OPEN, SPACE, SpanScan, scan_literal, skip_space

_SEPARATORS = ",;"


class BlockScan:
    """Reads one block.

    Args:
        dialect: How calls are written.
        schemas: Name of each bound tool, and the schema of its arguments.

    Attributes:
        rest: The text behind the block, once it has ended; None before.
    """

    def __init__(self, dialect: Dialect, schemas: Mapping[str, Schema]) -> None:
        self._dialect = dialect
        self._form = dialect.form
        self._schemas = schemas
        self._buffer = ""
        self._num_calls = 0
        self._is_owed = False  # a comma promised another call
        self._is_list = False
        self._was_list = False
        self._span: SpanScan | None = None
        self._searched = 0
        self._step: Callable[[list[Event]], bool] = self._scan_between
        self.rest: str | None = None

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; returns the calls that have become certain."""
        self._buffer += text
        events: list[Event] = []
        while self.rest is None and self._step(events):
            pass
        return events

    def close(self, error: str) -> list[Event]:
        """End the reply within the block; returns what was held back. A call that is cut gets the error."""
        cut = [invalid_call(self._form, self._buffer, error)]
        if self._step == self._scan_between:
            is_whole = self._num_calls > 0 and not self._is_owed and self._may_be_marker(self._buffer)
            return [] if is_whole else [*cut]
        end = self._span.find_end(self._buffer) if self._span and self._step == self._scan_call else None
        if end is None:
            return [*cut]
        rest = self._buffer[end:].strip(SPACE)
        after = self._form.after.strip(SPACE)
        rest = rest.removeprefix(after).lstrip(SPACE) if rest.startswith(after) else rest
        call = read_call(self._form, self._buffer[:end], self._schemas)
        if self._may_be_marker(rest) or after.startswith(rest):
            return [call]
        if self._form.find_body(rest, 0) == OPEN:
            return [call, invalid_call(self._form, rest, error)]
        return [*cut]

    # Steps: each looks at the buffer, and returns False when it needs more of the reply.

    def _scan_between(self, events: list[Event]) -> bool:
        """Where a call, a separator or the end of the block may stand."""
        self._drop(skip_space(self._buffer, 0))
        if not self._buffer:
            return False
        if self._take_separator():
            return True
        if self._num_calls and not self._is_list:
            reached = self._scan_markers(0)
            if reached != NO:
                return reached != OPEN and self._leave(self._buffer.removeprefix(self._dialect.call_close))
            if self._was_list or not self._dialect.is_block:
                return self._leave(self._buffer)
        body = self._form.find_body(self._buffer, 0)
        if body == OPEN:
            return False
        if body == NO and self._num_calls and not self._is_list:
            return self._leave(self._buffer)
        self._span = SpanScan(self._form.span, body)
        self._step = self._scan_malformed if body == NO else self._scan_call
        return True

    def _take_separator(self) -> bool:
        char = self._buffer[0]
        if self._is_list and char == "," and self._num_calls and not self._is_owed:
            self._is_owed = True
        elif self._is_list and char == "]" and self._num_calls:
            self._is_list, self._was_list, self._is_owed = False, True, False
        elif char == "[" and self._form.is_listed and not self._num_calls and not self._is_list:
            self._is_list = True
        elif not (char in _SEPARATORS and self._num_calls and self._dialect.is_block and not self._is_list):
            return False
        self._drop(1)
        return True

    def _scan_call(self, events: list[Event]) -> bool:
        assert self._span is not None
        end = self._span.find_end(self._buffer)
        if end is None:
            return False
        follow = self._find_follow(end)
        if follow == OPEN:
            return False
        if follow == NO:
            self._searched = end
            self._step = self._scan_malformed
            return True
        events.append(read_call(self._form, self._buffer[:end], self._schemas))
        self._num_calls += 1
        self._is_owed = False
        self._drop(follow)
        self._step = self._scan_between
        return True

    def _find_follow(self, end: int) -> int:
        """Where the text after a call begins if it may follow a call; else `NO`, or `OPEN` while that is unclear."""
        after = self._form.after.strip(SPACE)
        if after:
            return scan_literal(self._buffer, skip_space(self._buffer, end), after)
        if not self._dialect.call_close:
            return end
        start = skip_space(self._buffer, end)
        if start == len(self._buffer):
            return OPEN
        if self._is_list:
            return start if self._buffer[start] in ",]" else NO
        if self._buffer[start] in _SEPARATORS:
            return start
        reached = (self._scan_markers(start), self._form.find_body(self._buffer, start))
        if max(reached) >= 0:
            return start
        return OPEN if OPEN in reached else NO

    def _scan_malformed(self, events: list[Event]) -> bool:
        """Skip to where another block may begin, or this one ends."""
        closer = self._dialect.call_close or self._dialect.call_open
        at = self._buffer.find(closer, self._searched)
        if at < 0:
            self._searched = max(self._searched, len(self._buffer) - len(closer) + 1)
            return False
        events.append(invalid_call(self._form, self._buffer[:at], self._form.malformed))
        return self._leave(self._buffer[at:].removeprefix(self._dialect.call_close))

    def _scan_markers(self, position: int) -> int:
        """The position if the closing marker or another opening one is there; else `NO`, or `OPEN` if it may be."""
        reached = [scan_literal(self._buffer, position, mark) for mark in self._markers()]
        if max(reached) >= 0:
            return position
        return OPEN if OPEN in reached else NO

    def _may_be_marker(self, text: str) -> bool:
        return any(mark.startswith(text) for mark in self._markers())

    def _markers(self) -> list[str]:
        return [mark for mark in (self._dialect.call_close, self._dialect.call_open) if mark]

    def _leave(self, rest: str) -> bool:
        self.rest = rest
        return False

    def _drop(self, size: int) -> None:
        self._buffer = self._buffer[size:]
