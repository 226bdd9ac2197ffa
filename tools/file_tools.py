"""The file tools of an agent: their names, arguments and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from langchain_core.tools import BaseTool
from pydantic import BaseModel, Field, WithJsonSchema

from dlite_agent.tools.factory import make_tool
from dlite_agent.tools.files import Workspace
from dlite_agent.tools.search import FileSearch


class ListFilesArgs(BaseModel):
    """Arguments of `list_files`."""

    path: str = Field(default=".", description="Folder to list, for example src")


class ReadFileArgs(BaseModel):
    """Arguments of `read_file`."""

    path: str = Field(description="File to read, for example notes.txt")
    start_line: int = Field(default=1, ge=1, description="First line to return")
    end_line: Annotated[int | None, WithJsonSchema({"type": "integer", "minimum": 1})] = Field(
        default=None, ge=1, description="Last line to return"
    )


class WriteFileArgs(BaseModel):
    """Arguments of `write_file`."""

    path: str = Field(description="File to write, for example notes.txt")
    content: str = Field(description="The whole new text of the file")


class EditFileArgs(BaseModel):
    """Arguments of `edit_file`."""

    path: str = Field(description="File to change, for example notes.txt")
    old_text: str = Field(description="Text to replace, exactly as it is in the file; must occur once")
    new_text: str = Field(description="Text to put there")


class FindFilesArgs(BaseModel):
    """Arguments of `find_files`."""

    pattern: str = Field(description="Name or path with * and **, for example *.py or src/**/*.txt")


class SearchFilesArgs(BaseModel):
    """Arguments of `search_files`."""

    text: str = Field(description="Text to look for, for example def main")
    path: str = Field(default=".", description="Folder or file to search, for example src")
    is_regex: bool = Field(default=False, description="True if text is a Python regular expression")


def file_tools(root: Path) -> list[BaseTool]:
    """Return the tools that list, read, write, edit, find and search the files of one folder.

    Args:
        root: The folder; created where it does not exist.

    Raises:
        ConfigError: `root` cannot be used as a folder.
    """
    workspace = Workspace(root)
    search = FileSearch(workspace)
    return [
        make_tool(workspace.list_files, ListFilesArgs),
        make_tool(workspace.read_file, ReadFileArgs),
        make_tool(workspace.write_file, WriteFileArgs),
        make_tool(workspace.edit_file, EditFileArgs),
        make_tool(search.find_files, FindFilesArgs),
        make_tool(search.search_files, SearchFilesArgs),
    ]
