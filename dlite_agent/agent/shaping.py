"""The text a tool result has in the prompt: canonical, and of bounded size. Pure functions.

What enters the prompt is what is cached, so the same result has to be the same bytes each time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_LINE_SEARCH = 200  # characters within which a cut moves to the end of a line


@dataclass(frozen=True, slots=True)
class Shaped:
    """A result as the model sees it.

    Attributes:
        text: What enters the prompt.
        handle: Name of the whole text, if `text` is only its head and tail.
        whole: The whole text.
    """

    text: str
    handle: str | None
    whole: str


def shape(text: str, *, max_chars: int) -> Shaped:
    """Return a result's canonical text, cut to head and tail if it has more than `max_chars` characters."""
    whole = canonical_text(text)
    if len(whole) <= max_chars:
        return Shaped(whole, None, whole)
    start = _end_of_line(whole, max_chars * 2 // 3)
    end = len(whole) - max_chars // 3
    end = min(_end_of_line(whole, end), len(whole))
    handle = handle_of(whole)
    left_out = f'... {end - start} of {len(whole)} characters left out: read_result("{handle}", {start}, {end}) ...'
    return Shaped(f"{whole[:start].rstrip()}\n{left_out}\n{whole[end:].lstrip()}", handle, whole)


def canonical_text(text: str) -> str:
    """Return JSON with sorted keys and no spaces; other text with plain line ends and without terminal colours."""
    stripped = text.strip()
    if stripped[:1] in ("{", "["):
        try:
            value = json.loads(stripped, parse_float=_exact, object_pairs_hook=_distinct)
            canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            canonical.encode()
            return canonical
        except (ValueError, RecursionError):
            pass  # it only begins like JSON, or has numbers, keys or characters that would not survive
    return _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n").rstrip()


def handle_of(whole: str) -> str:
    """Return the name of a text; the same text has the same name."""
    return f"r{hashlib.blake2b(whole.encode(errors='surrogatepass'), digest_size=5).hexdigest()}"


def plain_text(content: str | Sequence[str | dict[str, Any]]) -> str | None:
    """Return the text of a message's content, or None if it holds anything else."""
    if isinstance(content, str):
        return content
    parts = []
    for block in content:
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") == "text" and isinstance(block.get("text"), str):
            parts.append(block["text"])
        else:
            return None
    return "\n".join(parts)


def _end_of_line(text: str, position: int) -> int:
    """Return the end of the line near a position, behind it, or the position itself."""
    found = text.find("\n", position, position + _LINE_SEARCH)
    return position if found < 0 else found + 1


def _exact(number: str) -> float:
    value = float(number)
    try:
        is_same = Decimal(number) == Decimal(repr(value))
    except InvalidOperation:  # its exponent is out of all bounds
        is_same = False
    if not is_same:
        raise ValueError(f"{number} is no float")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return found
