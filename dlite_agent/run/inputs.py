"""What a person types or a script sends, one line at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from dlite_agent.errors import ConfigError
from dlite_agent.run.approval import Answer, parse_answer
from dlite_agent.run.events import ApprovalEvent

_FORMS = '{"message": TEXT}, {"command": "/NAME"} or {"approve": true, false, "always" or {arguments}, "reason": TEXT}'


@dataclass(frozen=True, slots=True)
class Message:
    """What the person says to the agent."""

    text: str


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command, with its slash."""

    line: str


Input = Message | SlashCommand | Answer


class Reader(Protocol):
    """Where input comes from."""

    def read(self, question: ApprovalEvent | None) -> Input | None:
        """Wait for the next input, for an answer if there is a question; None at the end of input.

        Raises:
            ConfigError: If it cannot be understood; the next one may be.
        """
        ...


def read_plain(line: str, *, is_asked: bool) -> Input | None:
    """Read a line of plain text; None if it is blank and nothing is asked.

    Raises:
        ConfigError: If a question is open and the line is no answer.
    """
    text = line.strip()
    if text.startswith("/"):
        return SlashCommand(text)
    if is_asked:
        return parse_answer(text)
    return Message(text) if text else None


def read_json(line: str, *, is_asked: bool) -> Input | None:
    """Read a line that a script sent: a JSON object, or plain text.

    Raises:
        ConfigError: If it is an object of another form, or no answer to an open question.
    """
    if not line.lstrip().startswith("{"):
        return read_plain(line, is_asked=is_asked)
    try:
        fields: dict[str, Any] = json.loads(line)  # what begins with a brace is an object, or no JSON
    except (ValueError, RecursionError) as error:  # nested too deeply is RecursionError
        raise ConfigError(f"the line begins like a JSON object and is none ({error}); expected {_FORMS}") from error
    if fields.keys() == {"message"} and isinstance(fields["message"], str) and fields["message"].strip():
        return Message(fields["message"])
    if fields.keys() == {"command"} and str(fields["command"]).startswith("/"):
        return SlashCommand(str(fields["command"]))
    if "approve" in fields and fields.keys() <= {"approve", "reason"}:
        return _json_answer(fields["approve"], str(fields.get("reason") or ""))
    raise ConfigError(f"the object has the keys {sorted(fields)}; expected {_FORMS}")


def _json_answer(approve: Any, reason: str) -> Answer:
    if isinstance(approve, dict):
        return Answer("edit", args=approve)
    if isinstance(approve, bool):
        return Answer("yes" if approve else "no", reason)
    if approve == "always":
        return Answer("always")
    raise ConfigError(f'approve is {str(approve)[:80]!r}; expected true, false, "always" or an object of arguments')


class LineReader:
    """Reads a script's lines."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def read(self, question: ApprovalEvent | None) -> Input | None:
        """Return the next input that is not blank."""
        while line := self._lines.readline():
            if not line.strip():
                continue
            found = read_json(line, is_asked=question is not None)
            if isinstance(found, Answer) and found.choice == "edit" and found.args is None:
                raise ConfigError("an edit needs its arguments here: e {JSON arguments}")
            return found
        return None
