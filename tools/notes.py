"""A small store of named notes, for what an agent should remember between conversations."""

from __future__ import annotations

import re
from pathlib import Path

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field

from dlite_agent.tools.factory import make_tool, shorten
from dlite_agent.tools.files import Workspace

MAX_NOTES = 100
MAX_NOTE_CHARS = 8_000
_NAME = r"^[a-z0-9][a-z0-9_-]{0,40}$"


class SaveNoteArgs(BaseModel):
    """Arguments of `save_note`."""

    name: str = Field(pattern=_NAME, description="Name of the note, for example shopping-list")
    text: str = Field(description="The whole text of the note")


class ReadNoteArgs(BaseModel):
    """Arguments of `read_note`."""

    name: str = Field(pattern=_NAME, description="Name of the note, for example shopping-list")


class ListNotesArgs(BaseModel):
    """Arguments of `list_notes`: none."""


def note_tools(folder: Path) -> list[BaseTool]:
    """Return the tools `save_note`, `read_note` and `list_notes` for one folder; a note is a file NAME.txt there.

    Args:
        folder: Where the notes are; created where it does not exist.

    Raises:
        ConfigError: `folder` cannot be used as a folder.
    """
    notes = Notes(folder)
    return [
        make_tool(notes.save_note, SaveNoteArgs),
        make_tool(notes.read_note, ReadNoteArgs),
        make_tool(notes.list_notes, ListNotesArgs),
    ]


class Notes:
    """Named texts in one folder, at most `MAX_NOTES` of `MAX_NOTE_CHARS` characters."""

    def __init__(self, folder: Path) -> None:
        self._workspace = Workspace(folder)

    def save_note(self, name: str, text: str) -> str:
        """Save a note under a name, in place of an older one."""
        if len(text) > MAX_NOTE_CHARS:
            raise ToolException(f"the note has {len(text)} characters; at most {MAX_NOTE_CHARS} are allowed")
        names = self._names()
        if name not in names and len(names) >= MAX_NOTES:
            raise ToolException(f"there are {len(names)} notes, as many as allowed; save under one of their names")
        self._workspace.write_file(f"{name}.txt", text)
        return f"saved {name} ({len(text)} characters)"

    def read_note(self, name: str) -> str:
        """Read a note."""
        if name not in self._names():
            raise ToolException(f"there is no note {name}; call list_notes to see what there is")
        text = self._workspace.read_text(f"{name}.txt")
        return shorten(text, MAX_NOTE_CHARS, "the note was not written by save_note") or "(empty)"

    def list_notes(self) -> str:
        """List the names of all notes."""
        return "\n".join(self._names()) or "(no notes)"

    def _names(self) -> list[str]:
        stems = [name.removesuffix(".txt") for name in self._workspace.names() if name.endswith(".txt")]
        return sorted(stem for stem in stems if re.fullmatch(_NAME, stem))
