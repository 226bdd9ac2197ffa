"""Notes that an agent keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langchain_core.messages import ToolMessage

from dlite_agent.tools import note_tools
from dlite_agent.tools import notes as notes_module


def run(folder: Path, name: str, /, **arguments: Any) -> ToolMessage:
    (tool,) = (tool for tool in note_tools(folder) if tool.name == name)
    message = tool.invoke({"type": "tool_call", "id": "1", "name": name, "args": arguments})
    assert isinstance(message, ToolMessage)
    return message


def test_a_note_is_kept_until_it_is_replaced(tmp_path: Path) -> None:
    assert run(tmp_path, "list_notes").content == "(no notes)"
    assert run(tmp_path, "save_note", name="plan", text="one\ntwo").content == "saved plan (7 characters)"
    assert run(tmp_path, "save_note", name="a-list", text="").status == "success"
    assert run(tmp_path, "list_notes").content == "a-list\nplan"
    assert run(tmp_path, "read_note", name="plan").content == "one\ntwo"
    assert run(tmp_path, "read_note", name="a-list").content == "(empty)"
    run(tmp_path, "save_note", name="plan", text="three")
    assert run(tmp_path, "read_note", name="plan").content == "three"
    missing = run(tmp_path, "read_note", name="other")
    assert (missing.status, missing.content) == (
        "error",
        "there is no note other; call list_notes to see what there is",
    )


def test_there_are_only_so_many_notes(tmp_path: Path) -> None:
    for number in range(notes_module.MAX_NOTES):
        (tmp_path / f"n{number}.txt").write_text("x")
    (tmp_path / "Not a note.txt").write_text("x")
    assert run(tmp_path, "save_note", name="new", text="x").status == "error"
    assert run(tmp_path, "save_note", name="n0", text="y").status == "success"
    assert len(str(run(tmp_path, "list_notes").content).splitlines()) == notes_module.MAX_NOTES


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    tools = {tool.name: tool for tool in note_tools(tmp_path / "notes")}
    (tmp_path / "notes").rmdir()
    message = tools["list_notes"].invoke({"type": "tool_call", "id": "1", "name": "list_notes", "args": {}})
    assert "does not exist" in message.content
