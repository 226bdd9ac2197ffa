"""Finding the end of a call in text that is still growing, looking at each character once.

Every way of writing calls has brackets that nest and quotes in which brackets mean nothing; `SpanStyle` says which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SPACE = " \t\r\n"

OPEN = -1
"""What is there is the beginning of what was looked for, and the rest may follow."""

NO = -2
"""What was looked for is not there, whatever follows."""

TOOL_NAME = re.compile(r"[\w.:/\-]+")
"""A tool's name where it is not in quotes."""


def overlap(text: str, wanted: str) -> int:
    """Return the length of the longest end of a text with which `wanted` begins, but is not whole."""
    longest = min(len(wanted) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(wanted[:size])), 0)


def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


class SpanStyle:
    """The brackets and quotes of a way of writing calls.

    Args:
        opens: Texts that open a bracket.
        closes: Texts that close one, whichever.
        quotes: Text that begins a quotation, and the text that ends it.
        has_escapes: Whether a backslash in a quotation takes the next character along.
    """

    def __init__(
        self, opens: tuple[str, ...], closes: tuple[str, ...], quotes: Mapping[str, str], *, has_escapes: bool
    ) -> None:
        escapes = ("\\",) if has_escapes else ()
        self.opens = frozenset(opens)
        self.quotes = dict(quotes)
        self.outside = _any_of((*opens, *closes, *quotes))
        self.inside = {opener: _any_of((closer, *escapes)) for opener, closer in quotes.items()}
        self.longest = max(map(len, (*opens, *closes, *quotes, *quotes.values())))


class SpanScan:
    """Finds the end of one bracketed span in a growing buffer.

    Args:
        style: The brackets and quotes.
        start: Position of the bracket that opens the span.
    """

    def __init__(self, style: SpanStyle, start: int) -> None:
        self._style = style
        self._position = start
        self._depth = 0
        self._quote: str | None = None
        self._end: int | None = None

    def find_end(self, buffer: str) -> int | None:
        """The position after the bracket that closes the span, or None while that is not there."""
        while self._end is None:
            tokens = self._style.outside if self._quote is None else self._style.inside[self._quote]
            stop = tokens.search(buffer, self._position)
            if stop is None:  # the buffer may end within a token
                self._position = max(self._position, len(buffer) - self._style.longest + 1)
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

    def _take(self, token: str) -> None:
        if self._quote is not None:
            self._quote = None
            return
        if token in self._style.quotes:
            self._quote = token
            return
        self._depth += 1 if token in self._style.opens else -1
        if self._depth == 0:
            self._end = self._position


JSON_SPAN = SpanStyle(("{", "["), ("}", "]"), {'"': '"'}, has_escapes=True)


def skip_space(text: str, position: int, also: str = "") -> int:
    """The position of the first character that is neither JSON white space nor one of `also`."""
    skipped = SPACE + also
    while position < len(text) and text[position] in skipped:
        position += 1
    return position


def scan_literal(text: str, position: int, literal: str) -> int:
    """The position after the literal, `NO` if it is not there, `OPEN` if it is not there yet."""
    if text.startswith(literal, position):
        return position + len(literal)
    return OPEN if literal.startswith(text[position:]) else NO


def scan_name(text: str, position: int) -> int:
    """The position after a tool's name, `NO` if there is none, `OPEN` while it may go on."""
    found = TOOL_NAME.match(text, position)
    end = found.end() if found else position
    if end == len(text):
        return OPEN
    return end if found else NO
