"""The model's reply, as it streams in, split into thinking, text and tool calls.

Text that may still become a call is held back, and released as soon as it is clear that it does not. Calls are given
out whole or not at all. What is given out depends on the reply alone, not on how it was cut into pieces.

The rules: thinking (see `thinking`), which comes first or not at all, holds no calls. A call begins with the dialect's
tag, anywhere; or, at the very beginning of the answer, as a bare or fenced JSON object (also several, or a list) that
names a bound tool and whose arguments validate against the tool's schema. White space before a call belongs to the
protocol, and text after a call is dropped: both are in the raw reply only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlite_agent.prompting.blocks import BlockScan
from dlite_agent.prompting.dialects import Dialect
from dlite_agent.prompting.events import Event, InvalidToolCall, TextDelta, ToolCall, invalid_call, read_call
from dlite_agent.prompting.heads import Head, HeadState, scan_head
from dlite_agent.prompting.schemas import Schema, is_valid
from dlite_agent.prompting.spans import JSON_SPAN, SPACE, SpanScan, overlap, skip_space
from dlite_agent.prompting.thinking import ThinkingSplit

__all__ = ["Event", "InvalidToolCall", "StreamParser", "TextDelta", "ToolCall"]

_TRUNCATED = "the reply hit its length limit inside this call"
_UNCLOSED = "the reply ended inside this call"
_SEPARATORS = ";,]"


class StreamParser:
    """Parses one reply.

    Args:
        dialect: How calls are written.
        tool_schemas: Name of each bound tool, and the JSON schema of its arguments.
        is_thinking: The prompt has opened the model's thinking already, so that the reply begins within it.
    """

    def __init__(self, dialect: Dialect, tool_schemas: Mapping[str, Schema], *, is_thinking: bool = False) -> None:
        self._dialect = dialect
        self._schemas = tool_schemas
        self._thinking = ThinkingSplit(dialect.thinking, is_thinking=is_thinking)
        self._buffer = ""
        self._has_called = False
        self._closer: str | None = None
        self._head = Head(HeadState.OPEN)
        self._object: SpanScan | None = None
        self._block: BlockScan | None = None
        self._step: Callable[[list[Event]], bool] = self._scan_start if tool_schemas else self._scan_text

    @property
    def num_thought(self) -> int:
        """Characters of the reply so far that are not the answer: thinking, its tags, white space around them."""
        return self._thinking.num_chars

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the reply; returns what has become certain."""
        events = self._split(self._thinking.feed(text))
        self._run(events)
        return events

    def close(self, *, truncated: bool) -> list[Event]:
        """End the reply; returns what was held back.

        Args:
            truncated: The reply hit its length limit instead of ending by itself. A call that it cut is invalid.
        """
        events = self._split(self._thinking.close())
        error = _TRUNCATED if truncated else _UNCLOSED
        is_cut_call = truncated or self._has_called or self._dialect.is_bare
        if self._step == self._scan_bare and is_cut_call:
            cut = self._buffer[self._head.start :]
            self._emit(events, invalid_call(self._dialect.bare_form, cut, error))
        elif self._block is None:
            self._step = self._scan_text
            self._run(events)
            self._emit(events, TextDelta(self._buffer))
        if self._block is not None:
            for event in self._block.close(error):
                self._emit(events, event)
        self._buffer, self._block = "", None
        self._step = self._scan_text
        return events

    def _split(self, parts: tuple[str, str]) -> list[Event]:
        """Take a piece of the answer; returns the piece of thinking before it."""
        thought, answer = parts
        self._buffer += answer
        return [TextDelta(thought, is_thinking=True)] if thought else []

    def _run(self, events: list[Event]) -> None:
        while self._step(events):
            pass

    def _emit(self, events: list[Event], event: Event) -> None:
        if not isinstance(event, TextDelta):
            self._has_called = True
        elif self._has_called or not event.text:
            return
        events.append(event)

    # Steps: each looks at the buffer, and returns False when it needs more of the reply.

    def _scan_start(self, events: list[Event]) -> bool:
        """At the beginning of the answer, and again after each bare call."""
        if self._has_called and not self._skip_separators():
            return False
        self._head = scan_head(self._buffer, self._dialect, self._schemas)
        if self._head.state is HeadState.OPEN:
            return False
        if self._head.state is HeadState.NO:
            self._step = self._scan_text
            return True
        self._object = SpanScan(JSON_SPAN, self._head.start)
        self._step = self._scan_bare
        return True

    def _skip_separators(self) -> bool:
        """Drop what may stand between bare calls; False while it is unclear whether the fence is being closed."""
        while True:
            self._buffer = self._buffer[skip_space(self._buffer, 0, also=_SEPARATORS) :]
            if self._closer is None or not self._buffer:
                return True
            if not self._buffer.startswith(self._closer):
                return not self._closer.startswith(self._buffer)
            self._buffer = self._buffer[len(self._closer) :]
            self._closer = None

    def _scan_bare(self, events: list[Event]) -> bool:
        assert self._object is not None
        end = self._object.find_end(self._buffer)
        if end is None:
            return False
        text = self._buffer[self._head.start : end]
        call = self._read_bare(text)
        if call is None:
            self._step = self._scan_text
            return True
        self._emit(events, call)
        if self._head.fence is not None:
            self._closer = self._dialect.fences[self._head.fence][1]
        self._buffer = self._buffer[end:]
        self._step = self._scan_start
        return True

    def _read_bare(self, text: str) -> ToolCall | InvalidToolCall | None:
        """The call that JSON without tags is, or what is wrong with it; None if it is not meant as a call.

        It is where the dialect has no tags, after another call, or if it is right: a bound tool, its arguments, and
        nothing else.
        """
        form = self._dialect.bare_form
        call = read_call(form, text, self._schemas)
        if self._dialect.is_bare:
            return call
        if isinstance(call, ToolCall) and form.is_exact(text) and is_valid(call.args, self._schemas.get(call.name)):
            return call
        if not self._has_called:
            return None
        return invalid_call(form, text, "the arguments do not fit the tool's schema")

    def _scan_text(self, events: list[Event]) -> bool:
        tag = self._dialect.call_open
        position = self._buffer.find(tag)
        if position >= 0:
            self._emit(events, TextDelta(self._buffer[:position].rstrip(SPACE)))
            self._buffer = self._buffer[position + len(tag) :]
            self._block = BlockScan(self._dialect, self._schemas)
            self._step = self._scan_block
            return True
        held = _held_suffix(self._buffer, tag)
        self._emit(events, TextDelta(self._buffer[: len(self._buffer) - held]))
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _scan_block(self, events: list[Event]) -> bool:
        assert self._block is not None
        for event in self._block.feed(self._buffer):
            self._emit(events, event)
        self._buffer = self._block.rest or ""
        if self._block.rest is None:
            return False
        self._block = None
        self._step = self._scan_text
        return True


def _held_suffix(text: str, tag: str) -> int:
    """Length of the suffix that may still be the white space before a tag and the tag's beginning."""
    before = text[: len(text) - overlap(text, tag)]
    return len(text) - len(before.rstrip(SPACE))
