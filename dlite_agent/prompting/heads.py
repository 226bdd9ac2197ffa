"""The head of a bare call: how a message begins that is a tool call without the dialect's tags.

Small models often answer `{"name": "a_tool", ...` as it is, in a list, or in a code fence. The parser (on text) and the
grammar trigger (on bytes) must agree on what such a beginning is, so both ask `scan_head`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from dlite_agent.prompting.dialects import Dialect
from dlite_agent.prompting.spans import NO, OPEN, SPACE, scan_literal, skip_space


class HeadState(Enum):
    """What a beginning is, as far as it is known."""

    NO = "no bare call, whatever follows"
    OPEN = "may still become a bare call"
    CALL = "a bare call of a bound tool"


@dataclass(frozen=True, slots=True)
class Head:
    """The result of looking at a beginning.

    Attributes:
        state: What it is.
        start: Position of the object's `{`, once there is one; else -1.
        fence: Which of the dialect's fences was opened, if any.
        is_list: Whether the object is in a list.
        typed: The part of the tool's name that is there, once its quote is open; else None.
        is_spread: Whether white space follows the brace: the object is spread over lines, in the model's own style.
    """

    state: HeadState
    start: int = -1
    fence: int | None = None
    is_list: bool = False
    typed: str | None = None
    is_spread: bool = False


_NOT_A_HEAD = Head(HeadState.NO)
_TOO_SHORT = Head(HeadState.OPEN)


def scan_head(text: str, dialect: Dialect, names: Collection[str]) -> Head:
    """Look for the head of a bare call at the beginning of a text.

    A head is white space, a fence's opener or none, `[` or none, and an object whose first key is the dialect's name
    key with a bound tool's name: `{"name": "a_tool"`.

    Args:
        text: The text from its beginning.
        dialect: Gives the fences and the name key.
        names: The bound tools.
    """
    fence, position = _scan_fence(text, dialect)
    if position == OPEN:
        return _TOO_SHORT
    position = skip_space(text, position)
    is_list = text.startswith("[", position)
    if is_list:
        position = skip_space(text, position + 1)
    if position == len(text):
        return _TOO_SHORT
    if text[position] != "{":
        return _NOT_A_HEAD
    start = position
    is_spread = text[start + 1 : start + 2].isspace()
    for literal in ("{", f'"{dialect.bare_form.name_key}"', ":", '"'):
        position = scan_literal(text, skip_space(text, position), literal)
        if position < 0:
            return _NOT_A_HEAD if position == NO else Head(HeadState.OPEN, start, fence, is_list, None, is_spread)
    return Head(_name_state(text, position, names), start, fence, is_list, text[position:], is_spread)


def answer_start(text: str, thinking: tuple[str, str], *, is_thinking: bool) -> int:
    """Where the answer begins in a reply: 0, behind the thinking, or `OPEN` while that goes on.

    Args:
        text: The reply from its beginning.
        thinking: The tags around thinking; it comes first or not at all.
        is_thinking: The prompt has opened it already.
    """
    if not is_thinking and not text.lstrip(SPACE).startswith(thinking[0]):
        return 0
    end = text.find(thinking[1])
    return OPEN if end < 0 else end + len(thinking[1])


def _scan_fence(text: str, dialect: Dialect) -> tuple[int | None, int]:
    position = skip_space(text, 0)
    for index, (opener, _) in enumerate(dialect.fences):
        reached = scan_literal(text, position, opener)
        if reached != NO:
            return index, reached
    return None, position


def _name_state(text: str, position: int, names: Collection[str]) -> HeadState:
    if any(text.startswith(f'{name}"', position) for name in names):
        return HeadState.CALL
    rest = text[position:]
    return HeadState.OPEN if any(f'{name}"'.startswith(rest) for name in names) else HeadState.NO
