"""The model's reply, as it streams in, split into text and tool calls.

Text that may still become a call is held back, and released as soon as it is clear that it does not. Calls are given
out whole or not at all. What is given out depends on the reply alone, not on how it was cut into pieces.

The rules: a call begins with the dialect's tag, anywhere; or, at the very beginning of the reply, as a bare or fenced
JSON object (also several, or a list) that names a bound tool and whose arguments validate against the tool's schema.
White space before a call belongs to the protocol, and text after a call is dropped: both are in the raw reply only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlite_agent.prompting.dialects import Dialect
from dlite_agent.prompting.heads import SPACE, Head, HeadState, scan_head, skip_space

_TRUNCATED = "the reply hit its length limit inside this call"
_UNCLOSED = "the reply ended inside this call"
_SEPARATORS = ";,]"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text to show."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `raw` is its JSON object as it was written."""

    name: str
    args: dict[str, Any]
    raw: str


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A call that cannot be run; `raw` is its arguments as far as they can be told, `error` says what is wrong."""

    name: str | None
    raw: str
    error: str


Event = TextDelta | ToolCall | InvalidToolCall


class StreamParser:
    """Parses one reply.

    Args:
        dialect: How calls are written.
        tool_schemas: Name of each bound tool, and the JSON schema of its arguments.
    """

    def __init__(self, dialect: Dialect, tool_schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._dialect = dialect
        self._schemas = tool_schemas
        self._buffer = ""
        self._has_called = False
        self._closer: str | None = None
        self._head = Head(HeadState.OPEN)
        self._object: _ObjectScan | None = None
        self._step: Callable[[list[Event]], bool] = self._scan_start if tool_schemas else self._scan_text

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the reply; returns what has become certain."""
        self._buffer += text
        events: list[Event] = []
        self._run(events)
        return events

    def close(self, *, truncated: bool) -> list[Event]:
        """End the reply; returns what was held back.

        Args:
            truncated: The reply hit its length limit instead of ending by itself. A call that it cut is invalid.
        """
        events: list[Event] = []
        error = _TRUNCATED if truncated else _UNCLOSED
        if self._step == self._scan_tag:
            self._emit(events, self._close_tag(error))
        elif self._step == self._scan_bare and (truncated or self._has_called):
            self._emit(events, self._invalid(self._buffer[self._head.start :], error))
        else:
            self._step = self._scan_text
            self._run(events)
            if self._step == self._scan_tag:
                return events + self.close(truncated=truncated)
            self._emit(events, TextDelta(self._buffer))
        self._buffer = ""
        self._step = self._scan_text
        return events

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
        """At the beginning, and again after each bare call."""
        if self._has_called and not self._skip_separators():
            return False
        self._head = scan_head(self._buffer, self._dialect, self._schemas)
        if self._head.state is HeadState.OPEN:
            return False
        if self._head.state is HeadState.NO:
            self._step = self._scan_text
            return True
        self._object = _ObjectScan(self._head.start)
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
        end = self._end_of_object(self._head.start)
        if end is None:
            return False
        text = self._buffer[self._head.start : end]
        call = self._read_call(text)
        is_call = isinstance(call, ToolCall) and self._is_bare_call(text, call)
        if not is_call and not self._has_called:
            self._step = self._scan_text
            return True
        self._emit(events, call if is_call else self._invalid(text, "the arguments do not fit the tool's schema"))
        if self._head.fence is not None:
            self._closer = self._dialect.fences[self._head.fence][1]
        self._buffer = self._buffer[end:]
        self._step = self._scan_start
        return True

    def _scan_text(self, events: list[Event]) -> bool:
        tag = self._dialect.call_open
        position = self._buffer.find(tag)
        if position >= 0:
            self._emit(events, TextDelta(self._buffer[:position].rstrip(SPACE)))
            self._buffer = self._buffer[position + len(tag) :]
            self._object = None
            self._step = self._scan_tag
            return True
        held = _held_suffix(self._buffer, tag)
        self._emit(events, TextDelta(self._buffer[: len(self._buffer) - held]))
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _scan_tag(self, events: list[Event]) -> bool:
        start = skip_space(self._buffer, 0)
        if start == len(self._buffer):
            return False
        if self._buffer[start] != "{":
            return self._skip_malformed(events, start)
        end = self._end_of_object(start)
        if end is None:
            return False
        rest = self._buffer[skip_space(self._buffer, end) :]
        for tag, consumed in ((self._dialect.call_close, len(self._dialect.call_close)), (self._dialect.call_open, 0)):
            if rest.startswith(tag):
                self._emit(events, self._read_call(self._buffer[start:end]))
                self._buffer = rest[consumed:]
                self._step = self._scan_text
                return True
            if tag.startswith(rest):
                return False
        return self._skip_malformed(events, end)

    def _skip_malformed(self, events: list[Event], start: int) -> bool:
        end = self._buffer.find(self._dialect.call_close, start)
        if end < 0:
            return False
        self._emit(events, self._invalid(self._buffer[:end], "the call is not one JSON object"))
        self._buffer = self._buffer[end + len(self._dialect.call_close) :]
        self._step = self._scan_text
        return True

    def _close_tag(self, error: str) -> Event:
        """The call that the end of the reply left open; it is complete if just its closing tag is missing."""
        start = skip_space(self._buffer, 0)
        end = self._end_of_object(start) if self._buffer.startswith("{", start) else None
        if end is not None:
            rest = self._buffer[end:].strip(SPACE)
            if self._dialect.call_close.startswith(rest) or self._dialect.call_open.startswith(rest):
                return self._read_call(self._buffer[start:end])
        return self._invalid(self._buffer, error)

    # Reading a call's JSON object.

    def _end_of_object(self, start: int) -> int | None:
        if self._object is None:
            self._object = _ObjectScan(start)
        return self._object.find_end(self._buffer)

    def _read_call(self, text: str) -> ToolCall | InvalidToolCall:
        try:
            call = _load_object(text)
            name = call.get(self._dialect.name_key)
            if not isinstance(name, str):
                raise ValueError(f"the call has no {self._dialect.name_key!r}")
            args = call.get(self._dialect.arguments_key, {})
            if isinstance(args, str):
                args = _load_object(args)
            if not isinstance(args, dict):
                raise ValueError(f"the {self._dialect.arguments_key!r} of the call are no JSON object")
        except ValueError as error:
            return self._invalid(text, str(error))
        return ToolCall(name, args, text)

    def _is_bare_call(self, text: str, call: ToolCall) -> bool:
        """Whether JSON without tags is meant as a call: a bound tool, its arguments, both right, nothing else."""
        keys = {self._dialect.name_key, self._dialect.arguments_key}
        return _load_object(text).keys() == keys and _is_valid(call.args, self._schemas.get(call.name))

    def _invalid(self, text: str, error: str) -> InvalidToolCall:
        name = re.search(rf'"{re.escape(self._dialect.name_key)}"\s*:\s*"([^"\\]*)"', text)
        args = re.search(rf'"{re.escape(self._dialect.arguments_key)}"\s*:\s*', text)
        raw = text[args.end() :] if args else text.strip(SPACE)
        return InvalidToolCall(name.group(1) if name else None, raw, error)


