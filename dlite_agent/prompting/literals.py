"""Reading and writing values that are nearly JSON: Python literals, and FunctionGemma's with quotes of their own.

JSON is read wherever a style allows it to be told apart, for models mix them: `true` is read as `True`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlite_agent.prompting.spans import skip_space

_MAX_DEPTH = 100
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"[^\s,:=()\[\]{}\"'<>|]+")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_SAME = "\\\"'/"


@dataclass(frozen=True, slots=True)
class LiteralStyle:
    """How values are written.

    Attributes:
        quotes: Texts that begin, and end, a string.
        has_escapes: Whether a backslash in a string begins an escape.
        assign: What stands between a name and its value on the outside: `=` or `:`.
        outside: The brackets around the arguments.
        has_bare_keys: Whether keys of objects stand without quotes.
    """

    quotes: tuple[str, ...]
    has_escapes: bool
    assign: str
    outside: str
    has_bare_keys: bool


PYTHON = LiteralStyle(('"', "'"), has_escapes=True, assign="=", outside="()", has_bare_keys=False)


def read_arguments(text: str, style: LiteralStyle) -> dict[str, Any]:
    """The arguments in their brackets.

    Raises:
        ValueError: The text is something else, or more; the message says what was found where.
    """
    reader = _Reader(text, style)
    args = reader.members(style.assign, is_bare=True, closer=style.outside[1])
    if reader.position != len(text):
        raise ValueError(f"text follows the arguments at character {reader.position}")
    return args


def python_literal(value: Any) -> str:
    """A JSON value as Python writes it, with strings as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python_literal(key)}: {python_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    if value is None or isinstance(value, bool):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


class _Reader:
    """Walks over one text; `position` is where it stands."""

    def __init__(self, text: str, style: LiteralStyle) -> None:
        self._text = text
        self._style = style
        self._depth = 0
        self.position = 0

    def members(self, assign: str, *, is_bare: bool, closer: str) -> dict[str, Any]:
        """The members of an object, its brackets included."""
        found: dict[str, Any] = {}

        def read_member() -> None:
            key = self._key(is_bare=is_bare)
            if key in found:
                raise ValueError(f"{key!r} is given twice")
            if not self._takes(assign):
                raise ValueError(f"expected {assign!r} at character {self.position}")
            found[key] = self._value()

        self._items(read_member, closer)
        return found

    def _value(self) -> Any:
        self._skip()
        quote = self._quote()
        if quote is not None:
            return self._string(quote)
        char = self._text[self.position : self.position + 1]
        if char == "{":
            return self.members(":", is_bare=self._style.has_bare_keys, closer="}")
        if char in ("[", "("):
            items: list[Any] = []
            self._items(lambda: items.append(self._value()), "]" if char == "[" else ")")
            return items
        return self._word()

    def _items(self, read_item: Callable[[], None], closer: str) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("the arguments are nested too deeply")
        self.position += 1
        while not self._takes(closer):
            read_item()
            if not self._takes(","):
                if not self._takes(closer):
                    raise ValueError(f"expected ',' or {closer!r} at character {self.position}")
                break
        self._depth -= 1

    def _key(self, *, is_bare: bool) -> str:
        self._skip()
        quote = self._quote()
        if quote is not None and (not is_bare or not self._style.has_escapes):
            return self._string(quote)
        word = _WORD.match(self._text, self.position)
        if not is_bare or word is None:
            raise ValueError(f"expected a name at character {self.position}")
        self.position = word.end()
        return word.group()

    def _word(self) -> Any:
        word = _WORD.match(self._text, self.position)
        if word is None:
            raise ValueError(f"expected a value at character {self.position}")
        text = word.group()
        self.position = word.end()
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _NUMBER.fullmatch(text):
            return int(text) if text.lstrip("+-").isdigit() else float(text)
        raise ValueError(f"{text!r} is neither a number nor a quoted string")

    def _quote(self) -> str | None:
        return next((quote for quote in self._style.quotes if self._text.startswith(quote, self.position)), None)

    def _string(self, quote: str) -> str:
        start = self.position + len(quote)
        end = self._text.find(quote, start)
        while self._style.has_escapes and end >= 0 and self._is_escaped(start, end):
            end = self._text.find(quote, end + 1)
        if end < 0:
            raise ValueError(f"the string at character {self.position} is not closed")
        self.position = end + len(quote)
        text = self._text[start:end]
        return unescape(text) if self._style.has_escapes else text

    def _is_escaped(self, start: int, end: int) -> bool:
        first = end
        while first > start and self._text[first - 1] == "\\":
            first -= 1
        return (end - first) % 2 == 1

    def _takes(self, literal: str) -> bool:
        self._skip()
        if not self._text.startswith(literal, self.position):
            return False
        self.position += len(literal)
        return True

    def _skip(self) -> None:
        self.position = skip_space(self._text, self.position)


def unescape(text: str) -> str:
    """The text of a string's inside; a backslash before any other character stands for itself, as in Python."""
    plain = _ESCAPE.sub(_unescaped, text)
    return _SURROGATES.sub(lambda pair: pair.group().encode("utf-16", "surrogatepass").decode("utf-16"), plain)


def _unescaped(found: re.Match[str]) -> str:
    code = found.group(1) or found.group(2) or found.group(3)
    if code:
        return chr(int(code, 16))
    char = found.group(4)
    return _ESCAPED.get(char, char if char in _SAME else found.group())