class _ObjectScan:
    """Finds the end of a JSON object in a growing buffer, looking at each character once."""

    _STRUCTURE = re.compile(r'[{}\[\]"]')
    _STRING = re.compile(r'["\\]')

    def __init__(self, start: int) -> None:
        self._position = start
        self._depth = 0
        self._in_string = False
        self._end: int | None = None

    def find_end(self, buffer: str) -> int | None:
        """The position after the object's last brace, or None while that is not there."""
        while self._end is None:
            stop = (self._STRING if self._in_string else self._STRUCTURE).search(buffer, self._position)
            if stop is None:
                self._position = len(buffer)
                return None
            if stop.group() == "\\":
                if stop.end() == len(buffer):
                    self._position = stop.start()
                    return None
                self._position = stop.end() + 1
                continue
            self._position = stop.end()
            self._take(stop.group())
        return self._end

    def _take(self, char: str) -> None:
        if char == '"':
            self._in_string = not self._in_string
            return
        self._depth += 1 if char in "{[" else -1
        if self._depth == 0:
            self._end = self._position


def _held_suffix(text: str, tag: str) -> int:
    """Length of the suffix that may still be the white space before a tag and the tag's beginning."""
    partial = next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
    before = text[: len(text) - partial]
    return len(text) - len(before.rstrip(SPACE))


def _load_object(text: str) -> dict[str, Any]:
    """Read a JSON object; raises ValueError for anything else, also for numbers and characters that JSON lacks."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)  # models put raw newlines in strings
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("the JSON is no object")
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate would break every store and wire later on
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _is_valid(args: dict[str, Any], schema: Mapping[str, Any] | None) -> bool:
    """Whether arguments fit a schema. A schema that is broken, or refers to another document, fits nothing."""
    from jsonschema import Draft202012Validator, SchemaError  # only bare calls need it
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if schema is None:
        return False
    try:
        Draft202012Validator.check_schema(schema)
        return bool(Draft202012Validator(schema, registry=Registry()).is_valid(args))
    except (SchemaError, Unresolvable):
        return False
